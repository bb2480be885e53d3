"""The chat templates of well-known models, out of an installed trl: what we learn is what their tagged variants mark.

trl keeps the templates as models ship them, and beside them variants with generation tags. They are read from the
package's folder; trl itself is not imported. `pip install --no-deps trl` brings them.
"""

import logging
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.config.data import DataConfig, RewrittenHistory
from trainer.config.errors import UserError
from trainer.data.rendering.chat import Renderer
from trainer.data.rendering.long_rows import TokenizedRow
from trainer.data.rows import Row
from trainer.serve.http.chat import render_chat
from trainer.serve.http.protocol import ChatFields

SPEC = find_spec("trl")
FOLDER = Path(SPEC.submodule_search_locations[0]) / "chat_templates" if SPEC else Path("absent")
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the stock templates are in trl, which is not installed")

SPECIAL = re.compile(
    r"<\|[\w▁ ]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_\w+>|\[gMASK\]|<sop>|<\|?turn\|?>|<\|?channel\|?>|<\|?tool\w*\|?>"
)
CALLS = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1, "y": "two"}}}]
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer", "description": "one"}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}]


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: object) -> dict:
    return {"role": "assistant", "content": content, **fields}


RESULT = {"role": "tool", "content": "three: 3", "name": "add", "tool_call_id": "123456789"}
ROWS = {
    "single": [user("one? A"), assistant("A")],
    "several": [user("one?"), assistant("first"), user("first?"), assistant("first"), user("x"), assistant("third")],
    "system": [{"role": "system", "content": "Be brief."}, user("one?"), assistant("first")],
    "tools": [user("1 + 2?"), assistant("", tool_calls=CALLS), RESULT, assistant("Three.")],
    "thinking": [user("one?"), assistant("first", reasoning_content="hm, one")],
    "thoughts": [
        *(user("one?"), assistant("first", reasoning_content="hm, one")),
        *(user("two?"), assistant("second", reasoning_content="hm, two")),
    ],
    "thinking tools": [
        *(user("1 + 2?"), assistant("", tool_calls=CALLS, reasoning_content="I call.")),
        *(RESULT, assistant("Three.", reasoning_content="Now I know.")),
    ],
}
NO_TOOLS = {
    "tools": "leaves out tool_calls|refuses the turns|does not look at tools",
    "thinking tools": "leaves out|refuses the turns",
}
NO_THINKING = dict.fromkeys(
    ["thinking", "thoughts", "thinking tools"], "leaves out reasoning_content|refuses the turns"
)
OPENED = dict.fromkeys(["single", "several", "system"], "goes on with '<think>.* give the turn reasoning_content as")
NO_END = dict.fromkeys(ROWS, "holds no special token")
FAMILIES = {
    "qwen2_5": ("<|im_end|>", NO_THINKING),
    "qwen3": ("<|im_end|>", {}),
    "qwen3_instruct_2507": ("<|im_end|>", NO_THINKING),
    "qwen3_5_think": ("<|im_end|>", {}),
    "qwen3_5_nothink": ("<|im_end|>", dict.fromkeys(NO_THINKING, "does not begin turn 1 with its own")),
    "llama3": ("<|eot_id|>", NO_TOOLS | NO_THINKING),
    "llama3_1": ("<|eot_id|>", NO_THINKING),
    "gemma": ("<end_of_turn>", NO_TOOLS | NO_THINKING | {"system": "System role not supported"}),
    "gemma3": ("<end_of_turn>", NO_TOOLS | NO_THINKING),
    "gptoss": ("<|return|>", {}),
    "phi3": ("<eos>", NO_TOOLS | NO_THINKING),
    "deepseekv3": ("<｜end▁of▁sentence｜>", NO_TOOLS | OPENED),
    "deepseek_r1_distill": (
        "<｜end▁of▁sentence｜>",
        {"tools": "does not begin turn 1", "thinking tools": "does not begin turn 1"} | OPENED,
    ),
    "glm4moe": ("", NO_END),
    "lfm2": ("<|im_end|>", NO_TOOLS | NO_THINKING),
    "lfm2_2_5": ("<|im_end|>", {}),
    "cohere": ("<|END_OF_TURN_TOKEN|>", NO_TOOLS | NO_THINKING),
}
"""Template -> the token that ends a plain turn, and the kinds of rows that it cannot serve, with the reason we give."""
TAGS_TAKE_IN_PROMPT = ("gptoss", "deepseekv3", "deepseek_r1_distill", "qwen2_5", "qwen3_5_think", "qwen3_5_nothink")
"""Their tagged variants also mark what the generation prompt already holds."""
CASES = [(family, kind) for family in FAMILIES for kind in ROWS]


