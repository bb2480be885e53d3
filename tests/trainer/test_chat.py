"""Which tokens are read and which are learned, on toy tokenizers with the templates of well-known models."""

import json
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from trainer.config.data import ColumnsConfig, DataConfig, DataSource, OnLongRow, RewrittenHistory
from trainer.config.errors import UserError
from trainer.config.preference import Method
from trainer.data.opening import open_source, read_examples
from trainer.data.rendering.chat import Renderer, tokenize
from trainer.data.rendering.long_rows import TokenizedRow
from trainer.data.rows import Row
from trainer.serve.http.chat import render_chat
from trainer.serve.http.protocol import ChatFields

DATA = Path(__file__).parents[3] / "shared" / "data"

TURN = "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
GENERATION = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for message in messages %}" + TURN + "{% endfor %}" + GENERATION
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n{% endif %}" + TURN + "{% endfor %}" + GENERATION
)
# Writes BOS itself, trims, and leaves nothing behind the end of a turn.
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start|>{{ message['role'] }}<|end|>\n\n{{ message['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
# Qwen 3: an empty thought before the last answer, none before earlier ones.
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}" + GENERATION
)
# Old style: no generation prompt, no token of its own between turns but EOS, with a space before it.
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token }}[INST] {{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + TURN + "{% endfor %}" + GENERATION
)
NO_END = "{% for message in messages %}\n### {{ message['role'] }}: {{ message['content'] }}{% endfor %}"
FOR_GOOD = "{% for message in messages %}{{ message['role'] }}<|im_end|>{% endfor %}"


CUT = {"on_long_row": OnLongRow.truncate}


def toy(template: str | None, *, adds_bos: bool = False, **special: str) -> PreTrainedTokenizerFast:
    """One token a byte, but "\\n\\n" and "model\\n", which merge as they do in real vocabularies."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = "Ċ"  # the byte-level letter of "\n"
    steps = [(newline, newline), ("m", "o"), ("mo", "d"), ("mod", "e"), ("mode", "l"), ("model", newline)]
    vocab = {token: index for index, token in enumerate([*letters, *("".join(step) for step in steps)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=steps))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    if adds_bos:
        bos = ("<|bos|>", tokenizer.token_to_id("<|bos|>"))
        tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    keys = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", **special}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **keys)


def chat(*contents: str, system: str | None = None) -> Row:
    """Turns of user and assistant by turns."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    first = [] if system is None else [{"role": "system", "content": system}]
    return Row([*first, *turns], None, "train.jsonl:12")


def learned(row: Row, tokenizer: PreTrainedTokenizerFast, max_seq_len: int = 4096) -> list[str]:
    """The stretches of targets, as text."""
    done = tokenize(row, tokenizer, max_seq_len=max_seq_len, **CUT)
    assert len(done.input_ids) <= max_seq_len
    return targets(done, tokenizer)


def targets(done: TokenizedRow, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    assert len(done.input_ids) == len(done.labels)
    assert all(label in (-100, token_id) for token_id, label in zip(done.input_ids, done.labels, strict=True))
    stretches: list[list[int]] = [[]]
    for label in done.labels:
        if label != -100:
            stretches[-1].append(label)
        elif stretches[-1]:
            stretches.append([])
    return [tokenizer.decode(ids) for ids in stretches if ids]


def served(messages: list[dict], tokenizer: PreTrainedTokenizerFast, tools: list[dict] | None = None) -> list[int]:
    """The prompt that the server makes."""
    return render_chat(tokenizer, ChatFields(messages=messages, tools=tools))


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (SMOLLM2, "<|im_end|>"), (LLAMA3, "<|eot|>"), (LLAMA2, " <|im_end|>")],
)
def test_each_answer_and_its_end_are_learned(template: str, end: str) -> None:
    row = chat("one?", "first answer", "two?", "second answer")
    lead = " " if template is LLAMA2 else ""  # written before an answer, so a model must write it too
    expected = [f"{lead}first answer{end}", f"{lead}second answer{end}"]
    assert learned(row, toy(template)) == expected  # and neither the newline behind <|im_end|> nor any header


