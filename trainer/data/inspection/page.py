"""An inspection as one HTML file that opens anywhere: counts, a histogram, and rows with their mask.

Whatever comes from the data is escaped once, in `_text`; the page's policy lets no script run but the one that it has,
and nothing be loaded, so that a row that holds markup stays a row.
"""

import base64
import hashlib
import os
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from trainer.data.inspection.histogram import histogram
from trainer.data.inspection.notes import notes_of
from trainer.data.inspection.pieces import Piece, shortened, visible
from trainer.data.inspection.report import Inspection, LeftOut
from trainer.data.inspection.selecting import Document, ShownRow

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
    hidden = path.with_name(f".{path.name}.partial")
    hidden.write_text(page(title, found, rows), encoding="utf-8")
    os.replace(hidden, path)


def page(title: str, found: Inspection, rows: Sequence[ShownRow]) -> str:
    """The page's text."""
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>\n<style>{style}</style>\n</head>\n<body>",
            f"<h1>{_text(title)}</h1>",
            *_summary(found),
            *_rows(found, rows),
            f'<div id="tip" hidden></div>\n<script>{script}</script>\n</body>\n</html>\n',
        )
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(value: object) -> str:
    """What data says, as text of the page."""
    return escape(visible(str(value)))


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
    return f'<li class="stop">{_text(note)}</li>' if stops else f"<li>{_text(note)}</li>"


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
    tiles = "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{_text(more)}</small></dd></div>" for name, value, more in entries
    )
    return f'<dl id="counts">{tiles}</dl>'


def _tables(found: Inspection) -> Iterable[str]:
    sources = [
        (name, *(report[key] for key in ("description", "source_rows", "rows", "tokens", "trained_tokens")))
        for name, report in found.sources.items()
    ]
    yield _table("Sources", ("source", "what a row is", "rows read", "rows of tokens", "tokens", "learned"), sources)
    kinds = [(kind, count, ", ".join(places)) for kind, (count, places) in found.bad_kinds.items()]
    yield _table("Left out", ("why", "rows", "the first of them"), kinds)
    equal = [(len(places), ", ".join(places)) for places in found.duplicates.groups[:20]]
    yield _table("Equal rows", ("rows", "where (at most ten places)"), equal)
    leaks = found.leaks
    shared = [(leak.held_out, leak.train, leak.tokens) for leak in leaks.runs[:20]]
    yield _table("Held-out text in training rows", ("held out", "training", "tokens in a row"), shared)
    prompts = [(leak.held_out, leak.train, leak.tokens) for leak in leaks.prompts[:20]]
    yield _table("Held-out prompts with another answer", ("held out", "training", "tokens"), prompts)
    scripts = [
        (name, script.characters, f"{script.share:.1%}", " ".join(char for char, _ in script.examples.most_common(8)))
        for name, script in found.characters.broken().items()
    ]
    yield _table("Characters in pieces", ("script", "characters", "in pieces", "examples"), scripts)


def _table(title: str, names: Sequence[str], rows: Sequence[tuple[object, ...]]) -> str:
    """A table with a title; nothing where it has no rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<h2>{title}</h2>\n<div class="panel"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(value: object) -> str:
    return f'<td class="number">{value:,}</td>' if isinstance(value, int) else f"<td>{_text(value)}</td>"


# ---- the rows


def _rows(found: Inspection, rows: Sequence[ShownRow]) -> Iterable[str]:
    total = found.rows + found.held_out_rows
    some = "" if len(rows) >= total else f" {len(rows):,} of {total:,} are on this page, some of every kind."
    yield (
        '<h2>Rows</h2>\n<p class="muted legend">As the model reads them: <mark>learned</mark>, read only, '
        f"<i>special tokens</i>. Point at a token for its id.{some}</p>"
    )
    sources = sorted({row.source for row in (*rows, *found.bad)})
    options = "".join(f'<option value="{_text(name)}">{_text(name)}</option>' for name in sources)
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
    raw = f'<div class="text muted">{_text(fault.raw.rstrip())}</div>' if fault.raw else ""
    head = f'<b>{_text(fault.where)}</b><span class="tag">left out: {_text(fault.kind)}</span>'
    return (
        f'<article class="panel bad" data-kinds="bad" data-source="{_text(fault.source)}"><header>{head}</header>'
        f"<p>{_text(fault.what)}</p>{raw}</article>"
    )


def _row(row: ShownRow) -> str:
    learned = sum(document.num_targets for document in row.documents)
    tags = "".join(f'<span class="tag">{_text(note)}</span>' for note in row.tags.values())
    part = "held out" if row.part == "held_out" else "row"
    head = (
        f'<b>{_text(row.origin)}</b><span class="muted">{part} {row.number:,} · {row.num_tokens:,} tokens, '
        f"{learned:,} learned</span>{tags}"
    )
    kinds = " ".join((row.part, *row.tags))
    return (
        f'<article class="panel" data-kinds="{kinds}" data-source="{_text(row.source)}"><header>{head}</header>'
        f"{''.join(map(_document, row.documents))}</article>"
    )


def _document(document: Document) -> str:
    side = f'<p class="side">{_text(document.title)}</p>' if document.title else ""
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
    return f'<i data-t="{" ".join(map(str, piece.ids))}"{kind}>{_text(piece.text)}</i>'
