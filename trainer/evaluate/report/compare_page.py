"""A comparison for a terminal, and as one HTML file with the runs' curves over each other."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.evaluate.report.charts import NUM_COLOURS, Series, line_chart
from trainer.evaluate.report.comparing import Comparison, Row
from trainer.evaluate.report.course import losses, memory
from trainer.evaluate.report.origin import shown
from trainer.evaluate.report.page import STYLE
from trainer.page.document import html_document, table, write_whole
from trainer.page.text import escaped, visible


def print_comparison(found: Comparison, console: Console) -> None:
    """Two tables: figures with the change against the first run, and settings that differ."""
    console.print("final figures, and the change against the first run")
    console.print(_figures_table(found))
    if found.settings:
        console.print("settings that differ")
        settings = _table(["setting", *found.names])
        for key, values in found.settings.items():
            settings.add_row(_text(key), *(_text(shown(value)) for value in values))
        console.print(settings)
    for note in found.notes:
        console.print(_text(f"! {note}"), style="yellow")


def _figures_table(found: Comparison) -> Table:
    figures = _table(["", *found.names], justify="right")
    for row in found.rows:
        best = row.best()
        cells = [Text(_cell(row, place), style="bold" if place == best else "") for place in range(len(row.values))]
        figures.add_row(_text(row.label), *cells)
    return figures


def _table(names: list[str], *, justify: Literal["left", "right"] = "left") -> Table:
    table = Table()
    for place, name in enumerate(names):
        table.add_column(_text(name), justify=justify if place else "left")
    return table


def _cell(row: Row, place: int) -> str:
    return f"{_value(row, place)}  {row.change(place)}".rstrip()


def _value(row: Row, place: int) -> str:
    value = row.values[place]
    return "–" if value is None else row.form(value)


def _text(value: str) -> Text:
    return Text(visible(value))


def write_comparison(path: Path, found: Comparison) -> None:
    """Write the page; the file is whole or absent."""
    title = f"{len(found.names)} runs side by side"
    write_whole(path, html_document(title, _body(title, found), style=STYLE.read_text(encoding="utf-8")))


def _body(title: str, found: Comparison) -> Iterator[str]:
    yield f"<h1>{escaped(title)}</h1>"
    if found.notes:
        yield f'<ul id="notes">{"".join(f"<li>{escaped(note)}</li>" for note in found.notes)}</ul>'
    yield "<h2>Final figures, and the change against the first run</h2>"
    head = "".join(f'<th class="number">{escaped(name)}</th>' for name in found.names)
    body = "".join(map(_row, found.rows))
    yield f'<div class="panel"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    yield "<h2>Curves</h2>"
    yield f'<div class="charts">{"".join(_charts(found))}</div>'
    rows = [(key, *map(shown, values)) for key, values in found.settings.items()]
    yield table("Settings that differ", ("key", *found.names), rows)
    folders = [(name, str(story.folder)) for name, story in zip(found.names, found.stories, strict=True)]
    yield table("Runs", ("run", "folder"), folders)


def _row(row: Row) -> str:
    best = row.best()
    cells = "".join(
        f'<td class="number{" best" if place == best else ""}">{escaped(_value(row, place))}'
        f"<small>{escaped(row.change(place))}</small></td>"
        for place in range(len(row.values))
    )
    return f"<tr><td>{escaped(row.label)}</td>{cells}</tr>"


def _charts(found: Comparison) -> Iterator[str]:
    runs = list(enumerate(zip(found.names, found.stories, strict=True)))
    pairs = [losses(story, colour=place, name=name) for place, (name, story) in runs]
    for which, title in enumerate(("training loss", "held-out loss")):
        lines = [
            replace(pair[which], name=found.names[place], dashed=_dashed(place)) for place, pair in enumerate(pairs)
        ]
        yield line_chart(title, lines)
    yield line_chart(
        "memory so far, GiB",
        [Series(name, memory(story), i, dashed=_dashed(i)) for i, (name, story) in runs],
        from_zero=True,
    )
    for key, title in (("tokens_per_s", "tokens/s"), ("grad_norm", "gradient norm"), ("lr", "learning rate")):
        lines = [Series(name, story.series(key), i, dashed=_dashed(i), noisy=key != "lr") for i, (name, story) in runs]
        yield line_chart(title, lines, from_zero=key != "grad_norm")


def _dashed(place: int) -> bool:
    """Colours come again."""
    return place % (2 * NUM_COLOURS) >= NUM_COLOURS
