"""Batches of preferences: from rows of tokens to what trainer/preference.py takes.

A document is a prompt and one answer, and only the answer has labels.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from datasets import Dataset, Features, List, Value
from torch import Tensor

from trainer.config.errors import UserError
from trainer.data.loader import IGNORED, collate

# ---- what KTO compares with


def with_mismatched(rows: Dataset, *, donors: Dataset, max_seq_len: int) -> Dataset:
    """Labelled answers with `mismatched_input_ids` and `mismatched_labels`: their prompts with answers to other ones.

    The other answer is that of the nearest row before, in a circle, that has another prompt. It is fixed by the row and
    not by its batch, so that the estimate of KTO's z_0 does not depend on how a step is cut into batches.

    rows         as tokenizing.py makes them, in memory from now on
    donors       whose answers are put to other prompts where `rows` has no other prompt
    max_seq_len  tokens; an answer is cut where the two are longer together
    raises       UserError if all prompts are one
    """
    own, others = _exchanges(rows), _exchanges(donors)
    added: dict[str, list[list[int]]] = {"mismatched_input_ids": [], "mismatched_labels": []}
    for index, (prompt, _, _) in enumerate(own):
        circle = chain((own[place] for place in range(index - 1, index - len(own), -1)), others)
        found = next((other for other in circle if other[0] != prompt), None)
        if found is None:
            raise UserError(
                f"{rows[index]['origin']}: all rows have one prompt; preference.method=kto compares answers to several"
            )
        added["mismatched_input_ids"].append([*prompt, *found[1]][:max_seq_len])
        added["mismatched_labels"].append([*[IGNORED] * len(prompt), *found[2]][:max_seq_len])
    features = Features({**rows.features, **{name: List(Value("int32")) for name in added}})
    return Dataset.from_dict({**{name: rows[name][:] for name in rows.column_names}, **added}, features=features)


def _exchanges(rows: Dataset) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, answer and the answer's labels of each row, cut before its first target."""
    starts = (next(place for place, label in enumerate(labels) if label != IGNORED) for labels in rows["labels"])
    columns = zip(rows["input_ids"], rows["labels"], starts, strict=True)
    return [(ids[:start], ids[start:], labels[start:]) for ids, labels, start in columns]


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
