"""What a person reads at the end of a run."""

from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from trainer.config.schema import Config
from trainer.evaluate.samples import Sample
from trainer.figures import figures


def print_report(
    metrics: dict[str, Any], samples: list[Sample], config: Config, *, run_dir: str, exports: dict[str, str]
) -> None:
    """A table of base against tuned, the samples side by side, and where everything lies.

    metrics  the content of metrics.json
    exports  format -> folder
    """
    console = Console(highlight=False)
    console.print()
    console.print(_figures(metrics, config))
    for sample in samples:
        console.print(_side_by_side(sample))
    if "qat" in metrics:
        console.print(_packed_line(metrics["qat"]))
    minutes, seconds = divmod(round(metrics["wall_s"]), 60)
    console.print(
        f"{metrics['steps']} steps, {metrics['tokens']} tokens at {metrics['tokens_per_s']:.0f} tokens/s, "
        f"{minutes} min {seconds} s in all, peak memory {metrics['peak_memory_bytes'] / 2**30:.2f} GiB"
    )
    console.print(f"run     {run_dir}", soft_wrap=True)
    for name, folder in exports.items():
        console.print(f"{name:<7} {folder}", soft_wrap=True)


def _figures(metrics: dict[str, Any], config: Config) -> Table:
    table = Table(title=f"held-out: {metrics['eval_rows']} rows, {metrics['eval_tokens']} target tokens")
    table.add_column("")
    for name in ("base", "tuned", "change"):
        table.add_column(name, justify="right")
    for label, base, tuned in figures(metrics, config):
        if label == "perplexity":
            table.add_row(label, f"{base:.3f}", f"{tuned:.3f}", f"{100 * (tuned / base - 1):+.1f} %")
        else:
            cells = ["" if cell is None else f"{cell:.4f}" for cell in (base, tuned)]
            table.add_row(label, *cells, f"{tuned - base:+.4f}" if all(cells) else "")
    return table


def _packed_line(qat: dict[str, Any]) -> str:
    """What was quantized, that it is what was trained, and how far apart the programs are that compute it."""
    recovered = "" if qat["recovered"] is None else f", {100 * qat['recovered']:.0f} % of what rounding lost recovered"
    apart = [
        f"{name} {what if isinstance(what, str) else format(what['mean'], '.1e')}"
        for name, what in qat["agreement"].items()
    ]
    return (
        f"{qat['schemes']}, {qat['bits_per_weight']:.2f} bits a weight{recovered}; exported codes are the trained ones "
        f"({qat['packed_sha256'][:12]}); nats a token from the trained model: {', '.join(apart)}"
    )


def _side_by_side(sample: Sample) -> Panel:
    table = Table.grid(padding=(0, 2), expand=True)
    answers = {"held-out answer": sample.reference, "base": sample.base, "tuned": sample.tuned}
    answers = {name: text for name, text in answers.items() if text is not None}
    for name in answers:
        table.add_column(name, ratio=1)
    table.add_row(*(f"[bold]{name}" for name in answers))
    table.add_row(*(_shorten(text) for text in answers.values()))
    return Panel(table, title=_shorten(sample.prompt, 100), title_align="left")


def _shorten(text: str, length: int = 320) -> str:
    text = " ".join(text.split()).replace("[", "\\[")
    return text if len(text) <= length else text[: length - 1] + "…"
