"""What a teacher says about every row of a run, computed once, on disk.

    $LOWBIT_CACHE/teachers/<key>/          ids.bin          [positions, k] int32, the likeliest tokens
                                           log_probs.bin    [positions, k + 1] float16, theirs and that of all others
                                           manifest.json    what the key is made of
    $LOWBIT_CACHE/teachers/.<key>.partial  a run under way, and progress.json: how many rows are on disk

The key is a hash of the teacher's weights and architecture, of all rows and of every setting of `distill`, so a stale
file cannot be read: what changed has another name. Device, kernels and the size of a pass change last bits only. A run
that is killed goes on where it stopped; the folder gets its name when all is there. Rows of a table know their place by
the column `teacher_row`.

float16 has three more bits than bfloat16 for a log-probability, which lies in -65504..0 by a wide margin.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import PreTrainedModel

from trainer.config.distill import DistillConfig, DistillTokens
from trainer.config.errors import require
from trainer.kernels.cross_entropy import CHUNK_ROWS
from trainer.kernels.distill_loss import TopK, top_k_log_probs
from trainer.linear import weights_sha256
from trainer.objective import IGNORE_INDEX, NextTokenLoss
from trainer.sources.cache import cache_dir

log = logging.getLogger(__name__)

COLUMN = "teacher_row"
_FORMAT = 1  # of the files; another number, another key
_LOG_SHARE = 0.1  # of the batches, between two lines about the time left


def followed(labels: Tensor, cu_seqlens: Tensor, tokens: DistillTokens) -> Tensor:
    """Positions [N] int64 whose prediction the teacher is asked about, in order.

    labels      [T] int64 of documents, -100 where there is no target
    cu_seqlens  [B + 1] int32; a document's last token predicts nothing
    """
    if tokens is DistillTokens.targets:
        return (labels[1:] != IGNORE_INDEX).nonzero()[:, 0]
    inside = torch.ones(len(labels) - 1, dtype=torch.bool, device=labels.device)
    inside[cu_seqlens[1:-1].long() - 1] = False
    return inside.nonzero()[:, 0]


@dataclass
class TeacherCache:
    """The finished files, as memory maps."""

    folder: Path
    top_k: int
    starts: np.ndarray
    """[rows + 1] int64: positions of row r are starts[r] to starts[r + 1]."""

    def __post_init__(self) -> None:
        self._ids, self._log_probs = _maps(self.folder, self.top_k, int(self.starts[-1]), mode="r")

    def read(self, rows: Sequence[int]) -> TopK:
        """The teacher at all followed positions of some rows, one row after the other, on the CPU.

        returns  ids [N, k] int32, log_probs [N, k + 1] float16; N = 0 for no rows
        """
        places = [slice(int(self.starts[row]), int(self.starts[row + 1])) for row in rows] or [slice(0, 0)]
        ids, log_probs = (np.concatenate([part[place] for place in places]) for part in (self._ids, self._log_probs))
        return TopK(torch.from_numpy(ids), torch.from_numpy(log_probs))


def with_places(datasets: Sequence[Dataset]) -> list[Dataset]:
    """The tables with the column that leads into a cache over all of them, in this order.

    Chosen rows are copied into memory first: `datasets` would write the copy beside the table, where others read.
    """
    ends = np.cumsum([len(dataset) for dataset in datasets])
    return [
        dataset.flatten_indices(keep_in_memory=True).add_column(COLUMN, np.arange(end - len(dataset), end))
        for dataset, end in zip(datasets, ends, strict=True)
    ]


def cache_teacher(
    model: PreTrainedModel,
    datasets: Sequence[Dataset],
    config: DistillConfig,
    *,
    device: torch.device,
    max_pass_tokens: int,
) -> TeacherCache:
    """The cache of `model` over all rows of `datasets`, computed first if it is not there, by one process at a time.

    model            in 16 bits, on the CPU; it computes on `device`, and comes back
    max_pass_tokens  tokens that go through the model at once
    raises           UserError if top_k exceeds the vocabulary or the disk is too full
    """
    vocab_size = model.config.get_text_config().vocab_size
    require(
        0 < config.top_k <= vocab_size,
        f"distill.top_k={config.top_k} exceeds the model's vocabulary of {vocab_size} tokens; give less, or 0 for the "
        "whole distribution",
    )
    starts = np.cumsum([0, *(_num_followed(labels, config.tokens) for part in datasets for labels in part["labels"])])
    manifest = _manifest(model, datasets, config)
    key = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:32]
    teachers = cache_dir() / "teachers"
    teachers.mkdir(parents=True, exist_ok=True)
    folder = teachers / key
    with _locked(teachers / f".{key}.lock"):
        if _is_complete(folder, config.top_k, int(starts[-1])):
            log.info("teacher  read from %s", folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)  # it has lost bytes since
            partial = teachers / f".{key}.partial"
            _compute(model.to(device), datasets, config, starts, partial, max_pass_tokens=max_pass_tokens)
            model.to("cpu")
            _finish(partial, folder, manifest)
    return TeacherCache(folder, config.top_k, starts)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=1)
    except Timeout:
        log.info("teacher  another process asks it the same; waiting for its answers")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _manifest(model: PreTrainedModel, datasets: Sequence[Dataset], config: DistillConfig) -> dict[str, Any]:
    """All that decides the bytes of a cache."""
    architecture = {**model.config.to_dict(), "_name_or_path": None, "transformers_version": None}
    return {
        "format": _FORMAT,
        "weights_sha256": weights_sha256(model),
        "architecture_sha256": hashlib.sha256(
            json.dumps(architecture, sort_keys=True, default=str).encode()
        ).hexdigest(),
        "rows_sha256": _rows_sha256(datasets),
        "top_k": config.top_k,
        "temperature": config.temperature,
        "tokens": config.tokens.value,
    }


def _rows_sha256(datasets: Sequence[Dataset]) -> str:
    """A hash of every row's length, tokens and labels."""
    digest = hashlib.sha256()
    for dataset in datasets:
        for rows in dataset.with_format("numpy").iter(batch_size=1024):
            digest.update(np.array([len(row) for row in rows["input_ids"]], dtype=np.int64))
            for column in ("input_ids", "labels"):
                digest.update(np.concatenate(rows[column]).astype(np.int64))
    return digest.hexdigest()


