"""`data.*` that decide what is learned: turns, thinking, long rows, rewritten history; and the renderer's identity."""

import pickle
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import trainer.data.rendering.template as template_module
from tests.trainer.test_chat import CHATML, LLAMA3, SMOLLM2, chat, served, targets, toy
from trainer.config.data import DataConfig, OnLongRow, RewrittenHistory, TrainOn
from trainer.config.errors import UserError
from trainer.data.rendering.chat import Renderer
from trainer.data.rendering.long_rows import TokenizedRow
from trainer.data.rows import BadRow, Row

# Qwen 3's way: thinking is written into the newest turn only, and cut out of earlier ones.
STRIPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set said = m.content %}{% set thought = m.reasoning_content %}"
    "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set said = said.split('</think>')[-1] | trim %}{% endif %}"
    "{% if loop.last and thought %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
    "{% for call in m.tool_calls %}<call>{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# gpt-oss's way: channels for thinking and answer, another end in the newest turn.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if loop.last and m.thinking %}<|start|>assistant:thought<|end|>{{ m.thinking }}<|im_end|>{% endif %}"
    "<|start|>assistant:final<|end|>{{ m.content }}{{ '<|eot|>' if loop.last else '<|im_end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|end|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# DeepSeek-R1's way: the prompt opens a thought, and no turn shows one.
OPENING = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>{{ m.content.split('</think>')[-1] | trim }}"
    "{{ '<|eot|>' if m.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|><think>\n{% endif %}"
)
TOOLED = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
USED_TOOL = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "three", "name": "add"},
    {"role": "assistant", "content": "Three."},
]


def render(row: Row, tokenizer: PreTrainedTokenizerFast, **keys: object) -> list[TokenizedRow]:
    return Renderer(tokenizer, DataConfig(**{"max_seq_len": 4096, **keys})).tokenize(row)


def learned(row: Row, tokenizer: PreTrainedTokenizerFast, **keys: object) -> list[list[str]]:
    return [targets(one, tokenizer) for one in render(row, tokenizer, **keys)]


def thinking(*turns: tuple[str, str, str]) -> Row:
    """Turns of question, thought and answer."""
    messages = []
    for question, thought, answer in turns:
        messages += [{"role": "user", "content": question}]
        messages += [{"role": "assistant", "content": answer, "reasoning_content": thought}]
    return Row(messages, None, "train.jsonl:12")


# ---- which turns


def test_the_last_turn_only() -> None:
    row = chat("one?", "first", "two?", "second")
    assert learned(row, toy(CHATML), train_on=TrainOn.last) == [["second<|im_end|>"]]
    assert learned(row, toy(CHATML)) == [["first<|im_end|>", "second<|im_end|>"]]


def test_all_that_is_said() -> None:
    row, tokenizer = chat("one?", "first", "two?", "second"), toy(LLAMA3)
    (done,) = render(row, tokenizer, train_on=TrainOn.all)
    assert done.input_ids[0] == tokenizer.bos_token_id and done.labels == [-100, *done.input_ids[1:]]


@pytest.mark.parametrize("train_on", TrainOn)
@pytest.mark.parametrize("place", range(4))
def test_a_turn_that_says_so_is_never_learned(train_on: TrainOn, place: int) -> None:
    row = chat("one?", "first", "two?", "second")
    row.messages[place]["train"] = False
    if train_on is TrainOn.last and place == 3:
        with pytest.raises(BadRow, match=r'train\.jsonl:12: no target token is left: data\.train_on=last .*"train"'):
            render(row, toy(CHATML), train_on=train_on)
        return
    (done,) = render(row, toy(CHATML), train_on=train_on)
    said = row.messages[place]["content"]
    assert not any(said in text for text in targets(done, toy(CHATML)))
    assert done.input_ids == render(chat("one?", "first", "two?", "second"), toy(CHATML))[0].input_ids
    others = [row.messages[1], row.messages[3]] if train_on is not TrainOn.last else [row.messages[3]]
    for message in others:
        assert any(message["content"] in text for text in targets(done, toy(CHATML))) == (message.get("train") is None)


def test_a_row_that_begins_with_the_assistant() -> None:
    row = Row([{"role": "assistant", "content": "Hello"}, *chat("a?", "b").messages], None, "train.jsonl:12")
    with pytest.raises(BadRow, match=r'begins with an assistant turn, before which a server has no prompt.*"train"'):
        render(row, toy(CHATML))
    row.messages[0]["train"] = False
    assert learned(row, toy(CHATML)) == [["b<|im_end|>"]]


