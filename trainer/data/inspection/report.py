"""Everything that is counted, in one object: what the terminal, the page and the JSON line are written from."""

from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.config.data import DataConfig, TrainOn
from trainer.config.preference import Method
from trainer.data.dataset import row_lengths
from trainer.data.inspection.characters import Characters, count_characters
from trainer.data.inspection.conventions import Conventions, count_conventions
from trainer.data.inspection.counts import Duplicates, Lengths, count_lengths, count_targets, find_duplicates
from trainer.data.inspection.gathering import Gathered
from trainer.data.inspection.leaks import Leaks, find_leaks
from trainer.data.ordering.order import RunOrder

MAX_PLACES = 5
"""Of each kind, in the summary."""


@dataclass(frozen=True)
class LeftOut:
    """A row that cannot be trained on."""

    where: str
    kind: str
    what: str
    source: str
    raw: str
    """How the raw row begins."""


@dataclass(frozen=True)
class Inspection:
    """What was counted."""

    max_seq_len: int
    rows: int
    """Rows of tokens to train on."""
    held_out_rows: int
    tokens: int
    targets: int
    lengths: Lengths | None
    """None where there is no row."""
    sources: dict[str, dict[str, Any]]
    """Each source's report, by name."""
    bad_kinds: dict[str, tuple[int, list[str]]]
    """Kind -> how many rows are left out for it, and the first places."""
    bad: list[LeftOut]
    """The first of each source."""
    duplicates: Duplicates
    leaks: Leaks
    characters: Characters
    conventions: Conventions
    packing: dict[str, Any] | None
    refusals: tuple[str, ...]
    first_rows: int | None

    @property
    def target_share(self) -> float:
        return self.targets / self.tokens if self.tokens else 0.0

    def total(self, name: str) -> int:
        """A count of the reports, over the sources."""
        return sum(report[name] for report in self.sources.values())

    def as_dict(self) -> dict[str, Any]:
        """For the JSON line."""
        broken = self.characters.broken()
        return {
            "source_rows": self.total("source_rows"),
            "rows": self.rows,
            "held_out_rows": self.held_out_rows,
            "tokens": self.tokens,
            "trained_tokens": self.targets,
            "trained_share": round(self.target_share, 4),
            "truncated_rows": self.total("truncated_rows"),
            "split_rows": self.total("split_rows"),
            "left_out": {kind: {"rows": n, "first": places} for kind, (n, places) in self.bad_kinds.items()},
            "duplicates": {
                "rows": len(self.duplicates.rows),
                "source_rows": self.total("duplicates"),
                "first": self.duplicates.groups[:MAX_PLACES],
            },
            "lengths": {} if self.lengths is None else self.lengths.as_dict(),
            "packing": self.packing,
            "leaks": _first(self.leaks.as_dict()),
            "scripts": {
                name: {"characters": s.characters, "broken": s.broken, "share": round(s.share, 4)}
                | {"examples": [char for char, _ in s.examples.most_common(MAX_PLACES)]}
                for name, s in broken.items()
            },
            "damaged_characters": self.characters.damaged,
            "template": asdict(self.conventions),
            "sources": self.sources,
            "first_rows_only": self.first_rows,
            "would_train": not self.refusals,
            "refusals": list(self.refusals),
        }


def _first(leaks: dict[str, Any]) -> dict[str, Any]:
    return {key: value[:MAX_PLACES] if isinstance(value, list | tuple) else value for key, value in leaks.items()}


def inspect_rows(
    gathered: Gathered,
    config: DataConfig,
    method: Method,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    rows_per_step: int,
    stop_ids: set[int],
) -> Inspection:
    """Count; some passes over the tokens, a chunk in memory at a time.

    seed           of the run's order, for what packing fills
    rows_per_step  units of a step
    stop_ids       at which the model's generation_config.json lets generation stop
    """
    train, tables = gathered.train, [gathered.train, gathered.held_out]
    lengths = count_lengths(train) if len(train) else None
    leaks = find_leaks(train, gathered.held_out, prompts=config.train_on is not TrainOn.all)
    leaks.copies, leaks.copied = gathered.copies, list(gathered.copied)
    return Inspection(
        *(config.max_seq_len, len(train), len(gathered.held_out)),
        *(0 if lengths is None else lengths.total, count_targets(train), lengths),
        {name: asdict(report) for name, report in gathered.reports.items()},
        _kinds(gathered),
        _left_out(gathered),
        find_duplicates(train),
        leaks,
        count_characters(tables, tokenizer),
        count_conventions(tables, tokenizer, stop_ids),
        _packing(gathered, config, method, seed, rows_per_step),
        gathered.refusals,
        gathered.first_rows,
    )


def _kinds(gathered: Gathered) -> dict[str, tuple[int, list[str]]]:
    counts: dict[str, int] = {}
    for report in gathered.reports.values():
        for kind, count in report.bad.items():
            counts[kind] = counts.get(kind, 0) + count
    places = {kind: [fault.where for fault in gathered.bad if fault.kind == kind][:MAX_PLACES] for kind in counts}
    return {kind: (count, places[kind]) for kind, count in sorted(counts.items(), key=lambda item: -item[1])}


def _left_out(gathered: Gathered) -> list[LeftOut]:
    pairs = zip(gathered.bad, gathered.bad_names, strict=True)
    return [
        LeftOut(fault.where, fault.kind, fault.what, name, gathered.excerpts.get(fault.where, ""))
        for fault, name in pairs
    ]


def _packing(
    gathered: Gathered, config: DataConfig, method: Method, seed: int, rows_per_step: int
) -> dict[str, Any] | None:
    """How full the packed rows of the first epoch are; None where nothing is packed."""
    if not config.packing or config.streaming or not len(gathered.train):
        return None
    capacity = config.max_seq_len * (2 if method.of_pairs else 1)
    lengths = row_lengths(gathered.train)
    order = RunOrder(gathered.sizes, lengths, config, seed, rows_per_step, capacity=capacity)
    return {"units": order.num_units(0), "capacity": capacity, "efficiency": round(order.efficiency(), 4)}
