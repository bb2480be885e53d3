"""`data.*`: what is trained on."""

from dataclasses import dataclass, field
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Any

from trainer.config.errors import require


class DataSource(StrEnum):
    pydocs = "pydocs"
    file = "file"
    hub = "hub"


class RowFormat(StrEnum):
    auto = "auto"
    messages = "messages"
    sharegpt = "sharegpt"
    alpaca = "alpaca"
    prompt_completion = "prompt_completion"
    text = "text"
    tokens = "tokens"


class TrainOn(StrEnum):
    assistant = "assistant"
    last = "last"
    all = "all"


class RewrittenHistory(StrEnum):
    split = "split"
    error = "error"


class OnBadRow(StrEnum):
    error = "error"
    skip = "skip"


class OnLongRow(StrEnum):
    error = "error"
    truncate = "truncate"
    split = "split"
    skip = "skip"


class MixUntil(StrEnum):
    all = "all"
    first = "first"


STDIN = "-"


@dataclass
class ColumnsConfig:
    messages: str | None = None
    """The file's field with a list of turns: `{role, content}`, or ShareGPT's `{from, value}`."""
    tools: str | None = None
    """The file's field with the tools that a conversation may call, as OpenAI's API takes them."""
    prompt: str | None = None
    """The file's field with the user's side."""
    completion: str | None = None
    """The file's field with the answer."""
    instruction: str | None = None
    """Alpaca: the file's field with the task."""
    input: str | None = None
    """Alpaca: the file's field with what the task is about; may be empty."""
    output: str | None = None
    """Alpaca: the file's field with the answer."""
    system: str | None = None
    """The file's field with a system prompt, beside messages, prompt and completion, or Alpaca's fields."""
    text: str | None = None
    """The file's field with plain text."""
    input_ids: str | None = None
    """The file's field with token ids."""
    labels: str | None = None
    """Beside token ids: the file's field with targets, each its token id or -100. Without it every token is one."""
    chosen: str | None = None
    """preference.method=dpo, orpo: the file's field with the better answer."""
    rejected: str | None = None
    """preference.method=dpo, orpo: the file's field with the worse answer."""
    label: str | None = None
    """preference.method=kto: the file's field with true for a good answer, false for a bad one."""


@dataclass
class SourceConfig:
    """One source of rows; `data.mix` is a list of them."""

    path: str = ""
    """A file (.jsonl, .json, .csv, .parquet, .txt; also .gz), a folder of such files, or a dataset on the hub."""
    source: DataSource = DataSource.file
    """file: a path on this machine; hub: a dataset's name on the hub; pydocs: the standard library's docstrings."""
    format: RowFormat = RowFormat.auto
    """What a row looks like; auto: as the first row looks."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    """What the file calls our fields."""
    name: str | None = None
    """hub: the dataset's configuration."""
    split: str = "train"
    """hub, and folders that have several: which part."""
    revision: str | None = None
    """hub: a branch, tag or commit."""
    max_rows: int | None = None
    """Use the first rows only; null for all."""
    weight: float | None = None
    """The share of rows drawn from here, relative to the other sources' weights; null with `epochs`."""
    epochs: float | None = None
    """How often the source is passed in one epoch of the mix, instead of `weight`."""

    def __post_init__(self) -> None:
        shown = f"data.mix: path={self.path or '(none)'}"
        require(bool(self.path) or self.source is DataSource.pydocs, f"{shown}; give every source a path")
        for name, value in (("weight", self.weight), ("epochs", self.epochs), ("max_rows", self.max_rows)):
            require(value is None or value > 0, f"{shown} has {name}={value}; give more than 0, or leave it out")
        require(
            self.weight is None or self.epochs is None,
            f"{shown} has weight={self.weight} and epochs={self.epochs}, which both say how often it is seen; give one",
        )
        for name in ("name", "revision"):
            value = getattr(self, name)
            require(
                value is None or self.source is DataSource.hub,
                f"{shown} has {name}={value}, which has no effect on source={self.source.value}; leave it out",
            )
        require_path(self, "data.mix: path")