def _num_followed(labels: list[int], tokens: DistillTokens) -> int:
    return sum(label != IGNORE_INDEX for label in labels[1:]) if tokens is DistillTokens.targets else len(labels) - 1


def _sizes(top_k: int, num_positions: int) -> dict[str, int]:
    """File name -> bytes"""
    return {"ids.bin": 4 * top_k * num_positions, "log_probs.bin": 2 * (top_k + 1) * num_positions}


def _maps(folder: Path, top_k: int, num_positions: int, *, mode: str) -> tuple[np.memmap, np.memmap]:
    return (
        np.memmap(folder / "ids.bin", np.dtype("<i4"), mode, shape=(num_positions, top_k)),
        np.memmap(folder / "log_probs.bin", np.dtype("<f2"), mode, shape=(num_positions, top_k + 1)),
    )


def _is_complete(folder: Path, top_k: int, num_positions: int) -> bool:
    sizes = _sizes(top_k, num_positions)
    paths = [folder / "manifest.json", *(folder / name for name in sizes)]
    return all(path.is_file() for path in paths) and all(
        (folder / name).stat().st_size == sizes[name] for name in sizes
    )


# ---- running the teacher


def _compute(
    model: PreTrainedModel,
    datasets: Sequence[Dataset],
    config: DistillConfig,
    starts: np.ndarray,
    partial: Path,
    *,
    max_pass_tokens: int,
) -> None:
    """Fill the files in `partial`, from the first row that is not on disk."""
    partial.mkdir(exist_ok=True)
    _reserve(partial, config, int(starts[-1]))
    progress = partial / "progress.json"
    lengths = [len(row) for dataset in datasets for row in dataset["input_ids"]]
    done = json.loads(progress.read_text())["rows"] if progress.is_file() else 0
    if done:
        log.info("teacher  goes on at row %d of %d", done, len(lengths))
    batches = _batches(lengths, max_pass_tokens, first=done)
    teacher, began, told = NextTokenLoss(model), time.monotonic(), 0
    ids, log_probs = _maps(partial, config.top_k, int(starts[-1]), mode="r+")
    for index, rows in enumerate(batches, 1):
        said = _ask(teacher, [_row(datasets, row) for row in rows], config)
        place = slice(int(starts[rows[0]]), int(starts[rows[-1] + 1]))
        ids[place], log_probs[place] = said.ids.numpy(), said.log_probs.numpy()
        _write_progress(progress, (ids, log_probs), rows[-1] + 1)
        if index - told >= _LOG_SHARE * len(batches):
            told = index
            left = (time.monotonic() - began) / told * (len(batches) - told)
            log.info("teacher  %d of %d rows, %.0f s left", rows[-1] + 1, len(lengths), left)