def test_what_is_read_is_what_the_template_writes() -> None:
    for template in (CHATML, SMOLLM2, LLAMA3, LLAMA2, THINKING):
        tokenizer, row = toy(template, adds_bos=True), chat("one?", "answer")
        text = tokenizer.apply_chat_template(row.messages, tokenize=False)
        assert tokenizer.decode(tokenize(row, tokenizer, max_seq_len=4096).input_ids) == text


def test_default_system_prompt_comes_once_and_only_without_our_own() -> None:
    tokenizer = toy(SMOLLM2)
    for row, count in ((chat("a?", "b", "c?", "d"), 1), (chat("a?", "b", system="Be brief."), 0)):
        text = tokenizer.decode(tokenize(row, tokenizer, max_seq_len=4096).input_ids)
        assert text.count("You are a helpful AI assistant") == count
        assert learned(row, tokenizer) == [
            turn["content"] + "<|im_end|>" for turn in row.messages if turn["role"] == "assistant"
        ]


def test_answer_that_the_user_has_said() -> None:
    # One letter, and it occurs in the user's turn, in the header and in the system prompt.
    assert learned(chat("A or B? Answer A.", "A", "A?", "A"), toy(SMOLLM2)) == ["A<|im_end|>"] * 2


def test_equal_to_the_mask_of_generation_tags() -> None:
    tagged = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
        "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}" + GENERATION
    )
    tokenizer, row = toy(tagged), chat("one?", "first", "two?", "second")
    peer = tokenizer.apply_chat_template(row.messages, return_dict=True, return_assistant_tokens_mask=True)
    done = tokenize(row, tokenizer, max_seq_len=4096)
    assert done.input_ids == peer["input_ids"]
    assert [int(label != -100) for label in done.labels] == peer["assistant_masks"]
    assert sum(peer["assistant_masks"]) == len("first") + len("second") + 2  # a token a byte, two ends


def test_header_that_merges_with_its_newline() -> None:
    template = CHATML.replace("message['role'] }}", "'model' if message['role'] == 'assistant' else 'user' }}")
    tokenizer = toy(template.replace("assistant\n", "model\n"))
    assert "modelĊ" in tokenizer.convert_ids_to_tokens(tokenize(chat("a?", "b"), tokenizer, max_seq_len=99).input_ids)
    assert learned(chat("a?", "b", "c?", "d"), tokenizer) == ["b<|im_end|>", "d<|im_end|>"]


def test_answer_that_merges_with_the_header() -> None:
    # "assistant\n" + "\nYes" holds one token "\n\n", which is half template and never generated behind the prompt. So
    # the turn gets a row of its own, with the prompt's tokens as served; for the turn after it, it is history.
    tokenizer = toy(CHATML)
    assert learned(chat("a?", "\nYes"), tokenizer) == ["\nYes<|im_end|>"]
    rows = Renderer(tokenizer, DataConfig(max_seq_len=99)).tokenize(chat("a?", "\nYes", "b?", "No"))
    assert [row.origin for row in rows] == ["train.jsonl:12", "train.jsonl:12 turn 1"]
    assert [targets(row, tokenizer) for row in rows] == [["No<|im_end|>"], ["\nYes<|im_end|>"]]
    assert ["ĊĊ" in tokenizer.convert_ids_to_tokens(row.input_ids) for row in rows] == [True, False]
    for row, num_turns in zip(rows, (3, 1), strict=True):
        prompt = served(chat("a?", "\nYes", "b?", "No").messages[:num_turns], tokenizer)
        assert row.input_ids[: len(prompt)] == prompt and set(row.labels[: len(prompt)]) == {-100}
    (row,) = Renderer(tokenizer, DataConfig(max_seq_len=99, rewritten_history=RewrittenHistory.error)).tokenize(
        chat("a?", "\nYes", "b?", "No")
    )
    assert targets(row, tokenizer) == ["Yes<|im_end|>", "No<|im_end|>"]


