"""The configuration: a dataclass schema whose values are validated where they stand.

`trainer/compose.py` fills it from recipes and the command line, before torch is imported; from then on everybody gets
these plain dataclasses and nobody a DictConfig. `__post_init__` answers a mistake with the key, the value, what is
accepted and the next step.
"""

import math
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """A mistake that the user can mend. Its text names the key, the value, what is accepted and the next step."""


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)


class ModelSource(StrEnum):
    bundled = "bundled"
    hub = "hub"
    folder = "folder"
    gguf = "gguf"
    tiny = "tiny"


class DType(StrEnum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"


class DataSource(StrEnum):
    pydocs = "pydocs"
    jsonl = "jsonl"


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class OptimizerName(StrEnum):
    adamw = "adamw"
    adamw_8bit = "adamw_8bit"


class Codebook(StrEnum):
    nf4 = "nf4"
    fp4 = "fp4"


class Tracker(StrEnum):
    none = "none"
    wandb = "wandb"
    tensorboard = "tensorboard"


EXPORT_FORMATS = ("adapter",)


@dataclass
class ModelConfig:
    source: ModelSource = ModelSource.bundled
    """Where the model comes from: bundled, hub, folder, gguf or tiny; `model=<name>` sets it."""
    path: str | None = None
    """hub: `org/name`; folder: a Hugging Face folder; gguf: a .gguf file; bundled and tiny need none."""
    revision: str | None = None
    """hub only: branch, tag or commit."""
    dtype: DType = DType.auto
    """Compute dtype. auto takes bfloat16 where the processor or GPU multiplies it natively, else float32."""

    def __post_init__(self) -> None:
        key = f"model.path={self.path}"
        require(
            self.revision is None or self.source is ModelSource.hub,
            f"model.revision={self.revision} has no effect with a {self.source.value} model; use model=hub",
        )
        match self.source:
            case ModelSource.hub:
                require(bool(self.path), "model.path is not set; model=hub needs model.path=org/name")
            case ModelSource.folder:
                require(bool(self.path), "model.path is not set; model=folder needs model.path=<Hugging Face folder>")
                require(Path(self.path).is_dir(), f"{key} is not a folder; give one that holds config.json and weights")
                require(
                    (Path(self.path) / "config.json").is_file(),
                    f"{key} holds no config.json; give the folder that save_pretrained wrote",
                )
            case ModelSource.gguf:
                require(bool(self.path), "model.path is not set; model=gguf needs model.path=<file>.gguf")
                require(Path(self.path).is_file(), f"{key} is not a file; give the path of a .gguf file")
            case ModelSource.bundled | ModelSource.tiny:
                require(
                    self.path is None,
                    f"{key} has no effect with a {self.source.value} model; use model=hub, model=folder or model=gguf",
                )


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


@dataclass
class TrainConfig:
    max_steps: int | None = None
    """Optimizer steps; null for as many as `epochs` needs."""
    epochs: float = 1.0
    """Passes over the data, when `max_steps` is null."""
    batch_size: int = 8
    """Sequences a process takes in one micro-step."""
    grad_accum_steps: int = 1
    """Micro-steps in one optimizer step. The loss is the mean over all their target tokens."""
    max_pass_tokens: int | None = None
    """Most tokens that go through the model at once: a micro-step's rows are grouped by length into passes, which
    changes memory and speed but not the gradient. null for 1024 on a CPU and 16384 on a GPU."""
    decoded_mb: int = 0
    """MiB for packed layers that are kept in the compute dtype too, from the first on, and not decoded twice a pass."""
    eval_every: int = 0
    """Steps between evaluations while training; 0 for before and after only."""
    eval_batch_size: int = 16
    """Sequences in one evaluation batch."""
    save_every: int = 50
    """Steps between checkpoints; 0 for the last step only."""
    keep_checkpoints: int = 2
    """How many checkpoints stay; the newest ones."""
    max_grad_norm: float = 1.0
    """Gradient norm is clipped to this; 0 switches clipping off."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in backward: about a third slower, much less memory."""
    log_row_ids: bool = False
    """Write the ids of each step's rows to metrics.jsonl."""

    def __post_init__(self) -> None:
        require(self.max_steps is None or self.max_steps > 0, f"train.max_steps={self.max_steps}; give >= 1, or null")
        require(0 < self.epochs < math.inf, f"train.epochs={self.epochs}; give a number above 0")
        for name in ("batch_size", "grad_accum_steps", "max_pass_tokens", "eval_batch_size", "keep_checkpoints"):
            require(
                getattr(self, name) is None or getattr(self, name) > 0,
                f"train.{name}={getattr(self, name)}; give at least 1",
            )
        for name in ("decoded_mb", "eval_every", "save_every", "max_grad_norm"):
            require(getattr(self, name) >= 0, f"train.{name}={getattr(self, name)}; give 0 or more")


@dataclass
class OptimConfig:
    name: OptimizerName = OptimizerName.adamw
    """adamw, or adamw_8bit (bitsandbytes, arXiv:2110.02861: optimizer state in 8 bits)."""
    lr: float | None = None
    """Peak learning rate; null for 5e-4 * (2000 / hidden_size)^0.781, LoRA's best for Llamas of that width (Schulman et
    al., LoRA Without Regret, 2025): 1.3e-3 at 576, 2.9e-4 at 4096."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    schedule: Schedule = Schedule.cosine
    """constant, linear or cosine, after the warm-up."""
    warmup_ratio: float = 0.03
    """Share of all steps in which the learning rate rises from 0."""
    min_lr_ratio: float = 0.0
    """Where linear and cosine end, as a share of `lr`."""

    def __post_init__(self) -> None:
        require(
            self.lr is None or 0 < self.lr < math.inf,
            f"optim.lr={self.lr}; give a number above 0, such as 2e-4, or null",
        )
        require(0 < self.eps < math.inf, f"optim.eps={self.eps}; give a number above 0")
        require(0 <= self.weight_decay < math.inf, f"optim.weight_decay={self.weight_decay}; give 0 or more")
        for name in ("beta1", "beta2", "warmup_ratio"):
            require(0 <= getattr(self, name) < 1, f"optim.{name}={getattr(self, name)}; give a number in [0, 1)")
        require(
            self.min_lr_ratio == 0 or self.schedule is not Schedule.constant,
            f"optim.min_lr_ratio={self.min_lr_ratio} has no effect with optim.schedule=constant; use linear or cosine",
        )
        require(0 <= self.min_lr_ratio <= 1, f"optim.min_lr_ratio={self.min_lr_ratio}; give a number in [0, 1]")


@dataclass
class QuantConfig:
    codebook: Codebook = Codebook.nf4
    """The 16 values that a 4-bit code stands for: nf4 (arXiv:2305.14314, appendix E) or fp4 (bitsandbytes' floats)."""
    block_size: int = 64
    """Weights that share one absmax; a power of two in 32..4096."""
    double_quant: bool = True
    """Store each absmax in 8 bits too: 4.127 instead of 4.5 bits a weight."""

    def __post_init__(self) -> None:
        sizes = [2**k for k in range(5, 13)]
        require(self.block_size in sizes, f"quant.block_size={self.block_size}; use one of {sizes}")


@dataclass
class LoraConfig:
    rank: int = 16
    """Rank of the update B A."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout on the adapter's input."""
    target_modules: Any = "all-linear"
    """all-linear (each quantized layer), or a list of module names such as `[q_proj,v_proj]`."""

    def __post_init__(self) -> None:
        require(self.rank > 0, f"lora.rank={self.rank}; give at least 1")
        require(0 < self.alpha < math.inf, f"lora.alpha={self.alpha}; give a number above 0")
        require(0 <= self.dropout < 1, f"lora.dropout={self.dropout}; give a number in [0, 1)")
        names = [self.target_modules] if isinstance(self.target_modules, str) else self.target_modules
        require(
            isinstance(names, list) and bool(names) and all(isinstance(name, str) and name for name in names),
            f"lora.target_modules={self.target_modules}; use all-linear or a list of names such as [q_proj,v_proj]",
        )
        if names != ["all-linear"]:
            self.target_modules = names


@dataclass
class EvaluateConfig:
    samples: int = 3
    """Held-out prompts that base and tuned model answer side by side at the end; 0 for none."""
    max_new_tokens: int = 48
    """Longest sample answer in tokens."""

    def __post_init__(self) -> None:
        require(self.samples >= 0, f"evaluate.samples={self.samples}; give 0 or more")
        require(self.max_new_tokens > 0, f"evaluate.max_new_tokens={self.max_new_tokens}; give at least 1")


@dataclass
class ExportConfig:
    formats: list[str] = field(default_factory=lambda: ["adapter"])
    """What to write at the end of the run: adapter (PEFT)."""

    def __post_init__(self) -> None:
        for name in self.formats:
            require(name in EXPORT_FORMATS, f"export.formats has {name!r}; accepted: {', '.join(EXPORT_FORMATS)}")


@dataclass
class Config:
    """Everything a run needs. `config.yaml` in the run folder is this, resolved."""

    seed: int = 0
    """Seeds data order, adapter initialisation and dropout."""
    output_dir: str | None = None
    """The run folder; null for `outputs/<recipe>/<date>_<time>`."""
    resume: str | None = None
    """Go on with a run: its folder, or `latest` for the newest one below `outputs/`."""
    tracker: Tracker = Tracker.none
    """Where metrics go besides metrics.jsonl: none, wandb or tensorboard."""
    project: str = "lowbit"
    """wandb: the project's name."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, f"seed={self.seed}; give a whole number in 0..{2**32 - 1}")


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain values (enums by value), for YAML and trackers."""
    return {key: _plain(value) for key, value in asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else value
