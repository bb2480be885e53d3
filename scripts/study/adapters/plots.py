"""The report's plots, as small SVG: no background, text and lines of middle brightness, for light and dark pages."""

import statistics
import sys
from pathlib import Path
from typing import Any

from study.adapters.results import LABELS, Results, start_label, start_parts
from study.records import mean_deviation

GREY = "#808080"
COLOURS = {"nf4": "#2a9d8f", "nf3": "#e08a1e", "nf2": "#d1495b"}
OTHER = "#5b8def"


def draw(results: Results, folder: Path) -> dict[str, str]:
    """Write the plots whose cells are there; file name -> title."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("the plots need matplotlib: pip install 'lowbit[bench]', or pip install matplotlib")
    matplotlib.use("Agg")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "lowbit", "font.size": 9, "savefig.transparent": True}
    settings["font.sans-serif"] = ["DejaVu Sans", "sans-serif"]  # the default list of 10 would be in each text
    colours = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    with matplotlib.rc_context(settings | dict.fromkeys(colours, GREY)):
        if results.trained:
            _losses(results, folder / "adapters_loss.svg")
            found["adapters_loss.svg"] = "Held-out loss after training, mean and deviation over seeds"
        if any(name.endswith("_plain") for name in results.starts):
            _errors(results, folder / "adapters_error.svg")
            found["adapters_error.svg"] = "Relative error of each decoder layer before training"
    return found


def _losses(results: Results, path: Path) -> None:
    """A dot a method and a line of one deviation to each side; bases of like bits share a panel and its scale."""
    panels: dict[str, list[str]] = {}
    for name in results.trained:
        panels.setdefault({"nf3": "3 bits", "nf2": "2 bits"}.get(name.rpartition("_")[2], "16 and 4 bits"), []).append(
            name
        )
    figure, columns = _figure(
        height=0.26 * len(results.trained) + 0.5 * len(panels) + 0.3, sizes=list(map(len, panels.values()))
    )
    for axes, (title, names) in zip(columns, panels.items(), strict=True):
        spreads = [mean_deviation(results.losses(name)) for name in names]
        colours = [COLOURS.get(name.rpartition("_")[2], OTHER) for name in names]
        for place, ((mean, deviation), colour) in enumerate(zip(spreads, colours, strict=True)):
            axes.hlines(place, mean - deviation, mean + deviation, color=colour, linewidth=2)
        axes.scatter([mean for mean, _ in spreads], range(len(names)), color=colours, s=22)
        axes.set_yticks(range(len(names)), [LABELS[name] for name in names])
        axes.set_ylim(len(names) - 0.4, -0.6)  # the first one on top
        axes.set_title(title, fontsize=9, loc="left")
        axes.grid(axis="x", color=GREY, alpha=0.25)
    columns[-1].set_xlabel("held-out loss after training, nats a token")
    _save(figure, path)


def _errors(results: Results, path: Path) -> None:
    """A line a start: the mean over the linear layers of each decoder layer."""
    figure, (axes,) = _figure(height=3.2, sizes=[1])
    for name, points in results.starts.items():
        codebook, method = start_parts(name)
        if method not in ("plain", "loftq5"):
            continue
        errors = _by_decoder_layer(points[0]["layer_errors"])
        line = "--" if method == "plain" else "-"
        axes.plot(errors, color=COLOURS[codebook], linestyle=line, linewidth=1.3, label=start_label(name))
    axes.set_xlabel("decoder layer")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("||W - (Q + s B A)|| / ||W||")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GREY, alpha=0.25)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), frameon=False, ncols=3)
    _save(figure, path)


def _by_decoder_layer(errors: dict[str, float]) -> list[float]:
    groups: dict[int, list[float]] = {}
    for name, error in errors.items():
        number = next(int(part) for part in name.split(".") if part.isdigit())
        groups.setdefault(number, []).append(error)
    return [statistics.mean(groups[number]) for number in sorted(groups)]


def _figure(*, height: float, sizes: list[int]) -> tuple[Any, list[Any]]:
    """A figure of panels one below the other, their heights as `sizes`."""
    from matplotlib import pyplot

    settings = {"squeeze": False, "height_ratios": sizes, "layout": "constrained"}
    figure, grid = pyplot.subplots(len(sizes), 1, figsize=(7, height), **settings)
    for axes in grid[:, 0]:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(grid[:, 0])


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