def test_empty_thought_is_learned_in_the_last_turn() -> None:
    assert learned(chat("a?", "b"), toy(THINKING)) == ["<think>\n\n</think>\n\nb<|im_end|>"]


def test_template_that_rewrites_history_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"train\.jsonl:12: the chat template rewrites history: turn 1 .* one assistant turn"
    ):
        tokenize(chat("a?", "b", "c?", "d"), toy(THINKING), max_seq_len=99, rewritten_history=RewrittenHistory.error)


def test_template_with_another_generation_prompt_is_refused() -> None:
    other = CHATML.replace("assistant\n{% endif", "Assistant\n{% endif")
    with pytest.raises(UserError, match=r"does not begin turn 1 with its own generation prompt"):
        tokenize(chat("a?", "b"), toy(other), max_seq_len=99)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, r"train\.jsonl:12: the tokenizer has no chat template; use an instruct model"),
        (
            NO_END,
            r"tokenizer\.chat_template: the template ends an assistant turn with '' .*let the template write eos_token",
        ),
        (FOR_GOOD, r"tokenizer\.chat_template: the template leaves out what the assistant says"),
    ],
)
def test_unusable_templates(template: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("'' ", "'', ")):
        tokenize(chat("a?", "b"), toy(template), max_seq_len=99)


def test_roles_that_the_template_refuses() -> None:
    row = chat("a?", "b", system="Be brief.")
    with pytest.raises(
        UserError, match=r"train\.jsonl:12: .* refuses the turns system, user, assistant: roles must alternate"
    ):
        tokenize(row, toy(ALTERNATING), max_seq_len=99)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_one_bos_in_a_chat(adds_bos: bool) -> None:
    tokenizer = toy(LLAMA3, adds_bos=adds_bos)
    ids = tokenize(chat("a?", "b"), tokenizer, max_seq_len=99).input_ids
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    # ChatML writes none, and then there is none, as when the model is served.
    assert (
        tokenizer.bos_token_id
        not in tokenize(chat("a?", "b"), toy(CHATML, adds_bos=adds_bos), max_seq_len=99).input_ids
    )


@pytest.mark.parametrize("text", ["Once.", "<|bos|>Once.", "Once.<|im_end|>", "<|bos|>Once.<|im_end|><|im_end|>"])
def test_plain_text_has_one_bos_and_one_learned_eos(text: str) -> None:
    tokenizer = toy(None, adds_bos=True)
    done = tokenize(Row(None, text, "train.jsonl:12"), tokenizer, max_seq_len=99)
    assert tokenizer.decode(done.input_ids) == "<|bos|>Once.<|im_end|>"
    assert done.labels == [-100, *done.input_ids[1:]]


def test_plain_text_of_a_tokenizer_without_bos_or_eos() -> None:
    done = tokenize(Row(None, "Once.", "train.jsonl:12"), toy(None), max_seq_len=99)
    assert done.labels == [-100, *done.input_ids[1:]]  # nothing predicts the first token
    with pytest.raises(UserError, match=r"train\.jsonl:12: the tokenizer has no eos_token"):
        tokenize(Row(None, "Once.", "train.jsonl:12"), toy(None, eos_token=None), max_seq_len=99)


def test_pad_that_is_also_the_end_of_turn_is_learned() -> None:
    tokenizer = toy(CHATML)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    done = tokenize(chat("a?", "b", "c?", "d"), tokenizer, max_seq_len=99)
    assert done.labels.count(tokenizer.eos_token_id) == 2  # the two answers' ends, of four turn ends
    assert done.input_ids.count(tokenizer.eos_token_id) == 4


