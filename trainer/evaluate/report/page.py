"""The report of a run: one HTML file that opens offline, for the person who trained and whoever it is sent to."""

import math
from collections.abc import Iterator
from pathlib import Path

from trainer.config.model import ModelConfig, ModelSource, short_name
from trainer.evaluate.report.course import course, layers, load
from trainer.evaluate.report.gather import RunStory, gather
from trainer.evaluate.report.origin import data, repeat, settings
from trainer.evaluate.report.outcome import answers, outcome
from trainer.evaluate.report.scales import duration, number, size
from trainer.page.document import html_document, tiles, write_whole
from trainer.page.text import escaped

REPORT = "report.html"
STYLE = Path(__file__).parent / "page.css"


def write_report(run_dir: Path, path: Path | None = None) -> Path:
    """Write a run's report, into its folder or to `path`; the file is whole or absent.

    raises  UserError if run_dir is no run folder
    """
    path = path or run_dir / REPORT
    write_whole(path, report_page(gather(run_dir)))
    return path


def report_page(story: RunStory) -> str:
    """The page's text."""
    parts = (outcome, course, answers, layers, load, data, settings, repeat)
    body = [*_head(story), *(piece for part in parts for piece in part(story)), _foot()]
    return html_document(f"{model_name(story)}: {story.name}", body, style=STYLE.read_text(encoding="utf-8"))


def model_name(story: RunStory) -> str:
    """The model that was trained, as people call it."""
    source, path = story.settings.get("model.source"), story.settings.get("model.path")
    if source == ModelSource.bundled:
        return short_name(ModelConfig())
    return str(path or source or "run").rstrip("/").rsplit("/", 1)[-1]


def _head(story: RunStory) -> Iterator[str]:
    yield f'<p class="muted">{escaped(story.name)}</p>'
    yield f"<h1>{escaped(headline(story))}</h1>"
    yield tiles(_figures(story))


def headline(story: RunStory) -> str:
    """The run in a sentence."""
    metrics, name = story.metrics, model_name(story)
    before, after = metrics.get("eval_loss_base"), metrics.get("eval_loss")
    if not isinstance(after, float):
        last = story.steps[-1]["step"] if story.steps else 0
        return f"{name}: {last:,} steps so far, and no final figures"
    took = f"{metrics['steps']:,} steps over {metrics['tokens']:,} tokens" if "tokens" in metrics else "training"
    if not isinstance(before, float) or math.isnan(before):
        return f"{name}: {took} end at a held-out loss of {number(after)}"
    way = "brought" if after < before else "left" if after == before else "raised"
    change = f"from {number(before)} to {number(after)}" if after != before else f"at {number(after)}"
    return f"{name}: {took} {way} the held-out loss {change}"


def _figures(story: RunStory) -> Iterator[tuple[str, str, str]]:
    metrics, steps = story.metrics, story.steps
    if "eval_loss" in metrics:
        yield "held-out loss", number(metrics["eval_loss"]), f"base {number(metrics.get('eval_loss_base'))}"
    if "perplexity" in metrics:
        yield "perplexity", number(metrics["perplexity"]), f"base {number(metrics.get('perplexity_base'))}"
    if steps:
        yield "training loss", number(steps[-1].get("loss")), f"of step {steps[-1]['step']:,}"
    if metrics.get("tokens_per_s"):
        yield "tokens/s", number(metrics["tokens_per_s"]), f"{metrics['tokens']:,} tokens"
    if "wall_s" in metrics:
        yield "time", duration(metrics["wall_s"]), "evaluation and export included"
    peak = metrics.get("peak_memory_bytes") or max((y for _, y in story.series("peak_memory_bytes")), default=0)
    if peak:
        yield "peak memory", size(peak), story.state.get("device", "")
    exports = sorted(path.name for path in (story.folder / "export").glob("[!.]*") if path.is_dir())
    if exports:
        yield "exports", str(len(exports)), ", ".join(exports)


def _foot() -> str:
    return '<p class="muted foot">One file, nothing is loaded from elsewhere. Made by lowbit.</p>'
