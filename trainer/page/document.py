"""One HTML file that opens anywhere: its skeleton, and the parts that our pages share.

The page's policy lets no style and no script run but those that it has, and nothing be loaded. What comes from data
goes through `text.escaped`; everything else here takes HTML.
"""

import base64
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer.page.text import escaped

BASE_CSS = Path(__file__).parent / "base.css"
"""Colours, light and dark, and the parts below."""


def html_document(title: str, body: Iterable[str], *, style: str = "", script: str = "") -> str:
    """The page's text.

    title   text
    body    pieces of HTML
    style   CSS beside that of `BASE_CSS`
    script  JavaScript; without one the policy allows none
    """
    style = BASE_CSS.read_text(encoding="utf-8") + style
    policy = f"default-src 'none'; style-src {_hash(style)}" + (f"; script-src {_hash(script)}" if script else "")
    end = f"<script>{script}</script>\n" if script else ""
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>",
            *body,
            f"{end}</body>\n</html>\n",
        )
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_whole(path: Path, text: str) -> None:
    """Write a file that is whole or absent."""
    hidden = path.with_name(f".{path.name}.partial")
    hidden.write_text(text, encoding="utf-8")
    os.replace(hidden, path)


def tiles(entries: Iterable[tuple[str, object, object]]) -> str:
    """Figures in a row: what, how much, and a few small words; text each."""
    parts = (
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}<small>{escaped(more)}</small></dd></div>"
        for name, value, more in entries
    )
    return f'<dl class="counts">{"".join(parts)}</dl>'


def table(title: str, names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with a title; nothing where it has no rows. Cells are text; whole numbers stand to the right."""
    if not rows:
        return ""
    head = "".join(f"<th{_aligned(value)}>{escaped(name)}</th>" for name, value in zip(names, rows[0], strict=True))
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    heading = f"<h2>{escaped(title)}</h2>\n" if title else ""
    return f'{heading}<div class="panel"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def cell(value: object) -> str:
    """A cell of a table."""
    return f"<td{_aligned(value)}>{f'{value:,}' if _is_whole(value) else escaped(value)}</td>"


def _aligned(value: object) -> str:
    return ' class="number"' if _is_whole(value) else ""


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
