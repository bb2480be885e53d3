"""Sources whose first row has said what their rows look like: what a table, a stream and a calibration are made of."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from trainer.config.data import DataConfig, DataSource, OnBadRow, SourceConfig
from trainer.config.errors import UserError
from trainer.config.preference import Method
from trainer.data.demonstration import pydocs_records
from trainer.data.reading.readers import ListReader, Reader, open_reader
from trainer.data.rows import BadRow, Example
from trainer.data.shaping.shapes import Shaper, make_shaper

HOPELESS_ROWS = 1000
"""A source that begins with so many bad rows and no good one is given up."""


@dataclass(frozen=True)
class OpenedSource:
    """A source whose first row said what its rows look like."""

    reader: Reader
    shaper: Shaper
    source: SourceConfig


@dataclass(frozen=True)
class OpenedSources:
    """What a run trains on, and the source that is held out as a whole, if there is one."""

    train: list[OpenedSource]
    held_out: OpenedSource | None


def open_sources(config: DataConfig, method: Method) -> OpenedSources:
    """Look at the first row of each source.

    raises  UserError where no row, or with data.on_bad_row=error the first, can be read
    """
    sources = [open_source(source, config, method, streaming=config.streaming) for source in config.sources()]
    return OpenedSources(sources, _held_out_source(config, method))


def open_source(source: SourceConfig, config: DataConfig, method: Method, *, streaming: bool = False) -> OpenedSource:
    """Find out what a source's rows look like.

    raises  UserError where no row, or with data.on_bad_row=error the first, can be read
    """
    if source.source is DataSource.pydocs:
        reader: Reader = _pydocs(config, method)[0]
    else:
        reader = open_reader(source, max_row_bytes=config.max_row_bytes, streaming=streaming)
    return OpenedSource(reader, _shaper(reader, source, config, method), source)


def _shaper(reader: Reader, source: SourceConfig, config: DataConfig, method: Method) -> Shaper:
    fault: UserError | None = None
    for raw in islice(reader.raw(), HOPELESS_ROWS):
        try:
            return make_shaper(reader.parse(raw), raw.where, source, method)
        except BadRow as bad:
            if config.on_bad_row is OnBadRow.error:
                raise
            fault = fault or bad
    raise fault or UserError(f"{reader.name} holds no rows; write one JSON object a line")


def _held_out_source(config: DataConfig, method: Method) -> OpenedSource | None:
    """The source that is held out as a whole, if there is one."""
    source = config.eval_source()
    if source is not None:
        return open_source(source, config, method)
    if [each.source for each in config.sources()] != [DataSource.pydocs]:
        return None
    source = SourceConfig(source=DataSource.pydocs)
    reader = _pydocs(config, method)[1]
    return OpenedSource(reader, _shaper(reader, source, config, method), source)


def _pydocs(config: DataConfig, method: Method) -> list[ListReader]:
    """To train on, and held out."""
    parts = pydocs_records(method, eval_rows=config.eval_rows)
    return [ListReader("pydocs", [row for _, row in rows], [origin for origin, _ in rows]) for rows in parts]


def read_examples(opened: OpenedSource) -> Iterator[Example]:
    """The source's rows, one after the other.

    raises  BadRow about the first that is none
    """
    for raw in islice(opened.reader.raw(), opened.source.max_rows):
        yield opened.shaper.row(opened.reader.parse(raw), raw.where)
