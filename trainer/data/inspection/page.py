"""An inspection as one HTML file that opens anywhere: counts, a histogram, and rows with their mask.

Whatever comes from the data is escaped once, in `escaped`; the page's policy lets no script run but the one that it
has, and nothing be loaded, so that a row that holds markup stays a row.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from trainer.data.inspection.histogram import histogram
from trainer.data.inspection.notes import notes_of
from trainer.data.inspection.pieces import Piece, shortened
from trainer.data.inspection.report import Inspection, LeftOut
from trainer.data.inspection.selecting import Document, ShownRow
from trainer.page.document import html_document, table, tiles, write_whole
from trainer.page.text import escaped

FOLDER = Path(__file__).parent
MAX_BAD = 100
"""Rows that are left out, on the page."""
MAX_TOKENS = 4000
"""Of a document; a longer one loses the middles of its stretches."""
KINDS = {
    "all": "all",
    "train": "train",
    "held_out": "held out",
    "bad": "left out",
    "long": "long",
    "duplicates": "duplicates",
    "leaks": "leaks",
}


def write_page(path: Path, title: str, found: Inspection, rows: Sequence[ShownRow]) -> None:
    """Write the page; the file is whole or absent.

    title  what was looked at, in a line
    rows   those to show; what is left out is shown beside them
    """
    write_whole(path, page(title, found, rows))


def page(title: str, found: Inspection, rows: Sequence[ShownRow]) -> str:
    """The page's text."""
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    heading, tip = f"<h1>{escaped(title)}</h1>", '<div id="tip" hidden></div>'
    return html_document(title, [heading, *_summary(found), *_rows(found, rows), tip], style=style, script=script)


# ---- the counts


def _summary(found: Inspection) -> Iterable[str]:
    yield _counts(found)
    if notes := notes_of(found):
        stops = len(found.refusals)
        items = (_note(note, stops=place < stops) for place, note in enumerate(notes))
        yield f'<h2>What to know</h2>\n<ul id="notes">{"".join(items)}</ul>'
    if found.lengths is not None:
        yield "<h2>Lengths, in tokens</h2>"
        yield f'<figure class="panel">{histogram(found.lengths.bars, found.max_seq_len)}</figure>'
    yield from _tables(found)


def _note(note: str, *, stops: bool) -> str:
    return f'<li class="stop">{escaped(note)}</li>' if stops else f"<li>{escaped(note)}</li>"


def _counts(found: Inspection) -> str:
    left_out = sum(count for count, _ in found.bad_kinds.values())
    leaks = found.leaks
    entries = [
        ("rows to train on", f"{found.rows:,}", f"of {found.total('source_rows'):,} read"),
        ("held out", f"{found.held_out_rows:,}", f"{leaks.copies:,} copies of them dropped"),
        ("tokens", f"{found.tokens:,}", f"{found.targets:,} learned"),
        ("learned", f"{found.target_share:.1%}", "of the tokens"),
        ("left out", f"{left_out:,}", f"{found.total('truncated_rows'):,} cut, {found.total('split_rows'):,} split"),
        ("duplicates", f"{len(found.duplicates.rows):,}", "equal an earlier row"),
        ("leaks", f"{leaks.run_rows:,}", f"share {leaks.run_len} tokens; {leaks.prompt_rows:,} share the prompt"),
    ]
    if found.lengths is not None:
        entries.append(("longest", f"{found.lengths.longest:,}", found.lengths.longest_origin))
    if found.packing is not None:
        entries.append(("packing", f"{found.packing['efficiency']:.1%}", f"full, {found.packing['units']:,} rows"))
    return tiles(entries)