# ---- rewritten history


@pytest.mark.parametrize(
    ("template", "end", "thought"),
    [
        (STRIPPING, "<|im_end|>", "<think>\n{}\n</think>\n\n{}"),
        (CHANNELS, "<|eot|>", ":thought<|end|>{}<|im_end|><|start|>assistant:final<|end|>{}"),
        (OPENING, "<|eot|>", "{}\n</think>\n\n{}"),
    ],
)
def test_each_turn_as_the_server_sees_it(template: str, end: str, thought: str) -> None:
    row, tokenizer = thinking(("one?", "hm, 1", "first"), ("two?", "hm, 2", "second")), toy(template)
    rows = render(row, tokenizer)
    assert [one.origin for one in rows] == ["train.jsonl:12 turn 1", "train.jsonl:12 turn 3"]
    assert [targets(one, tokenizer) for one in rows] == [
        [thought.format("hm, 1", "first") + end],
        [thought.format("hm, 2", "second") + end],
    ]
    for one, turn in zip(rows, (1, 3), strict=True):
        prompt = served(row.messages[:turn], tokenizer)
        assert one.input_ids[: len(prompt)] == prompt and one.labels[len(prompt)] != -100
        assert "hm, 1" not in tokenizer.decode(prompt)
    with pytest.raises(
        BadRow, match=r"rewrites history: turn 1 .*data\.rewritten_history=split, give rows with one as"
    ):
        render(row, tokenizer, rewritten_history=RewrittenHistory.error)
    assert [one.origin for one in render(row, tokenizer, train_on=TrainOn.last)] == ["train.jsonl:12"]


def test_thinking_within_content_is_the_same() -> None:
    inline = chat("one?", "<think>\nhm, 1\n</think>\n\nfirst", "two?", "<think>\nhm, 2\n</think>\n\nsecond")
    apart = thinking(("one?", "hm, 1", "first"), ("two?", "hm, 2", "second"))
    for template in (STRIPPING, OPENING):
        assert render(inline, toy(template)) == render(apart, toy(template))


def test_each_token_is_learned_once_where_all_is_learned() -> None:
    row, tokenizer = thinking(("one?", "hm, 1", "first"), ("two?", "hm, 2", "second")), toy(STRIPPING)
    first, second = render(row, tokenizer, train_on=TrainOn.all)
    assert targets(first, tokenizer)[0].startswith("user\none?<|im_end|>")  # not <|im_start|>: nothing stands before it
    assert targets(second, tokenizer) == [
        "<|im_end|>\n<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n<think>\nhm, 2\n</think>\n\nsecond"
        "<|im_end|>\n"
    ]


def test_what_is_not_to_be_learned_is_not_in_any_part() -> None:
    row = thinking(("one?", "hm, 1", "first"), ("two?", "hm, 2", "second"), ("three?", "hm, 3", "third"))
    for place in (0, 2):
        row.messages[place]["train"] = False
    for template in (STRIPPING, CHANNELS):
        texts = [text for part in learned(row, toy(template), train_on=TrainOn.all) for text in part]
        assert not any(question in text for text in texts for question in ("one?", "two?"))
        assert all(
            any(said in text for text in texts) for said in ("hm, 1", "first", "hm, 2", "second", "three?", "third")
        )


def test_an_opened_thought_that_the_row_has_not() -> None:
    with pytest.raises(
        BadRow,
        match=r"server's prompt goes on with '<think>\\n' where the row has 'b<\|eot\|>'; give .*reasoning_content",
    ):
        render(chat("a?", "b"), toy(OPENING))


# ---- thinking


@pytest.mark.parametrize(
    ("template", "row", "expected"),
    [
        (STRIPPING, thinking(("one?", "hm", "A")), [["A<|im_end|>"]]),
        (STRIPPING, chat("one?", "<think>\nhm\n</think>\n\nA"), [["\n\nA<|im_end|>"]]),
        (CHANNELS, thinking(("one?", "hm", "A")), [[":final<|end|>A<|eot|>"]]),
        (OPENING, thinking(("one?", "hm", "A")), [["\n\nA<|eot|>"]]),
        (CHATML, chat("<think>x</think>?", "<think>hm</think>A<think>h</think>B"), [["A", "B<|im_end|>"]]),
        (CHATML, chat("hm?", "hm <think>hm</think>hm"), [["hm ", "hm<|im_end|>"]]),
        (CHATML, chat("a?", "b"), [["b<|im_end|>"]]),
        (CHATML, chat("a?", "no </think> tag <think>"), [["no </think> tag <think><|im_end|>"]]),
    ],
)
def test_thinking_is_read_and_not_learned(template: str, row: Row, expected: list[list[str]]) -> None:
    tokenizer = toy(template)
    (whole,), (done,) = render(row, tokenizer), render(row, tokenizer, train_thinking=False)
    assert done.input_ids == whole.input_ids
    assert targets(done, tokenizer) == expected[0]


