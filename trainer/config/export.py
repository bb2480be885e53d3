"""`evaluate.*` and `export.*`: what a run does at its end."""

from dataclasses import dataclass, field

from trainer.config.errors import require
from trainer.config.model import DType

EXPORT_FORMATS = ("adapter", "merged", "merged_4bit", "quantized")


@dataclass
class EvaluateConfig:
    samples: int = 3
    """Held-out prompts that base and tuned model answer side by side at the end; 0 for none."""
    max_new_tokens: int = 48
    """Longest sample answer in tokens."""
    fidelity: bool | None = None
    """Compare the packed model of the run with the 16-bit one that it began as, on a few held-out rows, and write the
    figures into metrics.json; null: where `samples` are wanted."""
    plots: bool = False
    """Draw the report's charts as PNG files into `plots/` too; needs matplotlib."""

    @property
    def compares(self) -> bool:
        """`fidelity`, resolved."""
        return self.samples > 0 if self.fidelity is None else self.fidelity

    def __post_init__(self) -> None:
        require(self.samples >= 0, f"evaluate.samples={self.samples}; give 0 or more")
        require(self.max_new_tokens > 0, f"evaluate.max_new_tokens={self.max_new_tokens}; give at least 1")


@dataclass
class ExportConfig:
    formats: list[str] = field(default_factory=lambda: ["adapter"])
    """What to write at the end of the run: adapter (PEFT), merged (the whole model in 16 bits), merged_4bit (merged and
    rounded to 4 bits again, which loses most of the update: needs `allow_lossy`), quantized (the codes that
    quantization-aware training multiplied)."""
    dtype: DType = DType.auto
    """merged: dtype of the weights in the files; auto for bfloat16."""
    allow_lossy: bool = False
    """merged_4bit: write it all the same; what was lost is measured, printed and put in the model card."""

    def __post_init__(self) -> None:
        for name in self.formats:
            require(name in EXPORT_FORMATS, f"export.formats has {name!r}; accepted: {', '.join(EXPORT_FORMATS)}")
        require(len(set(self.formats)) == len(self.formats), f"export.formats={self.formats}; give each format once")
        lossy = "merged_4bit" in self.formats
        require(
            self.allow_lossy or not lossy,
            "export.formats has 'merged_4bit': rounding the merged weight to 4 bits again loses most of what was "
            "trained. Export adapter and serve it over its base, or merged (16 bits), both exact; with "
            "export.allow_lossy=true it is written, and the loss measured",
        )
        require(lossy or not self.allow_lossy, "export.allow_lossy=true has no effect without format merged_4bit")
        require(
            self.dtype is DType.auto or "merged" in self.formats,
            f"export.dtype={self.dtype.value} has no effect without format merged; add it to export.formats",
        )
