"""Token ids and batches of preferences: from what preference_rows.py read to what trainer/preference.py takes.

Built of chat.py and loader.py. A document is a prompt and one answer, and only the answer has labels.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from datasets import Dataset, Features, List, Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trainer.config.errors import UserError
from trainer.data.chat import tokenize_rows
from trainer.data.formats import Row
from trainer.data.loader import collate
from trainer.data.preference_rows import Labelled, Pair, Preference

_TOKENS = List(Value("int64"))


# ---- rows -> token ids


def tokenize_preferences(
    rows: Sequence[Preference],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_len: int,
    *,
    donors: Sequence[Preference],
    **settings: Any,
) -> Dataset:
    """Tokenize rows and mark their answers; see `chat.tokenize_rows`.

    settings other keys of `data.*`
    donors   labelled answers: whose answers are put to other prompts where `rows` has no other prompt
    returns  Dataset of len(rows), in order: `input_ids` and `labels` of the chosen, or the only, answer; and of pairs
             `rejected_input_ids`, `rejected_labels`; of labelled answers `desirable` (bool) and
             `mismatched_input_ids`, `mismatched_labels`, the prompt with the answer to another one
    raises   UserError naming the row: a cut that leaves nothing of an answer, or no difference between two
    """
    if isinstance(rows[0], Pair):
        columns = _columns(tokenize_rows([row.chosen for row in rows], tokenizer, max_seq_len, **settings), len(rows))
        rejected = tokenize_rows([row.rejected for row in rows], tokenizer, max_seq_len, **settings)
        rejected = _columns(rejected, len(rows), "rejected_")
        for row, one, other in zip(rows, columns["input_ids"], rejected["rejected_input_ids"], strict=True):
            if one == other:
                raise UserError(
                    f"{row.chosen.origin}: the two answers are equal in the first {len(one)} tokens, to which "
                    f"data.max_seq_len={max_seq_len} cuts them; raise it, or remove the row"
                )
        columns |= rejected
    else:
        columns = _columns(tokenize_rows([row.row for row in rows], tokenizer, max_seq_len, **settings), len(rows))
        mismatched = [_mismatched(row, index, rows, donors) for index, row in enumerate(rows)]
        columns |= _columns(tokenize_rows(mismatched, tokenizer, max_seq_len, **settings), len(rows), "mismatched_")
        columns["desirable"] = [row.desirable for row in rows]
    features = {name: _TOKENS if name.endswith(("input_ids", "labels")) else Value("bool") for name in columns}
    columns["origin"] = [(row.chosen if isinstance(row, Pair) else row.row).origin for row in rows]
    return Dataset.from_dict(columns, features=Features({**features, "origin": Value("string")}))


def _columns(dataset: Dataset, num_rows: int, prefix: str = "") -> dict[str, list[Any]]:
    if len(dataset) != num_rows:
        raise UserError(
            f"{num_rows} answers became {len(dataset)} rows: the chat template rewrites the earlier turns of an answer "
            "of several turns; give answers of one turn"
        )
    return {f"{prefix}{name}": dataset[name][:] for name in ("input_ids", "labels")}


def _mismatched(row: Labelled, index: int, rows: Sequence[Labelled], donors: Sequence[Labelled]) -> Row:
    """The row's prompt with the answer of the nearest row before it, in a circle, that has another prompt.

    The answer is fixed by the row and not by its batch, so that the estimate of KTO's z_0 does not depend on how a step
    is cut into batches.
    """
    circle = chain((rows[place] for place in range(index - 1, index - len(rows), -1)), donors)
    other = next((other for other in circle if other.prompt != row.prompt), None)
    if other is None:
        raise UserError(
            f"{row.row.origin}: all rows have one prompt; preference.method=kto compares answers to several"
        )
    answer = other.row.messages[other.row.prompt_len :]
    return replace(row.row, messages=[*row.prompt, *answer])


# ---- rows -> a batch


def collate_pairs(rows: Sequence[dict[str, Any]], device: torch.device | str | None = None) -> dict[str, Tensor]:
    """Lay the documents of pairs one after the other: chosen, rejected, chosen, rejected, ...

    returns  input_ids, labels, cu_seqlens as `loader.collate`, of one document without a target for no rows; and
             reference [pairs, 2] float64 where the rows have it
    """
    documents = [
        {"input_ids": row[f"{side}input_ids"], "labels": row[f"{side}labels"]} for row in rows for side in _SIDES
    ]
    return {**collate(documents, device), **_reference(rows, device)}


_SIDES = ("", "rejected_")


def collate_labelled(rows: Sequence[dict[str, Any]], device: torch.device | str | None = None) -> dict[str, Any]:
    """Lay labelled answers one after the other, and the mismatched ones beside them.

    returns  input_ids, labels, cu_seqlens as `loader.collate`, of one document without a target for no rows; desirable
             [rows] bool; mismatched, a batch of its own; and reference [rows, 2] float64 where the rows have it
    """
    mismatched = [{"input_ids": row["mismatched_input_ids"], "labels": row["mismatched_labels"]} for row in rows]
    return {
        **collate(rows, device),
        "desirable": torch.tensor([row["desirable"] for row in rows], dtype=torch.bool).to(device),
        "mismatched": collate(mismatched, device),
        **_reference(rows, device),
    }


def _reference(rows: Sequence[dict[str, Any]], device: torch.device | str | None) -> dict[str, Tensor]:
    """Log-probabilities that reference.py put beside the rows."""
    if not rows or "reference" not in rows[0]:
        return {}
    return {"reference": torch.tensor([row["reference"] for row in rows], dtype=torch.float64).to(device)}