# ---- what a template leaves out


DROPS_SYSTEM = CHATML.replace(
    "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
)
DROPS_TOOL = TOOLED.replace("{{ m.content }}", "{{ '' if m.role == 'tool' else m.content }}")
FIRST_CALL = TOOLED.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
NO_ARGUMENTS = TOOLED.replace("call.function | tojson", "call.function.name")


@pytest.mark.parametrize(
    ("template", "row", "what"),
    [
        (DROPS_SYSTEM, chat("a?", "b", system="Be brief."), r"content of turn 0 \(system\)"),
        (CHATML, thinking(("a?", "hm", "b")), r"reasoning_content of turn 1 \(assistant\)"),
        (CHATML, Row(USED_TOOL, None, "train.jsonl:12"), r"tool_calls\[0\] of turn 1"),
        (DROPS_TOOL, Row(USED_TOOL, None, "train.jsonl:12"), r"content of turn 2 \(tool\)"),
        (NO_ARGUMENTS, Row(USED_TOOL, None, "train.jsonl:12"), r"tool_calls\[0\].function.arguments of turn 1"),
        (
            FIRST_CALL,
            Row([USED_TOOL[0], {**USED_TOOL[1], "tool_calls": CALLS * 2}], None, "train.jsonl:12"),
            r"tool_calls\[1\] of turn 1",
        ),
        (OPENING, chat("a?</think>b", "<think>\nx</think>c"), r"content of turn 0 \(user\)"),
    ],
)
def test_what_is_left_out_is_named(template: str, row: Row, what: str) -> None:
    with pytest.raises(BadRow, match=rf"train\.jsonl:12: the chat template leaves out {what}") as caught:
        render(row, toy(template))
    assert caught.value.kind.startswith("template leaves out")


def test_tools_are_shown_or_refused() -> None:
    row = Row(USED_TOOL, None, "train.jsonl:12", tools=TOOLS)
    assert learned(row, toy(TOOLED)) == [
        ['<call>{"name": "add", "arguments": {"x": 1}}</call><|im_end|>', "Three.<|im_end|>"]
    ]
    blind = TOOLED.replace("{% if tools %}", "{% if false %}")
    with pytest.raises(BadRow, match="does not look at tools"):
        render(row, toy(blind))


def test_the_server_gives_what_was_trained() -> None:
    """A client sends arguments as a string and an id of its own order; ids are those of the row's form."""
    tokenizer, dumps = toy(TOOLED.replace("call.function", "call")), Row(USED_TOOL, None, "train.jsonl:12", tools=TOOLS)
    (done,) = render(dumps, tokenizer)
    sent = [dict(message) for message in USED_TOOL]
    sent[1] = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"arguments": '{"x": 1}', "name": "add"}, "type": "function"}],
    }
    prompt = served(sent[:3], tokenizer, TOOLS)
    assert done.input_ids[: len(prompt)] == prompt and done.labels[len(prompt) - 1] == -100 != done.labels[len(prompt)]


# ---- BOS


def test_a_template_that_writes_bos_twice() -> None:
    tokenizer = toy("{{ bos_token }}" + LLAMA3, adds_bos=True)
    row = chat("a?", "b", "c?", "d")
    (done,) = render(row, tokenizer)
    assert done.input_ids == render(row, toy(LLAMA3))[0].input_ids
    for turn in (1, 3):
        prompt = served(row.messages[:turn], tokenizer)
        assert prompt.count(tokenizer.bos_token_id) == 1 and done.input_ids[: len(prompt)] == prompt
    assert targets(done, tokenizer) == ["b<|eot|>", "d<|eot|>"]


# ---- generation tags


def test_tags_that_agree() -> None:
    row = chat("one?", "first", "two?", "second")
    assert learned(row, toy(TAGGED)) == [["first<|im_end|>", "second<|im_end|>"]]
    wide = TAGGED.replace("{% endgeneration %}\n", "\n{% endgeneration %}")  # the newline behind the end
    narrow = TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    assert learned(row, toy(wide)) == learned(row, toy(narrow)) == [["first<|im_end|>", "second<|im_end|>"]]
    assert learned(row, toy(TAGGED), train_on=TrainOn.last) == [["second<|im_end|>"]]


