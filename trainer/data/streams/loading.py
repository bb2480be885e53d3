"""What a run that streams trains on and what it is held to: dataset.py's other half.

Held out is a source of its own, or the first rows of each source; a training row that says what a held-out one says is
left out wherever it stands.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trainer.config.data import DataConfig, OnBadRow
from trainer.config.errors import require
from trainer.config.preference import Method
from trainer.config.train import TrainConfig
from trainer.data.dataset import column, open_table, trained_on
from trainer.data.opening import OpenedSource, OpenedSources, open_sources
from trainer.data.rendering.chat import Renderer
from trainer.data.rows import BadRow, TokenRow
from trainer.data.shown import marked
from trainer.data.streams.interleave import HeldOut
from trainer.data.streams.stream import StreamSteps
from trainer.data.table import LONG_ROW, MAX_LISTED, as_dataset
from trainer.data.tokenizing import RowTokenizer

logger = logging.getLogger(__name__)

SAMPLE_ROWS = 256
"""First rows, for what looks at some before training: LoftQ, EVA, ranges of static inputs."""


@dataclass(frozen=True)
class LoadedStream:
    """Sources that are read while training."""

    held_out: Dataset
    """As `dataset.LoadedData`'s."""
    held_out_contents: frozenset[int]
    skip: dict[int, HeldOut]
    """By source, the rows at its beginning that are held out."""
    sha256: str
    """Of what is held out, and of what makes tokens of rows; the rows themselves are hashed window by window."""
    bad: list[BadRow]
    """What was left out of the rows that are held out."""
    opened: OpenedSources
    tokenizers: list[RowTokenizer]
    config: DataConfig
    seed: int

    def steps(self, train: TrainConfig, *, rank: int, world_size: int) -> StreamSteps:
        """One process's steps."""
        return StreamSteps(
            [source.reader for source in self.opened.train],
            self.tokenizers,
            self.config,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
            batch_size=train.batch_size,
            grad_accum_steps=train.grad_accum_steps,
            max_steps=train.max_steps or 0,
            held_out=self.held_out_contents,
            skip=self.skip,
        )


def load_stream(
    config: DataConfig,
    method: Method,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    *,
    opened: OpenedSources | None = None,
) -> LoadedStream:
    """Read what is held out; see `dataset.load_data`.

    raises  UserError about a held-out row, or for a source with no row beside them
    """
    opened = opened or open_sources(config, method)
    tokenizers = [RowTokenizer(source.reader, source.shaper, tokenizer, config) for source in opened.train]
    skip: dict[int, HeldOut] = {}
    bad: list[BadRow] = []
    if opened.held_out is not None:
        table = open_table(opened.held_out, config, tokenizer)
        held_out, bad = table.rows, table.bad
    else:
        rows: list[TokenRow] = []
        for place, (source, row_tokenizer) in enumerate(zip(opened.train, tokenizers, strict=True)):
            share = max(
                1, config.eval_rows * (place + 1) // len(tokenizers) - config.eval_rows * place // len(tokenizers)
            )
            some, skip[place] = _first_rows(source, row_tokenizer, config, bad, num_rows=share)
            rows += some
        held_out = as_dataset(rows)
    names = ", ".join(source.reader.name for source in opened.train)
    logger.info("data     %s: streamed; %d rows held out for evaluation", names, len(held_out))
    logger.info("data     for example: %s", marked(held_out[0], tokenizer))
    contents = frozenset(column(held_out, "content").tolist())
    held_out = trained_on(held_out)
    sha256 = _sha256(held_out, opened, Renderer(tokenizer, config))
    return LoadedStream(held_out, contents, skip, sha256, bad, opened, tokenizers, config, seed)


def _first_rows(
    source: OpenedSource, tokenizer: RowTokenizer, config: DataConfig, bad: list[BadRow], *, num_rows: int
) -> tuple[list[TokenRow], HeldOut]:
    """The rows of tokens of a source's first good rows, and where they end; `bad` gets the others."""
    rows: list[TokenRow] = []
    good = number = 0
    for number, raw in enumerate(islice(source.reader.raw(), source.source.max_rows), start=1):
        result = tokenizer(raw)
        if not isinstance(result, BadRow):
            good += 1
            rows += result
        elif config.on_bad_row is OnBadRow.error and result.kind != LONG_ROW:
            raise result
        elif len(bad) < MAX_LISTED:
            bad.append(result)
        if good == num_rows:
            return rows, HeldOut(raw.behind, number)
    require(
        False,
        f"{source.reader.name} has {good} good rows among its {number}, and its first {num_rows} would be held out; "
        "lower data.eval_rows, name data.eval_path, or use data.streaming=false",
    )
    raise AssertionError


def _sha256(held_out: Dataset, opened: OpenedSources, renderer: Renderer) -> str:
    digest = hashlib.sha256(renderer.fingerprint().encode())
    digest.update(json.dumps([source.shaper.description for source in opened.train]).encode())
    digest.update(json.dumps([_tokens(row) for row in held_out]).encode())
    return digest.hexdigest()


def _tokens(row: TokenRow) -> Sequence[object]:
    return [value for name, value in row.items() if name != "origin"]