def _reserve(partial: Path, config: DistillConfig, num_positions: int) -> None:
    """Files of their full size; what a killed run wrote stays.

    raises  UserError if the disk cannot hold what is missing
    """
    sizes = _sizes(config.top_k, num_positions)
    paths = {partial / name: size for name, size in sizes.items()}
    written = sum(path.stat().st_blocks * 512 for path in paths if path.is_file())
    needed, free = sum(sizes.values()) - written, shutil.disk_usage(partial).free
    log.info(
        "teacher  %d tokens at %d positions: %.1f MB in %s",
        config.top_k,
        num_positions,
        sum(sizes.values()) / 1e6,
        partial.parent,
    )
    require(
        free >= needed,
        f"distill.top_k={config.top_k} needs {needed / 1e6:.0f} MB in {partial.parent} and its disk has "
        f"{free / 1e6:.0f} MB free; free some, lower distill.top_k, or move the cache: LOWBIT_CACHE=<folder>",
    )
    for path, size in paths.items():
        with path.open("ab") as file:
            file.truncate(size)


def _batches(lengths: Sequence[int], max_tokens: int, *, first: int = 0) -> list[list[int]]:
    """Rows from `first` on, in order, cut so that no batch has more tokens; the same in a run that goes on."""
    batches: list[list[int]] = []
    num_tokens = max_tokens
    for row, length in enumerate(lengths[first:], first):
        if num_tokens + length > max_tokens:
            batches.append([])
            num_tokens = 0
        batches[-1].append(row)
        num_tokens += length
    return batches


def _row(datasets: Sequence[Dataset], row: int) -> dict[str, Any]:
    for dataset in datasets:
        if row < len(dataset):
            return dataset[row]
        row -= len(dataset)
    raise IndexError(row)


@torch.no_grad()
def _ask(teacher: NextTokenLoss, rows: list[dict[str, Any]], config: DistillConfig) -> TopK:
    """[N, k] int32 and [N, k + 1] float16, on the CPU; logits are rounded as the model's own are."""
    batch = teacher.collate(rows, teacher.head.weight.device)
    arguments = batch["input_ids"], batch["cu_seqlens"]
    positions = followed(batch["labels"], batch["cu_seqlens"], config.tokens)
    if teacher.fused_head:
        states = teacher.hidden_states(*arguments, positions).split(CHUNK_ROWS)
        parts = (chunk @ teacher.head.weight.T for chunk in states)  # one after the other: few logits at a time
    else:
        parts = iter(teacher.logits(*arguments, positions).split(CHUNK_ROWS))
    said = [top_k_log_probs(logits, config.top_k, temperature=config.temperature) for logits in parts]
    ids, log_probs = (torch.cat(tensors).cpu() for tensors in zip(*said, strict=True))
    return TopK(ids, log_probs.half())


def _write_progress(path: Path, maps: Sequence[np.memmap], num_rows: int) -> None:
    """The data first, then the number that says it is there, which appears whole."""
    for array in maps:
        array.flush()
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps({"rows": num_rows}))
    os.replace(unfinished, path)


def _finish(partial: Path, folder: Path, manifest: dict[str, Any]) -> None:
    (partial / "progress.json").unlink()
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    partial.rename(folder)