def _tables(found: Inspection) -> Iterable[str]:
    sources = [
        (name, *(report[key] for key in ("description", "source_rows", "rows", "tokens", "trained_tokens")))
        for name, report in found.sources.items()
    ]
    yield table("Sources", ("source", "what a row is", "rows read", "rows of tokens", "tokens", "learned"), sources)
    kinds = [(kind, count, ", ".join(places)) for kind, (count, places) in found.bad_kinds.items()]
    yield table("Left out", ("why", "rows", "the first of them"), kinds)
    equal = [(len(places), ", ".join(places)) for places in found.duplicates.groups[:20]]
    yield table("Equal rows", ("rows", "where (at most ten places)"), equal)
    leaks = found.leaks
    shared = [(leak.held_out, leak.train, leak.tokens) for leak in leaks.runs[:20]]
    yield table("Held-out text in training rows", ("held out", "training", "tokens in a row"), shared)
    prompts = [(leak.held_out, leak.train, leak.tokens) for leak in leaks.prompts[:20]]
    yield table("Held-out prompts with another answer", ("held out", "training", "tokens"), prompts)
    scripts = [
        (name, script.characters, f"{script.share:.1%}", " ".join(char for char, _ in script.examples.most_common(8)))
        for name, script in found.characters.broken().items()
    ]
    yield table("Characters in pieces", ("script", "characters", "in pieces", "examples"), scripts)


# ---- the rows


def _rows(found: Inspection, rows: Sequence[ShownRow]) -> Iterable[str]:
    total = found.rows + found.held_out_rows
    some = "" if len(rows) >= total else f" {len(rows):,} of {total:,} are on this page, some of every kind."
    yield (
        '<h2>Rows</h2>\n<p class="muted legend">As the model reads them: <mark>learned</mark>, read only, '
        f"<i>special tokens</i>. Point at a token for its id.{some}</p>"
    )
    sources = sorted({row.source for row in (*rows, *found.bad)})
    options = "".join(f'<option value="{escaped(name)}">{escaped(name)}</option>' for name in sources)
    buttons = "".join(
        f'<button type="button" data-kind="{kind}" aria-pressed="{str(kind == "all").lower()}">{label}</button>'
        for kind, label in KINDS.items()
    )
    yield (
        f'<div id="filters">{buttons}<select id="source" aria-label="source"><option value="">every source</option>'
        f'{options}</select><input id="words" type="search" placeholder="words" aria-label="words">'
        '<span id="shown" class="muted"></span></div>'
    )
    yield from map(_bad, found.bad[:MAX_BAD])
    yield from map(_row, rows)


def _bad(fault: LeftOut) -> str:
    raw = f'<div class="text muted">{escaped(fault.raw.rstrip())}</div>' if fault.raw else ""
    head = f'<b>{escaped(fault.where)}</b><span class="tag">left out: {escaped(fault.kind)}</span>'
    return (
        f'<article class="panel bad" data-kinds="bad" data-source="{escaped(fault.source)}"><header>{head}</header>'
        f"<p>{escaped(fault.what)}</p>{raw}</article>"
    )


def _row(row: ShownRow) -> str:
    learned = sum(document.num_targets for document in row.documents)
    tags = "".join(f'<span class="tag">{escaped(note)}</span>' for note in row.tags.values())
    part = "held out" if row.part == "held_out" else "row"
    head = (
        f'<b>{escaped(row.origin)}</b><span class="muted">{part} {row.number:,} · {row.num_tokens:,} tokens, '
        f"{learned:,} learned</span>{tags}"
    )
    kinds = " ".join((row.part, *row.tags))
    return (
        f'<article class="panel" data-kinds="{kinds}" data-source="{escaped(row.source)}"><header>{head}</header>'
        f"{''.join(map(_document, row.documents))}</article>"
    )


def _document(document: Document) -> str:
    side = f'<p class="side">{escaped(document.title)}</p>' if document.title else ""
    parts = shortened(document.pieces, max_tokens=MAX_TOKENS)
    groups = groupby(parts, key=lambda part: "hidden" if isinstance(part, int) else part.is_target)
    body = "".join(_stretch(list(group)) for _, group in groups)
    return f'{side}<div class="text" dir="auto">{body}</div>'


def _stretch(parts: Sequence[Piece | int]) -> str:
    if isinstance(parts[0], int):
        return f'<span class="hidden-part"> ... {parts[0]:,} tokens ... </span>'
    tokens = "".join(_token(piece) for piece in parts)
    return f"<mark>{tokens}</mark>" if parts[0].is_target else tokens


def _token(piece: Piece) -> str:
    kind = ' class="special"' if piece.is_special else ""
    return f'<i data-t="{" ".join(map(str, piece.ids))}"{kind}>{escaped(piece.text)}</i>'
