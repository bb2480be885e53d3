"""Show rows as the model sees them, and count what is in them, before anything is trained.

    python scripts/inspect_data.py data=file data.path=train.jsonl             the keys of train.py; conf=qlora if none
    python scripts/inspect_data.py conf=lora model=tiny rows=20 tokens=true    more rows, with token ids
    python scripts/inspect_data.py data=file data.path=train.jsonl row=train.jsonl:12    one row, whole
    python scripts/inspect_data.py data=file data.path=train.jsonl only=bad    all | train | held_out | bad | long |
                                                                               short | duplicates | leaks
    python scripts/inspect_data.py data=file data.path=train.jsonl html=page.html [page_rows=200]

`row` is a place or a number. Learned text is green, or stands between marks where the output is no terminal; special
tokens are dim. Rows that cannot be trained on are listed with the reason and never stop the inspection. `html` writes
one page that opens anywhere. Only the tokenizer is loaded. Last line: JSON; `json=true` prints nothing else.
"""

import json
import logging
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from trainer.compose import load_config
from trainer.config.data import STDIN
from trainer.config.errors import UserError, require
from trainer.config.model import short_name
from trainer.config.schema import Config
from trainer.data.inspection.kinds import Only
from trainer.settings import read_settings

if TYPE_CHECKING:
    from trainer.data.inspection.selecting import Shelf

MAX_TOKENS = 400
"""Of a document in the terminal, unless `row` asks for it."""


@dataclass
class Settings:
    rows: int = 5
    """How many are printed."""
    row: str | None = None
    """A place such as train.jsonl:12, or a number: print this row, whole."""
    only: Only = Only.all
    """A kind of rows."""
    tokens: bool = False
    """Whether each token is followed by its id."""
    html: str | None = None
    """Write a page to this file."""
    page_rows: int = 200
    """Rows on the page."""
    json: bool = False
    """Print the JSON line only."""

    def __post_init__(self) -> None:
        require(self.rows >= 0, f"rows={self.rows}; give 0 or more")
        require(self.page_rows > 0, f"page_rows={self.page_rows}; give at least 1")
        require(
            self.html is None or Path(self.html).absolute().parent.is_dir(),
            f"html={self.html}: its folder does not exist; create it, or give another path",
        )


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        print(__doc__.strip())
        return
    try:
        print(json.dumps(inspect(sys.argv[1:]), ensure_ascii=not _writes_unicode()))
    except UserError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", markup=False, style="red")
        sys.exit(2)


def _writes_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def inspect(arguments: list[str]) -> dict:
    """Print the counts and the rows; returns what the JSON line holds.

    arguments  `key=value` each: of train.py, and of `Settings`
    raises     UserError for a key, a value, a model or a source that is not accepted
    """
    own = [argument for argument in arguments if argument.partition("=")[0] in Settings.__annotations__]
    settings = read_settings(Settings, own)
    config = _config([argument for argument in arguments if argument not in own])
    from trainer.data.inspection.gathering import gather  # here, so that a mistake is answered before torch loads
    from trainer.data.inspection.notes import notes_of
    from trainer.data.inspection.pieces import Cutter
    from trainer.data.inspection.report import inspect_rows
    from trainer.data.inspection.selecting import Shelf
    from trainer.model import load_stop_ids, load_tokenizer

    tokenizer, method = load_tokenizer(config.model), config.preference.method
    gathered = gather(config.data, method, tokenizer, config.seed)
    found = inspect_rows(
        *(gathered, config.data, method, tokenizer),
        seed=config.seed,
        rows_per_step=config.train.batch_size * config.train.grad_accum_steps,
        stop_ids=load_stop_ids(config.model),
    )
    shelf = Shelf(gathered, found, Cutter(tokenizer), config.data.max_seq_len)
    if not settings.json:
        _print(settings, shelf)
    if settings.html:
        _write_page(settings, config, shelf)
    report = {"name": "inspect_data", "data": _name(config), "model": short_name(config.model)}
    return report | found.as_dict() | {"notes": notes_of(found), "html": settings.html}


def _config(overrides: list[str]) -> Config:
    if not any(each.startswith(("conf=", "resume=")) for each in overrides):
        overrides = ["conf=qlora", *overrides]
    config = load_config(*overrides)
    if config.data.path == STDIN:
        from trainer.data.reading.stdin import spool_stdin
        from trainer.sources.cache import cache_dir

        config.data.path = str(spool_stdin(cache_dir() / "stdin"))
    return config


def _name(config: Config) -> str:
    return ", ".join(source.path or source.source.value for source in config.data.sources())


def _print(settings: Settings, shelf: "Shelf") -> None:
    from trainer.data.inspection.selecting import is_at
    from trainer.data.inspection.terminal import Terminal

    terminal = Terminal(with_ids=settings.tokens)
    bad, rows = shelf.inspection.bad, []
    if settings.row is not None:
        rows = shelf.find(settings.row)
        bad = [fault for fault in bad if is_at(fault.where, settings.row)]
    else:
        rows = shelf.choose(settings.only, settings.rows)
        bad = bad[: settings.rows] if settings.only in (Only.all, Only.bad) else []
    terminal.rows(rows, max_tokens=None if settings.row else MAX_TOKENS)
    terminal.bad(bad)
    if settings.row is None:
        terminal.summary(shelf.inspection)


def _write_page(settings: Settings, config: Config, shelf: "Shelf") -> None:
    from trainer.data.inspection.page import write_page

    title = f"{', '.join(shelf.gathered.names)} as {short_name(config.model)} reads it"
    write_page(Path(settings.html), title, shelf.inspection, shelf.sample(settings.page_rows))
    if not settings.json:
        print(f"page     {settings.html}")


if __name__ == "__main__":
    main()
