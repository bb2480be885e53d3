"""From the config's `data` to what each step trains on.

`open_data` looks at the first rows before a model is loaded; `prepare_data` tokenizes once there is a tokenizer, and
orders the rows; `PreparedData.steps` takes them once teacher and reference have written beside them what they say.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from accelerate import Accelerator
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trainer.config.data import STDIN
from trainer.config.errors import require
from trainer.config.schema import Config
from trainer.data.dataset import LoadedData, load_data, trained_on
from trainer.data.loader import BatchPlan
from trainer.data.opening import OpenedSources, open_sources
from trainer.data.ordering.order import RunOrder
from trainer.data.reading.stdin import spool_stdin
from trainer.data.rendering.template import writes_date
from trainer.data.rows import BadRow
from trainer.data.steps import Steps, TableSteps
from trainer.data.streams.loading import SAMPLE_ROWS, load_stream
from trainer.data.streams.stream import StreamSteps
from trainer.data.table import Report, as_dataset
from trainer.sources.cache import cache_dir

log = logging.getLogger(__name__)

BAD_ROWS = "bad_rows.jsonl"


@dataclass
class PreparedData:
    """Rows of tokens; teacher and reference may replace the tables by ones with a column more."""

    rows: Dataset
    """To train on; of a stream the first ones."""
    held_out: Dataset
    sha256: str
    """Of what is trained on and held out."""
    order: BatchPlan | StreamSteps
    """Which rows each step takes: numbers of `rows`, or a stream's own."""
    reports: dict[str, Report] = field(default_factory=dict)
    """What became of each source's rows; a stream has none."""
    bad: list[BadRow] = field(default_factory=list)
    """What was left out, as `LoadedData.bad`; of a stream `order` knows."""
    copies: int | None = None
    """Training rows that were dropped, for a held-out row says the same; nobody counts a stream's."""

    @property
    def num_steps(self) -> int:
        """Of the whole run."""
        return self.order.num_steps

    def close(self, run_dir: Path, accelerator: Accelerator) -> None:
        """End a stream; what it left out is listed, by each process in a file of its own."""
        if isinstance(self.order, StreamSteps):
            self.order.close()
            rank = accelerator.process_index
            list_bad_rows(self.bad_rows, run_dir / (f"bad_rows_{rank}.jsonl" if rank else BAD_ROWS))

    @property
    def bad_rows(self) -> list[BadRow]:
        """What was left out so far."""
        return self.order.bad_rows if isinstance(self.order, StreamSteps) else self.bad

    def steps(self, accelerator: Accelerator) -> Steps:
        """What each step trains on, from `rows` as they are now."""
        if isinstance(self.order, StreamSteps):
            return self.order
        return TableSteps(self.rows, self.order, rank=accelerator.process_index)


def open_data(config: Config, accelerator: Accelerator) -> OpenedSources:
    """Look at the first row of each source, so that a wrong path or column is answered before a model is loaded.

    Standard input is copied into the cache, and `data.path` becomes that file: a resumed run finds it.
    """
    if config.data.path == STDIN:
        require(
            accelerator.num_processes == 1,
            f"data.path={STDIN} is the input of one process, and there are {accelerator.num_processes}; give a file",
        )
        config.data.path = str(spool_stdin(cache_dir() / "stdin"))
    return open_sources(config.data, config.preference.method)


def prepare_data(
    opened: OpenedSources,
    tokenizer: PreTrainedTokenizerBase,
    config: Config,
    run_dir: Path,
    accelerator: Accelerator,
) -> PreparedData:
    """Tokenize; what was left out is listed in the run folder.

    raises  UserError about a row that cannot be trained on, unless it may be left out
    """
    method = config.preference.method
    if config.data.date is None and writes_date(tokenizer):
        config.data.date = date.today().isoformat()  # as config.yaml says it, or a run could not be resumed tomorrow
        log.info("data     the chat template writes the date: %s, for the whole run", config.data.date)
    if config.data.streaming:
        stream = load_stream(config.data, method, tokenizer, config.seed, opened=opened)
        if accelerator.is_main_process:
            list_bad_rows(stream.bad, run_dir / BAD_ROWS)
        steps = stream.steps(config.train, rank=accelerator.process_index, world_size=accelerator.num_processes)
        rows = trained_on(as_dataset(steps.sample(SAMPLE_ROWS)))
        return PreparedData(rows, stream.held_out, stream.sha256, steps)
    data = load_data(config.data, method, tokenizer, config.seed, opened=opened)
    if accelerator.is_main_process:
        list_bad_rows(data.bad, run_dir / BAD_ROWS)
    plan = _plan(data, config, accelerator)
    return PreparedData(data.train, data.held_out, data.sha256, plan, data.reports, data.bad, data.copies)


def _plan(data: LoadedData, config: Config, accelerator: Accelerator) -> BatchPlan:
    train, settings = config.train, config.data
    ranks = accelerator.num_processes
    order = RunOrder(
        *(data.sizes, data.lengths, settings, config.seed),
        train.batch_size * train.grad_accum_steps * ranks,
        capacity=settings.max_seq_len * (2 if config.preference.method.of_pairs else 1),
    )
    if settings.packing:
        log.info(
            "data     packed: %d rows in %d of %d tokens, %.1f %% full",
            *(len(data.train), order.num_units(0), order.capacity, 100 * order.efficiency()),
        )
    return BatchPlan(
        num_rows=len(data.train),
        batch_size=train.batch_size,
        grad_accum_steps=train.grad_accum_steps,
        world_size=ranks,
        seed=config.seed,
        epochs=train.epochs,
        max_steps=train.max_steps,
        order=order,
    )


def list_bad_rows(bad: Sequence[BadRow], path: Path) -> None:
    """Write what was left out, a line a row with its place, kind and reason, beside what the file lists already."""
    known = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    lines = [json.dumps({"where": row.where, "kind": row.kind, "what": row.what}, ensure_ascii=False) for row in bad]
    lines = list(dict.fromkeys([*known, *lines]))
    if lines != known:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        log.warning("data     %s lists what was left out, %d rows", path, len(lines))
