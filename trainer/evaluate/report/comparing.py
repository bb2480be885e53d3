"""Runs side by side: final figures with their difference from the first run's, and the settings that differ."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.errors import require
from trainer.evaluate.report.gather import RunStory, gather
from trainer.evaluate.report.outcome import figures_or_none
from trainer.evaluate.report.scales import duration, number, size

_LOWER_IS_BETTER = ("loss", "perplexity", "KL")
_NO_SETTING = ("output_dir", "resume", "tracker", "project")
"""Keys that say nothing of what was trained."""


@dataclass(frozen=True)
class Row:
    """One figure of every run."""

    label: str
    values: list[float | None]
    """In the order of the runs; None where a run has none."""
    form: Callable[[float], str] = number
    lower_is_better: bool | None = None
    """None where neither is."""

    def change(self, place: int) -> str:
        """Against the first run, in per cent; empty where it cannot be said."""
        first, value = self.values[0], self.values[place]
        if place == 0 or first is None or value is None or not first or not math.isfinite(value / first):
            return ""
        return f"{100 * (value / first - 1):+.1f} %"

    def best(self) -> int | None:
        """The run whose figure is best, if one is."""
        known = {place: value for place, value in enumerate(self.values) if value is not None and math.isfinite(value)}
        if self.lower_is_better is None or len(set(known.values())) < 2:
            return None
        return (min if self.lower_is_better else max)(known, key=known.__getitem__)


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    stories: list[RunStory]
    names: list[str]
    """Short, and different from each other."""
    rows: list[Row]
    settings: dict[str, list[Any]]
    """Key -> each run's value, of those that differ."""
    notes: list[str]
    """What makes figures incomparable."""

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON: figures that are not finite are null."""
        runs = [
            {
                "run": str(story.folder),
                "name": name,
                "figures": {row.label: _finite(row.values[place]) for row in self.rows},
                "settings": {key: _jsonable(values[place]) for key, values in self.settings.items()},
            }
            for place, (story, name) in enumerate(zip(self.stories, self.names, strict=True))
        ]
        return {"runs": runs, "notes": self.notes}


def compare(folders: Sequence[Path]) -> Comparison:
    """Read runs and put them side by side.

    raises  UserError if there are fewer than two, or one is no run folder
    """
    folders = list(dict.fromkeys(folders))
    require(len(folders) >= 2, f"{len(folders)} run folder to compare; give at least two")
    stories = [gather(folder) for folder in folders]
    settings = _settings(stories)
    return Comparison(stories, _names(folders), [*_figures(stories), *_costs(stories)], settings, _notes(stories))


def _names(folders: Sequence[Path]) -> list[str]:
    """As few last parts of the paths as tell the runs apart."""
    parts = [folder.absolute().parts for folder in folders]
    depth = next(n for n in range(1, 1 + max(map(len, parts))) if len({each[-n:] for each in parts}) == len(parts))
    return ["/".join(each[-depth:]) for each in parts]


def _figures(stories: Sequence[RunStory]) -> list[Row]:
    """Base and tuned of each run's table."""
    found = [
        {f"{figure.label.strip()}, {which}": getattr(figure, which) for which in ("tuned", "base") for figure in rows}
        for rows in map(figures_or_none, stories)
    ]
    last = [story.steps[-1].get("loss") if story.steps else None for story in stories]
    labels = dict.fromkeys(label for figures in found for label in figures)
    rows = [
        Row(label, [figures.get(label) for figures in found], lower_is_better=_direction(label)) for label in labels
    ]
    return [
        *(row for row in rows if any(value is not None for value in row.values)),
        Row("training loss of the last step", last),
    ]


def _direction(label: str) -> bool | None:
    if label.endswith(", base"):
        return None
    return True if any(word in label for word in _LOWER_IS_BETTER) else False if "accuracy" in label else None


def _costs(stories: Sequence[RunStory]) -> list[Row]:
    def values(name: str) -> list[float | None]:
        return [story.metrics.get(name) for story in stories]

    return [
        Row("steps", [_steps(story) for story in stories]),
        Row("tokens", values("tokens")),
        Row("tokens/s", values("tokens_per_s"), lower_is_better=False),
        Row("time", values("wall_s"), duration),
        Row("peak memory", values("peak_memory_bytes"), size, lower_is_better=True),
    ]


def _steps(story: RunStory) -> int | None:
    return story.metrics.get("steps", story.steps[-1]["step"] if story.steps else None)


def _settings(stories: Sequence[RunStory]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for story in stories for key in story.settings if key not in _NO_SETTING)
    found = {key: [story.settings.get(key, story.defaults.get(key)) for story in stories] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _notes(stories: Sequence[RunStory]) -> list[str]:
    """Losses of other rows say nothing of each other."""
    if len({story.metrics.get("eval_tokens") for story in stories} - {None}) > 1:
        return ["held-out losses are of different rows, and cannot be compared"]
    if len({story.state.get("data_sha256") for story in stories} - {None, ""}) > 1:
        return ["the runs have not the same data; where other rows are held out, losses cannot be compared"]
    return []


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _jsonable(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
