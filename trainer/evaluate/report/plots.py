"""The report's charts as PNG files, for notebooks and slides; matplotlib draws them where it is installed.

It is imported when a plot is asked for and never before: a run does not wait for it.
"""

from importlib.util import find_spec
from pathlib import Path

from trainer.evaluate.report.charts import Series, smoothed
from trainer.evaluate.report.course import losses, memory
from trainer.evaluate.report.gather import RunStory, gather

PLOTS = "plots"
DPI = 150
COLOURS = ("#2f5bc4", "#c2571a", "#1f8a5b", "#8a4fb8", "#b23a67", "#6b6f1d")


def write_plots(run_dir: Path) -> list[Path]:
    """Draw into <run folder>/plots; returns the files, none where matplotlib is missing or there is nothing to draw."""
    if find_spec("matplotlib") is None:
        return []
    story, folder = gather(run_dir), run_dir / PLOTS
    folder.mkdir(exist_ok=True)
    written = [_plot(folder / f"{name}.png", title, series) for name, (title, series) in _charts(story).items()]
    return [path for path in written if path is not None]


def _charts(story: RunStory) -> dict[str, tuple[str, list[Series]]]:
    return {
        "loss": ("loss", losses(story)),
        "learning_rate": ("learning rate", [Series("learning rate", story.series("lr"))]),
        "grad_norm": ("gradient norm", [Series("gradient norm", story.series("grad_norm"), noisy=True)]),
        "tokens_per_s": ("tokens/s", [Series("tokens/s", story.series("tokens_per_s"), noisy=True)]),
        "memory": ("peak memory so far, GiB", [Series("peak memory", memory(story))]),
    }


def _plot(path: Path, title: str, series: list[Series]) -> Path | None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: a notebook's own backend stays as it is
    from matplotlib.figure import Figure

    shown = [each for each in series if each.finite()]
    if not shown:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for each in shown:
        xs, ys = zip(*each.points, strict=True)
        smooth = each.noisy and len(xs) >= 60
        style = {"color": COLOURS[each.colour % len(COLOURS)], "alpha": 0.3 if smooth else 1.0}
        axes.plot(xs, ys, marker="o" if each.marks else None, label=None if smooth else each.name, **style)
        if smooth:
            axes.plot(*zip(*smoothed(each.finite()), strict=True), color=style["color"], label=each.name)
    axes.set(title=title, xlabel="step")
    axes.grid(alpha=0.3)
    if len(shown) > 1:
        axes.legend()
    hidden = path.with_name(f".{path.name}")
    figure.savefig(hidden, dpi=DPI, format="png")
    return hidden.replace(path)