def template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def toy(family: str) -> PreTrainedTokenizerFast:
    """A token a byte, two newlines that merge, and the special tokens that the template speaks of."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*letters, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<bos>", "<eos>", *sorted(set(SPECIAL.findall(template(family))))]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template(family),
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
    )


def make(family: str, kind: str) -> tuple[PreTrainedTokenizerFast, Row, list[TokenizedRow]]:
    tokenizer = toy(family)
    row = Row(ROWS[kind], None, "row", tools=TOOLS if "tools" in kind else None)
    return tokenizer, row, Renderer(tokenizer, DataConfig(max_seq_len=1 << 16)).tokenize(row)


def stretches(mask: list[bool]) -> list[tuple[int, int]]:
    """[start, end) of what is marked."""
    padded = [False, *mask, False]
    edges = [index for index in range(len(mask) + 1) if padded[index] != padded[index + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def learned(row: Row, done: list[TokenizedRow]) -> list[tuple[int, TokenizedRow, int, int]]:
    """Assistant turn, the row that teaches it, and where."""
    turns = [index for index, message in enumerate(row.messages) if message["role"] == "assistant"]
    apart = [int(one.origin.split()[-1]) for one in done if "turn" in one.origin]
    found = []
    for one in done:
        own = [int(one.origin.split()[-1])] if "turn" in one.origin else [turn for turn in turns if turn not in apart]
        spans = stretches([label != -100 for label in one.labels])
        found += [(turn, one, *span) for turn, span in zip(own, spans, strict=True)]
    assert sorted(turn for turn, *_ in found) == turns  # each turn is learned once
    return found


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_what_is_learned(family: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    end, refused = FAMILIES[family]
    caplog.set_level(logging.ERROR)
    if kind in refused:
        with pytest.raises(UserError, match=refused[kind]):
            make(family, kind)
        return
    tokenizer, row, done = make(family, kind)
    for turn, one, first, behind in learned(row, done):
        # The server's prompt, token for token.
        fields = ChatFields(messages=row.messages[:turn], tools=row.tools)
        prompt = render_chat(tokenizer, fields)
        assert one.input_ids[:first] == prompt
        assert one.input_ids.count(tokenizer.bos_token_id) == ("bos_token" in template(family))
        # The turn's own end.
        text = tokenizer.decode(one.input_ids[first:behind])
        assert text.endswith("<|call|>" if family == "gptoss" and row.messages[turn].get("tool_calls") else end)
        assert "<eos>" not in tokenizer.decode(one.input_ids[behind:]).strip()
        message = row.messages[turn]
        assert message["content"] in text and message.get("reasoning_content", "") in text
        theirs = tagged(family, tokenizer, row, turn)
        if theirs is not None:
            assert (tokenizer.decode(prompt) + text).endswith(theirs) and theirs.endswith(text)
            assert theirs == text or family in TAGS_TAKE_IN_PROMPT


def tagged(family: str, tokenizer: PreTrainedTokenizerFast, row: Row, turn: int) -> str | None:
    """What the tags mark of a turn when it is the newest, without what the template writes behind the turn's end; None
    where there are none (Llama 3.1), or where the tagged variant drops the thought (DeepSeek-V3)."""
    thinking = row.messages[turn].get("reasoning_content")
    tags = FOLDER / f"{family}_training.jinja"
    source = template(tags.stem if tags.exists() else family)
    if not re.search(r"{%-? *generation", source) or (thinking and family == "deepseekv3"):
        return None
    messages = row.messages[: turn + 1]
    if thinking and family == "deepseek_r1_distill":  # it knows thinking as a part of the content only
        messages = [*messages[:-1], assistant(f"<think>\n{thinking}\n</think>\n\n{messages[-1]['content']}")]
    done = tokenizer.apply_chat_template(
        messages, tools=row.tools, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
    )
    start, end = stretches([bool(mark) for mark in done["assistant_masks"]])[-1]
    return tokenizer.decode(done["input_ids"][start:end]).rstrip("\n")


@pytest.mark.parametrize(
    ("family", "kind", "num_rows"),
    [
        ("qwen2_5", "several", 1),
        ("qwen3", "several", 3),
        ("qwen3", "thoughts", 2),
        ("gptoss", "several", 3),
        ("gptoss", "thinking tools", 2),
        ("phi3", "several", 3),
        ("deepseek_r1_distill", "thoughts", 2),
        ("lfm2_2_5", "thoughts", 2),
    ],
)
def test_a_rewritten_conversation_is_a_row_for_each_turn(family: str, kind: str, num_rows: int) -> None:
    assert len(make(family, kind)[2]) == num_rows
    if num_rows > 1:
        config = DataConfig(max_seq_len=1 << 16, rewritten_history=RewrittenHistory.error)
        row = Row(ROWS[kind], None, "row", tools=TOOLS if "tools" in kind else None)
        with pytest.raises(UserError, match="row: the chat template rewrites history: turn 1 reads differently"):
            Renderer(toy(family), config).tokenize(row)
