"""Rows without turns: plain text, and token ids that somebody else made."""

from transformers import PreTrainedTokenizerBase

from trainer.data.loader import IGNORED
from trainer.data.rendering.encoding import shared_len
from trainer.data.rendering.targets import Labelled
from trainer.data.rows import Row, fail


def text_row(row: Row, tokenizer: PreTrainedTokenizerBase) -> Labelled:
    """A text with the tokenizer's own special tokens and EOS, each once; its prompt is read and not learned.

    raises  BadRow: the tokenizer has no EOS, or the text is no Unicode
    """
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if eos is None:
        fail(row.origin, "the tokenizer has no eos_token, so a model would never learn to stop; set one", kind="no end")
    ids = _with_special(row, row.text, tokenizer)
    # The text may hold what the tokenizer adds, when somebody rendered it with a chat template before.
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    while ids[-1:] == [eos]:
        ids = ids[:-1]
    ids = [*ids, eos]
    # What the prompt alone is tokenized to as well; the next token is learned.
    start = shared_len(_with_special(row, row.text[: row.prompt_len], tokenizer), ids) if row.prompt_len else 0
    return ids, [IGNORED] * start + ids[start:], row.origin


def _with_special(row: Row, text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        return tokenizer(text, verbose=False)["input_ids"]
    except (TypeError, ValueError) as error:
        fail(row.origin, f"the tokenizer refuses the text ({error}); write valid Unicode", kind="no valid text")


def token_row(row: Row, tokenizer: PreTrainedTokenizerBase) -> Labelled:
    """Token ids and labels as they are given.

    raises  BadRow: an id outside the vocabulary, or a label that is not its token
    """
    ids, labels = row.tokens
    vocabulary = len(tokenizer)
    if outside := [token for token in ids if not 0 <= token < vocabulary]:
        fail(
            row.origin,
            f"token {outside[0]} is outside the vocabulary of {vocabulary}; tokenize with this model's tokenizer",
            kind="token outside the vocabulary",
        )
    if len(ids) != len(labels):
        fail(
            row.origin,
            f"{len(ids)} input_ids and {len(labels)} labels; give a label for each token, its id or {IGNORED}",
            kind="labels do not fit",
        )
    for index, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, IGNORED):
            fail(
                row.origin,
                f"labels[{index}] is {label}, and the token there is {token}; give its id, or {IGNORED} where nothing "
                "is learned (labels are not shifted)",
                kind="labels do not fit",
            )
    return list(ids), list(labels), row.origin