@dataclass
class DataConfig:
    source: DataSource = DataSource.pydocs
    """pydocs: questions about the running Python's standard library; file: a file or folder of yours; hub: a dataset on
    the hub. `data=<name>` sets it."""
    path: str | None = None
    """file: a file (.jsonl, .json, .csv, .parquet, .txt; also .gz), a folder of such files, or - for standard input
    (JSON Lines); hub: a dataset's name."""
    eval_path: str | None = None
    """file: the held-out file or folder, of which the first `eval_rows` rows are taken. Without it the last `eval_rows`
    rows of a seeded shuffle are held out, and of a stream the first ones."""
    format: RowFormat = RowFormat.auto
    """What a row looks like: messages, sharegpt, alpaca, prompt_completion, text or tokens; auto: as the first row
    looks. Preferences have the columns of their method. Beside data.mix: of `eval_path`; each source has its own."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    """What the file calls our fields, e.g. `data.columns.prompt=question data.columns.completion=answer`."""
    name: str | None = None
    """hub: the dataset's configuration."""
    split: str = "train"
    """hub, and folders that have several: which part is trained on."""
    eval_split: str | None = None
    """hub, and folders that have several: which part is held out, instead of some rows of `split`."""
    revision: str | None = None
    """hub: a branch, tag or commit."""
    mix: list[SourceConfig] = field(default_factory=list)
    """Several sources instead of one `path`: `data.mix=[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]`. With
    neither weight nor epochs each source is passed once an epoch."""
    mix_until: MixUntil = MixUntil.all
    """Weights: an epoch ends when each source was seen whole, smaller ones again and again (all), or when the first one
    ends (first)."""
    mix_temperature: float = 1.0
    """Weights are taken to the power of 1 / temperature; sources without a weight, beside a temperature other than 1,
    weigh what they hold rows. More than 1 brings shares closer to each other."""
    max_rows: int | None = None
    """Use the first rows only; null for all. Beside data.mix each source has its own."""
    eval_rows: int = 64
    """Rows held out for evaluation, at most."""
    max_seq_len: int = 512
    """Longest row in tokens."""
    on_long_row: OnLongRow | None = None
    """Rows longer than `max_seq_len`: error; truncate: cut at the end; split: texts into several rows; skip: left out
    and listed. null: truncate, and say so; with packing error."""
    on_bad_row: OnBadRow = OnBadRow.error
    """Rows that cannot be trained on: error with file and line, or skip: left out and listed in bad_rows.jsonl."""
    max_row_bytes: int = 16 << 20
    """A longer line is a bad row: as a rule a file without line ends."""
    train_on: TrainOn = TrainOn.assistant
    """Targets of a conversation: each assistant turn, the last one, or all that is said."""
    train_thinking: bool = True
    """Whether thinking blocks are targets; false: they are read, and not learned."""
    rewritten_history: RewrittenHistory = RewrittenHistory.split
    """Templates that show an earlier turn differently from the newest (stripped thinking, as a rule): one row for each
    turn as the server will see it (split), or error."""
    date: str | None = None
    """Chat templates that write today's date write this one, YYYY-MM-DD; null: today's, which the run then keeps."""
    packing: bool = False
    """Several documents in one row of up to `max_seq_len` tokens; each keeps its own attention and positions, so the
    loss is that of unpacked rows."""
    group_by_length: bool = False
    """Batches of rows of similar length."""
    shuffle: bool = True
    """A new order in each epoch; false: as the source has it."""
    streaming: bool = False
    """Read while training, and keep nothing on disk; needs `train.max_steps`."""
    shuffle_buffer: int = 8192
    """streaming: rows that are read, shuffled and packed together."""
    num_workers: int = 0
    """Processes that tokenize; 0: this one. The rows and their order do not depend on it."""

    def __post_init__(self) -> None:
        key = f"data={self.source.value}"
        if self.source is DataSource.pydocs and not self.mix:
            require(self.path is None, f"data.path={self.path} has no effect with {key}; use data=file")
            require(self.eval_path is None, f"data.eval_path={self.eval_path} has no effect with {key}")
            mapped = [f"{name}={value}" for name, value in vars(self.columns).items() if value]
            require(not mapped, f"data.columns.{mapped} has no effect with {key}; use data=file")
        elif self.mix:
            require(
                self.path is None,
                f"data.path={self.path} beside data.mix, which names its own paths; leave one of them out",
            )
        else:
            require(bool(self.path), f"data.path is not set; {key} needs data.path=<file, folder or name>")
            require_path(self, "data.path")
        require(
            self.eval_path is None or Path(self.eval_path).exists() or self.source is DataSource.hub,
            f"data.eval_path={self.eval_path} is no file or folder; give one that exists",
        )
        for name in ("max_rows", "eval_rows", "max_row_bytes", "shuffle_buffer"):
            value = getattr(self, name)
            require(value is None or value > 0, f"data.{name}={value}; give at least 1")
        require(self.max_seq_len >= 8, f"data.max_seq_len={self.max_seq_len}; give at least 8 tokens")
        require(
            self.date is None or _is_date(self.date),
            f"data.date={self.date} is no date; write YYYY-MM-DD, e.g. 2026-01-31",
        )
        require(self.num_workers >= 0, f"data.num_workers={self.num_workers}; give 0 or more")
        require(self.mix_temperature > 0, f"data.mix_temperature={self.mix_temperature}; give more than 0")
        self._require_keys_are_read()
        self._require_order_fits()

    def _require_keys_are_read(self) -> None:
        """No key that says what a source looks like is passed over."""
        keys = ("format", "columns", "max_rows", "split", "eval_split", "name", "revision")
        read = {"format", "columns", "max_rows"}
        if self.source is not DataSource.pydocs:
            read |= {"split", "eval_split"}
        if self.source is DataSource.hub:
            read |= {"name", "revision"}
        instead = f"with data={self.source.value}; leave it out"
        if self.mix:
            # conf/data/pydocs.yaml, the default, has a max_rows of its own
            read = read - {"max_rows"} | {"split", "eval_split"} if self.eval_path else set()
            read |= {"max_rows"} if self.source is DataSource.pydocs else set()
            instead = "beside data.mix; write it into each of its sources, or leave it out"
        given = {f"data.{name}": getattr(self, name) for name in keys if name not in read}
        given |= {
            f"data.columns.{ours}": theirs for ours, theirs in vars(given.pop("data.columns", ColumnsConfig())).items()
        }
        for key, value in given.items():
            require(value == _UNSET.get(key), f"{key}={value} has no effect {instead}")

    def _require_order_fits(self) -> None:
        """What gives rows an order fits together."""
        require(
            not (self.packing and self.group_by_length),
            "data.group_by_length=true has no effect with data.packing=true, whose rows are equally long; use one",
        )
        require(
            self.shuffle or not self.group_by_length,
            "data.group_by_length=true has an order of its own, and data.shuffle=false the source's; use one",
        )
        weighted = [source for source in self.mix if source.weight is not None]
        require(
            not weighted or all(source.weight is not None for source in self.mix),
            "data.mix: some sources have a weight and others none; give every one a weight, or none",
        )
        tempered = self.mix_temperature != 1
        require(
            not tempered or (bool(self.mix) and all(source.epochs is None for source in self.mix)),
            f"data.mix_temperature={self.mix_temperature} has no effect without data.mix, or on sources with epochs; "
            "leave one of them out",
        )
        require(
            self.mix_until is not MixUntil.first or bool(weighted) or tempered,
            "data.mix_until=first has no effect without weights; give each source of data.mix one, or leave it out",
        )
        require(
            not self.streaming or self.source is not DataSource.pydocs or bool(self.mix),
            "data.streaming=true has no effect with data=pydocs, which is small; leave it out",
        )

    @property
    def long_rows(self) -> OnLongRow:
        """`on_long_row`, resolved."""
        return self.on_long_row or (OnLongRow.error if self.packing else OnLongRow.truncate)

    def sources(self) -> list[SourceConfig]:
        """What is trained on: the mix, or the one source."""
        if self.mix:
            return list(self.mix)
        shared = {key: getattr(self, key) for key in _SHARED}
        return [SourceConfig(path=self.path or "", **shared)]

    def eval_source(self) -> SourceConfig | None:
        """What is held out, if it is a source of its own."""
        if not (self.eval_path or self.eval_split):
            return None
        shared: dict[str, Any] = {key: getattr(self, key) for key in _SHARED} | {"max_rows": self.eval_rows}
        if self.eval_split or (self.eval_path and Path(self.eval_path).is_file()):
            shared["split"] = self.eval_split or SourceConfig.split
        if self.source is DataSource.pydocs:
            shared["source"] = DataSource.file
        return SourceConfig(path=self.eval_path or self.path or "", **shared)


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


_UNSET = {"data.format": RowFormat.auto, "data.split": SourceConfig.split}
_SHARED = ("source", "format", "columns", "name", "split", "revision", "max_rows")


def require_path(source: SourceConfig | DataConfig, key: str) -> None:
    """A file or folder exists."""
    if source.source is DataSource.file:
        require(
            source.path == STDIN or Path(source.path).exists(),
            f"{key}={source.path} is no file or folder; give a .jsonl, .json, .csv, .parquet or .txt file, a folder of "
            "them, or with data=hub the name of a dataset on the hub",
        )
