"""`data.*`: what is trained on."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from trainer.config.errors import require


class DataSource(StrEnum):
    pydocs = "pydocs"
    jsonl = "jsonl"


@dataclass
class ColumnsConfig:
    messages: str | None = None
    """The file's field with a list of `{role, content}`."""
    prompt: str | None = None
    """The file's field with the user's side."""
    completion: str | None = None
    """The file's field with the answer."""
    text: str | None = None
    """The file's field with plain text."""
    chosen: str | None = None
    """preference.method=dpo, orpo: the file's field with the better answer."""
    rejected: str | None = None
    """preference.method=dpo, orpo: the file's field with the worse answer."""
    label: str | None = None
    """preference.method=kto: the file's field with true for a good answer, false for a bad one."""


@dataclass
class DataConfig:
    source: DataSource = DataSource.pydocs
    """pydocs: questions about the running Python's standard library; jsonl: a file of yours. `data=<name>` sets it."""
    path: str | None = None
    """jsonl: the training file, one JSON object a line."""
    eval_path: str | None = None
    """jsonl: the held-out file. Without it the last `eval_rows` rows of a seeded shuffle are held out."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    """jsonl: what the file calls our fields, e.g. `data.columns.prompt=question data.columns.completion=answer`."""
    max_rows: int | None = None
    """Use the first rows only; null for all."""
    eval_rows: int = 64
    """Rows held out for evaluation, at most."""
    max_seq_len: int = 512
    """Longest row in tokens. Longer rows are cut at the end."""
    packing: bool = False
    """Several documents in one row. Not available yet: only false is accepted."""

    def __post_init__(self) -> None:
        if self.source is DataSource.jsonl:
            require(bool(self.path), "data.path is not set; data=jsonl needs data.path=<file>.jsonl")
            for key, path in (("data.path", self.path), ("data.eval_path", self.eval_path)):
                require(path is None or Path(path).is_file(), f"{key}={path} is not a file; give a JSON Lines file")
        else:
            require(self.path is None, f"data.path={self.path} has no effect with data=pydocs; use data=jsonl")
            require(self.eval_path is None, f"data.eval_path={self.eval_path} has no effect with data=pydocs")
            mapped = [f"{name}={value}" for name, value in vars(self.columns).items() if value]
            require(not mapped, f"data.columns.{mapped} has no effect with data=pydocs; use data=jsonl")
        require(self.max_rows is None or self.max_rows > 0, f"data.max_rows={self.max_rows}; give at least 1, or null")
        require(self.eval_rows > 0, f"data.eval_rows={self.eval_rows}; give at least 1")
        require(self.max_seq_len >= 8, f"data.max_seq_len={self.max_seq_len}; give at least 8 tokens")
        require(not self.packing, "data.packing=true is not available yet; use data.packing=false")
