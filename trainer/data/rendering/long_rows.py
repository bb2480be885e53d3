"""Rows that are longer than `data.max_seq_len`: an error, cut, split or left out, as `data.on_long_row` says."""

from dataclasses import dataclass

from trainer.config.data import DataConfig, OnLongRow
from trainer.data.loader import IGNORED
from trainer.data.rendering.targets import Labelled
from trainer.data.rows import Row, fail


@dataclass(frozen=True)
class TokenizedRow:
    input_ids: list[int]
    """[T], T <= max_seq_len; begins with BOS where the template (chat) or the tokenizer (text) writes one, once."""
    labels: list[int]
    """[T]: the token id where it is a target, else -100; at least one target, never at position 0."""
    origin: str
    """`train.jsonl:12`, `train.jsonl:12 turn 3` or `train.jsonl:12 part 2`."""
    truncated: int
    """Tokens cut off at the end."""


def fit(row: Row, labelled: list[Labelled], config: DataConfig) -> list[TokenizedRow]:
    """Bring what a row became into rows of at most `max_seq_len` tokens.

    returns  at least one row, each with a target
    raises   BadRow: too long, or no target is left
    """
    for ids, labels, _ in labelled:
        labels[: 1 if ids else 0] = [IGNORED]
    longest = max(len(ids) for ids, _, _ in labelled)
    if longest <= config.max_seq_len:
        return _with_targets(row, labelled, config, cut=False)
    match config.long_rows:
        case OnLongRow.truncate:
            return _with_targets(row, labelled, config, cut=True)
        case OnLongRow.split if row.messages is None:
            return _pieces(row, labelled[0], config)
    _refuse(row, longest, config)


def _with_targets(row: Row, labelled: list[Labelled], config: DataConfig, *, cut: bool) -> list[TokenizedRow]:
    limit = config.max_seq_len
    done = [
        TokenizedRow(ids[:limit], labels[:limit], origin, max(0, len(ids) - limit))
        for ids, labels, origin in labelled
        if _num_targets(labels[:limit])
    ]
    if not done:
        ids, labels, _ = labelled[0]
        first = next((index for index, label in enumerate(labels) if label != IGNORED), len(labels))
        if not cut:
            fail(
                row.origin,
                f"no target token is left: the row has {len(ids)} tokens and none of them is to be learned; remove it",
                kind="no target",
            )
        fail(
            row.origin,
            f"no target token is left: the row has {len(ids)} tokens, its first target is token {first + 1}, and "
            f"data.max_seq_len={limit} cuts before it; set data.max_seq_len to at least {first + 1}, or "
            "shorten or remove the row",
            kind="no target",
        )
    return done


def _pieces(row: Row, labelled: Labelled, config: DataConfig) -> list[TokenizedRow]:
    """Pieces that share a token with the one before: the first token of a piece is read and not learned, so each token
    but the text's first is learned once."""
    ids, labels, origin = labelled
    size = config.max_seq_len
    starts = range(0, len(ids) - 1, size - 1)
    pieces = [(ids[start : start + size], [IGNORED, *labels[start + 1 : start + size]]) for start in starts]
    done = [
        TokenizedRow(piece, targets, f"{origin} part {number}", 0)
        for number, (piece, targets) in enumerate(pieces, start=1)
        if _num_targets(targets)
    ]
    return done or _with_targets(row, [labelled], config, cut=False)


def _refuse(row: Row, longest: int, config: DataConfig) -> None:
    skipped = config.long_rows is OnLongRow.skip
    what = f"the row has {longest} tokens, and data.max_seq_len={config.max_seq_len}"
    if config.long_rows is OnLongRow.split:
        what += "; data.on_long_row=split is for texts and token ids, and a conversation cannot be cut into pieces"
    fail(
        row.origin,
        f"{what}; set data.max_seq_len to at least {longest}, or data.on_long_row to truncate (cut at the end), "
        f"{'' if row.messages is not None else 'split (several rows), '}or skip (left out and listed)",
        kind="too long (skipped)" if skipped else "too long",
    )


def _num_targets(labels: list[int]) -> int:
    return sum(label != IGNORED for label in labels)