def test_cut_at_the_end() -> None:
    row, tokenizer = chat("a?", "0123456789"), toy(CHATML)
    whole = tokenize(row, tokenizer, max_seq_len=99)
    first = next(index for index, label in enumerate(whole.labels) if label != -100)
    done = tokenize(row, tokenizer, max_seq_len=first + 3, **CUT)
    assert done.input_ids == whole.input_ids[: first + 3] and done.labels == whole.labels[: first + 3]
    assert done.truncated == len(whole.input_ids) - first - 3 and whole.truncated == 0
    assert learned(row, tokenizer, first + 1) == ["0"]
    lengths = (
        rf"has {len(whole.input_ids)} tokens, its first target is token {first + 1}, and data\.max_seq_len=10 cuts"
    )
    message = rf"train\.jsonl:12: no target token is left: the row {lengths} .* to at least {first + 1},"
    with pytest.raises(UserError, match=message):
        tokenize(row, tokenizer, max_seq_len=10, **CUT)
    with pytest.raises(UserError, match=f"max_seq_len={first} "):
        tokenize(row, tokenizer, max_seq_len=first, **CUT)


def test_long_conversation_keeps_the_turns_that_fit() -> None:
    row, tokenizer = chat("a?", "first", "b?" * 50, "second", "c?", "third"), toy(CHATML)
    assert learned(row, tokenizer, 64) == ["first<|im_end|>"]


def test_text_of_one_token_has_no_target() -> None:
    # EOS at position 0 is all there is, and nothing predicts it.
    with pytest.raises(UserError, match="no target token is left: the row has 1 tokens"):
        tokenize(Row(None, "", "train.jsonl:12"), toy(None), max_seq_len=8)


def test_changed_template_is_seen_at_once() -> None:
    tokenizer, rows = toy(CHATML), [chat("a?", "b")]
    before = tokenize(rows[0], tokenizer, max_seq_len=99).input_ids
    tokenizer.chat_template = CHATML.replace("<|im_end|>\n", "<|im_end|>\n\n")
    after = tokenize(rows[0], tokenizer, max_seq_len=99).input_ids
    assert tokenizer.decode(after) == tokenizer.decode(before).replace("<|im_end|>\n", "<|im_end|>\n\n")


def read(path: Path, **settings: object) -> list[Row]:
    config = DataConfig(DataSource.file, str(path), **settings)
    return list(read_examples(open_source(config.sources()[0], config, Method.none)))


@pytest.mark.skipif(not DATA.is_dir(), reason="the data folder beside the checkout is absent")
def test_real_rows_at_speed() -> None:
    rows = read(
        DATA / "gsm8k_train.jsonl", columns=ColumnsConfig(prompt="question", completion="answer"), max_rows=1000
    )
    tokenizer = toy(SMOLLM2)
    start = time.process_time()
    done = [tokenize(row, tokenizer, max_seq_len=4096) for row in rows]
    assert (
        time.process_time() - start < 6
    )  # 0.7 ms a row with a real vocabulary, so 0.7 s; a quadratic way takes minutes
    for row, tokens in zip(rows, done, strict=True):
        answer = tokenizer.decode([label for label in tokens.labels if label != -100])
        assert answer == row.messages[1]["content"] + "<|im_end|>"


@pytest.mark.skipif(not DATA.is_dir(), reason="the data folder beside the checkout is absent")
def test_real_instructions(tmp_path: Path) -> None:
    tasks = [json.loads(line) for line in (DATA / "self_instruct_seed_tasks.jsonl").read_text("utf-8").splitlines()]
    rows = [{"prompt": task["instruction"], "completion": task["instances"][0]["output"]} for task in tasks]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    tokenizer = toy(LLAMA3, adds_bos=True)
    for row in read(path):
        assert learned(row, tokenizer) == [row.messages[1]["content"].strip() + "<|eot|>"]  # the template trims