def test_tags_that_disagree_are_shown() -> None:
    row = chat("one?", "first", "two?", "second")
    part = TAGGED.replace(
        "{{ m.content }}<|im_end|>{% end",
        "{{ m.content[:3] }}{% endgeneration %}{{ m.content[3:] }}{% generation %}<|im_end|>{% end",
    )
    with pytest.raises(
        BadRow, match=r"generation tags mark 'fir<\|im_end\|>.*' of turn 1, and the turn is 'first<\|im_end\|>'"
    ):
        render(row, toy(part))
    users = TAGGED.replace(
        "{{ m.content }}<|im_end|>\n{% endif", "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n{% endif"
    )
    with pytest.raises(BadRow, match=r"generation tags mark 'o' of turn 0 \(user\)"):
        render(row, toy(users))


# ---- long rows


def test_long_rows() -> None:
    """Cut by default, and with packing an error; or as data.on_long_row says."""
    row, tokenizer = chat("a?", "0123456789"), toy(CHATML)
    (whole,) = render(row, tokenizer)
    size = len(whole.input_ids)
    assert render(row, tokenizer, max_seq_len=size) == [whole]
    expected = rf"has {size} tokens, and data\.max_seq_len={size - 1}; .* at least {size}, or data\.on_long_row to tru"
    (cut,) = render(row, tokenizer, max_seq_len=size - 1)
    assert (cut.input_ids, cut.truncated) == (whole.input_ids[:-1], 1)
    for chosen in ({"on_long_row": OnLongRow.error}, {"packing": True}):
        with pytest.raises(BadRow, match=expected) as caught:
            render(row, tokenizer, max_seq_len=size - 1, **chosen)
        assert caught.value.kind == "too long"
    with pytest.raises(BadRow, match="left out and listed") as caught:
        render(row, tokenizer, max_seq_len=size - 1, on_long_row=OnLongRow.skip)
    assert caught.value.kind == "too long (skipped)"
    with pytest.raises(BadRow, match="a conversation cannot be cut into pieces"):
        render(row, tokenizer, max_seq_len=size - 1, on_long_row=OnLongRow.split)
    (cut,) = render(row, tokenizer, max_seq_len=size - 3, on_long_row=OnLongRow.truncate)
    assert cut.truncated == 3 and cut.input_ids == whole.input_ids[:-3]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(8, 40), st.integers(2, 200), st.integers(0, 30))
def test_nothing_is_lost_between_pieces(max_seq_len: int, num_chars: int, prompt_len: int) -> None:
    text = "".join(chr(97 + index % 26) for index in range(num_chars))
    row = Row(None, text, "notes.txt:1", prompt_len=min(prompt_len, num_chars - 1))
    tokenizer = toy(None)
    (whole,) = render(row, tokenizer)
    pieces = render(row, tokenizer, max_seq_len=max_seq_len, on_long_row=OnLongRow.split)
    assert all(len(piece.input_ids) <= max_seq_len and piece.labels[0] == -100 for piece in pieces)
    assert all(any(label != -100 for label in piece.labels) and not piece.truncated for piece in pieces)
    found = [label for piece in pieces for label in piece.labels if label != -100]
    assert found == [label for label in whole.labels if label != -100]
    if len(pieces) > 1:
        assert pieces[0].origin.startswith("notes.txt:1 part ")


# ---- token ids


def test_token_ids_stay_as_they_are() -> None:
    tokenizer = toy(None)
    ids = list(range(20, 40))
    labels = [-100 if index % 3 else token for index, token in enumerate(ids)]
    (done,) = render(Row(None, None, "train.jsonl:12", tokens=(ids, labels)), tokenizer)
    assert done.input_ids == ids and done.labels == [-100, *labels[1:]]
    pieces = render(
        Row(None, None, "train.jsonl:12", tokens=(ids, labels)), tokenizer, max_seq_len=8, on_long_row=OnLongRow.split
    )
    assert [label for piece in pieces for label in piece.labels if label != -100] == [
        label for label in labels[1:] if label != -100
    ]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (([1, 9999], [1, 9999]), "token 9999 is outside the vocabulary of 268"),
        (([1, -1], [1, -1]), "token -1 is outside"),
        (([1, 2], [1]), "2 input_ids and 1 labels"),
        (([1, 2], [2, 3]), r"labels\[0\] is 2, and the token there is 1; .*labels are not shifted"),
        (([1, 2], [1, -100]), "no target token is left"),
        (([], []), "no target token is left"),
    ],
)
def test_token_ids_that_cannot_be(tokens: tuple[list[int], list[int]], message: str) -> None:
    with pytest.raises(BadRow, match=rf"train\.jsonl:12: .*{message}"):
        render(Row(None, None, "train.jsonl:12", tokens=tokens), toy(None))


