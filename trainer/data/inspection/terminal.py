"""An inspection in a terminal: the counts, what to know, and rows with colours by mask.

Where the output is no terminal, learned text stands between the marks of shown.py instead.
"""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trainer.data.inspection.notes import notes_of
from trainer.data.inspection.pieces import Piece, shortened
from trainer.data.inspection.report import Inspection, LeftOut
from trainer.data.inspection.selecting import Document, ShownRow
from trainer.data.shown import MARKS
from trainer.page.text import visible

LEARNED, READ, IDS = "bold green", "default", "dim"
_PIPE_WIDTH = 160


class Terminal:
    """Prints on standard output."""

    def __init__(self, *, with_ids: bool, console: Console | None = None) -> None:
        """with_ids: each token followed by its id"""
        self._console = console or Console(highlight=False, emoji=False, markup=False)
        if not self._console.is_terminal:
            self._console = Console(
                file=self._console.file, highlight=False, emoji=False, markup=False, width=_PIPE_WIDTH
            )
        self._has_colours = self._console.is_terminal and not self._console.no_color
        self._with_ids = with_ids

    def summary(self, found: Inspection) -> None:
        """Counts, and what to know."""
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for name, value in figures(found):
            table.add_row(name, value)
        self._console.print(table)
        for note in notes_of(found):
            self._console.print(Text(f"! {visible(note)}", style="yellow"), soft_wrap=True)

    def rows(self, rows: Sequence[ShownRow], *, max_tokens: int | None) -> None:
        """max_tokens: longer documents lose the middles of their stretches; None for all"""
        for row in rows:
            parts = [self._head(row)]
            for document in row.documents:
                parts += [Text(f"[{document.title}]", style="dim")] if document.title else []
                parts.append(self.document(document, max_tokens=max_tokens))
            self._console.print(Group(*parts), soft_wrap=not self._console.is_terminal)

    def bad(self, faults: Sequence[LeftOut]) -> None:
        for fault in faults:
            self._console.print(Rule(Text(f"left out, {fault.kind}"), align="left", style="red", characters="-"))
            self._console.print(Text(visible(f"{fault.where}: {fault.what}"), style="red"), soft_wrap=True)
            if fault.raw:
                self._console.print(Text(visible(fault.raw.rstrip()), style="dim"), soft_wrap=True)

    def _head(self, row: ShownRow) -> Rule:
        learned = sum(document.num_targets for document in row.documents)
        where = f"{'held out' if row.part == 'held_out' else 'row'} {row.number}  {row.origin}"
        tags = "".join(f"  [{note}]" for note in row.tags.values())
        title = visible(f"{where}  {row.num_tokens} tokens, {learned} learned{tags}")
        return Rule(Text(title), align="left", style="blue", characters="-")

    def document(self, document: Document, *, max_tokens: int | None) -> Text:
        """The text with its mask."""
        pieces = document.pieces if max_tokens is None else shortened(document.pieces, max_tokens=max_tokens)
        parts, is_open = [], False
        for piece in pieces:
            if isinstance(piece, int):
                parts.append((f" ... {piece} tokens ... ", "dim italic"))
                continue
            if not self._has_colours and piece.is_target != is_open:
                parts.append((MARKS[0] if piece.is_target else MARKS[1], READ))
                is_open = piece.is_target
            parts += self._styled(piece)
        if is_open:
            parts.append((MARKS[1], READ))
        runs = groupby(parts, key=itemgetter(1))
        return Text.assemble(*(("".join(text for text, _ in run), style) for style, run in runs))

    def _styled(self, piece: Piece) -> list[tuple[str, str]]:
        style = LEARNED if piece.is_target else READ
        style = f"{style} dim" if piece.is_special else style
        if not self._with_ids:
            return [(visible(piece.text), style)]
        line = piece.text.rstrip("\n")
        breaks = len(piece.text) - len(line)
        ids = f"‹{' '.join(map(str, piece.ids))}›"
        return [(visible(line) + "⏎" * breaks, style), (ids + "\n" * breaks, IDS)]


def figures(found: Inspection) -> list[tuple[str, str]]:
    """The counts, each with its name; the page shows the same."""
    lengths = found.lengths
    shown = [
        (
            "rows",
            f"{found.rows:,} to train on, {found.held_out_rows:,} held out, of {found.total('source_rows'):,} read",
        ),
        ("tokens", f"{found.tokens:,}, {found.targets:,} of them learned ({found.target_share:.1%})"),
    ]
    for name, report in found.sources.items():
        shown.append(("source", f"{name}: {report['source_rows']:,} rows of {report['description']}"))
    if lengths is not None:
        percentiles = ", ".join(f"p{percent} {tokens}" for percent, tokens in lengths.percentiles.items())
        shown.append(
            ("lengths", f"{lengths.shortest} to {lengths.longest} tokens, mean {lengths.mean:.1f}; {percentiles}")
        )
        shown.append(("longest", f"{lengths.longest} tokens: {lengths.longest_origin}"))
    if found.packing is not None:
        packed = f"{found.packing['units']:,} rows of {found.packing['capacity']} tokens"
        shown.append(("packed", f"{packed}, {found.packing['efficiency']:.1%} full"))
    left_out = sum(count for count, _ in found.bad_kinds.values())
    copies = f"{len(found.duplicates.rows):,} equal to an earlier one"
    shown.append(("left out", f"{left_out:,} rows; {found.leaks.copies:,} copies of held-out rows; {copies}"))
    if found.conventions.ends:
        ends = ", ".join(f"{token!r} {count:,}" for token, count in list(found.conventions.ends.items())[:3])
        shown.append(("turns end with", ends))
    return shown