# ---- identity


DATED = "{{ strftime_now('%d %B %Y') }}" + CHATML


class Tomorrow(date):
    @classmethod
    def today(cls) -> date:
        return date(2031, 5, 6)


def test_one_day_for_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer, plain = (Renderer(toy(template), DataConfig()) for template in (DATED, CHATML))
    before = renderer.tokenize(chat("a?", "b"))
    monkeypatch.setattr(template_module, "date", Tomorrow)
    assert (
        renderer.tokenize(chat("a?", "b")) == pickle.loads(pickle.dumps(renderer)).tokenize(chat("a?", "b")) == before
    )
    later = Renderer(toy(DATED), DataConfig())
    assert toy(DATED).decode(later.tokenize(chat("a?", "b"))[0].input_ids).startswith("06 May 2031<|im_start|>")
    assert later.fingerprint() != renderer.fingerprint()
    assert Renderer(toy(CHATML), DataConfig()).fingerprint() == plain.fingerprint()


def test_fingerprint_holds_what_decides_ids(tmp_path: Path) -> None:
    def fingerprint(tokenizer: PreTrainedTokenizerFast | None = None, **keys: object) -> str:
        return Renderer(tokenizer or toy(CHATML), DataConfig(**keys)).fingerprint()

    first = fingerprint()
    assert len(first) == 64 and first == fingerprint() == fingerprint(seed_free := toy(CHATML))
    seed_free.save_pretrained(tmp_path)
    assert fingerprint(AutoTokenizer.from_pretrained(tmp_path)) == first
    seed_free("a", truncation=True, max_length=8, padding="max_length")  # how it was called is not what it is
    assert fingerprint(seed_free) == first
    more = toy(CHATML)
    more.add_tokens(["<new>"])
    different = {
        fingerprint(toy(CHATML.replace("\n", "\n\n", 1))),
        fingerprint(toy(CHATML, eos_token="<|eot|>")),
        fingerprint(toy(CHATML, adds_bos=True)),
        fingerprint(more),
        fingerprint(max_seq_len=513),
        fingerprint(on_long_row=OnLongRow.error),
        fingerprint(train_on=TrainOn.last),
        fingerprint(train_thinking=False),
        fingerprint(rewritten_history=RewrittenHistory.error),
    }
    assert len(different | {first}) == 10
    assert fingerprint(shuffle=False, num_workers=3) == first  # decides no ids
    assert fingerprint(on_long_row=OnLongRow.truncate) == first  # that is the default


# ---- any conversation

PIECES = [
    "",
    "a",
    "A ",
    "\n",
    "\n\n",
    "<|im_end|>",
    "<|bos|>",
    "<think>",
    "</think>",
    "<|im_start|>assistant\n",
    "é",
    "👍",
]
CONTENT = st.lists(st.sampled_from([*PIECES, "\ud800"]), max_size=4).map("".join)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": CONTENT},
    optional={
        "reasoning_content": CONTENT,
        "tool_calls": st.just(CALLS),
        "train": st.booleans(),
    },
)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    st.sampled_from([CHATML, SMOLLM2, LLAMA3, STRIPPING, CHANNELS, OPENING, TOOLED, TAGGED]),
    st.lists(MESSAGE, min_size=1, max_size=5),
    st.sampled_from(TrainOn),
    st.booleans(),
)
def test_any_conversation_is_served_as_trained_or_refused(
    template: str, messages: list[dict], train_on: TrainOn, train_thinking: bool
) -> None:
    tokenizer = toy(template)
    try:
        rows = render(Row(messages, None, "row"), tokenizer, train_on=train_on, train_thinking=train_thinking)
    except UserError:
        return
    ends = {tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|eot|>")}
    for row in rows:
        assert len(row.input_ids) == len(row.labels) and row.labels[0] == -100
        assert {label for label in row.labels if label != -100} <= set(row.input_ids)
        if train_on is not TrainOn.all and train_thinking:
            first = next(index for index, label in enumerate(row.labels) if label != -100)
            prompts = [served(messages[:turn], tokenizer) for turn in range(1, len(messages))]
            assert row.input_ids[:first] in prompts
            last = [label for label in row.labels if label != -100][-1]
            assert last in ends
