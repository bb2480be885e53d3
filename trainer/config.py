"""The configuration: a dataclass schema whose values are validated where they stand.

`trainer/compose.py` fills it from recipes and the command line, before torch is imported; from then on everybody gets
these plain dataclasses and nobody a DictConfig. `__post_init__` answers a mistake with the key, the value, what is
accepted and the next step.
"""

import math
import re
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
    wsd = "wsd"


class DecayShape(StrEnum):
    sqrt = "sqrt"
    linear = "linear"


class OptimizerName(StrEnum):
    adamw = "adamw"
    adamw_8bit = "adamw_8bit"
    adamw_paged = "adamw_paged"
    adamw_8bit_paged = "adamw_8bit_paged"
    adamw_schedule_free = "adamw_schedule_free"
    lion = "lion"
    lion_8bit = "lion_8bit"
    muon = "muon"

    @property
    def is_lion(self) -> bool:
        return self in (OptimizerName.lion, OptimizerName.lion_8bit)

    @property
    def is_paged(self) -> bool:
        return self in (OptimizerName.adamw_paged, OptimizerName.adamw_8bit_paged)


class Codebook(StrEnum):
    none = "none"
    nf4 = "nf4"
    fp4 = "fp4"
    nf3 = "nf3"
    nf2 = "nf2"
    int4 = "int4"
    int8 = "int8"


class ScaleDType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class MixedBits(StrEnum):
    first = "first"
    error = "error"


class LoraInit(StrEnum):
    default = "default"
    pissa = "pissa"
    olora = "olora"
    eva = "eva"


class Weights(StrEnum):
    lora = "lora"
    all = "all"


class Tracker(StrEnum):
    none = "none"
    wandb = "wandb"
    tensorboard = "tensorboard"


EXPORT_FORMATS = ("adapter", "merged", "merged_4bit")


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
    add_tokens: list[str] = field(default_factory=list)
    """Tokens to add to the vocabulary, such as `['<a>','</a>']`: matched whole, trained, saved with the adapter."""

    def __post_init__(self) -> None:
        key = f"model.path={self.path}"
        require(
            all(token.strip() for token in self.add_tokens) and len(set(self.add_tokens)) == len(self.add_tokens),
            f"model.add_tokens={self.add_tokens}; give each token once, none empty or of blanks alone",
        )
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
    weights: Weights = Weights.lora
    """What is trained: lora (an adapter over the frozen base; `lora` says which), or all (every weight)."""
    neftune_alpha: float = 0.0
    """NEFTune (arXiv:2310.05914): uniform noise of this size over sqrt(tokens x width) on the embeddings of each
    document while training; the paper uses 5 to 15. 0 for none."""
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
        for name in ("decoded_mb", "eval_every", "save_every", "max_grad_norm", "neftune_alpha"):
            require(getattr(self, name) >= 0, f"train.{name}={getattr(self, name)}; give 0 or more")


@dataclass
class OptimConfig:
    name: OptimizerName = OptimizerName.adamw
    """adamw; adamw_8bit, lion_8bit (bitsandbytes, arXiv:2110.02861: state in 8 bits); adamw_paged, adamw_8bit_paged
    (GPUs: state moves to main memory when the GPU's is full); lion (arXiv:2302.06675); muon (hidden matrices of a full
    fine-tuning, AdamW for the rest); adamw_schedule_free (arXiv:2405.15682: averages weights, needs no schedule)."""
    lr: float | None = None
    """Peak learning rate; null for 5e-4 * (2000 / hidden_size)^0.781, LoRA's best for Llamas of that width (Schulman et
    al., LoRA Without Regret, 2025): 1.3e-3 at 576, 2.9e-4 at 4096. Lion takes a tenth of it."""
    layer_decay: float = 1.0
    """Each layer's learning rate as a share of that of the layer above (arXiv:1801.06146); the top one has `lr`."""
    lora_plus_ratio: float = 1.0
    """LoRA+ (arXiv:2402.12354): learning rate of lora_B over that of lora_A; the paper's choice is 16."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float | None = None
    """Decay of the second moment; null for 0.999. lion: decay of the momentum; null for 0.99."""
    eps: float = 1e-8
    """Added to the denominator; lion has none."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms, biases and DoRA magnitudes have none."""
    muon_momentum: float = 0.95
    """muon: decay of the momentum that is orthogonalised."""
    schedule: Schedule = Schedule.cosine
    """constant, linear, cosine or wsd (constant, then a decay over `decay_ratio`), after the warm-up."""
    warmup_ratio: float = 0.03
    """Share of all steps in which the learning rate rises from 0."""
    decay_ratio: float = 0.2
    """wsd: share of all steps in which the learning rate falls, at the end (arXiv:2405.18392)."""
    decay_shape: DecayShape = DecayShape.sqrt
    """wsd: how it falls, as 1 - sqrt(t) or linear."""
    min_lr_ratio: float = 0.0
    """Where linear, cosine and wsd end, as a share of `lr`."""

    def __post_init__(self) -> None:
        require(
            self.lr is None or 0 < self.lr < math.inf,
            f"optim.lr={self.lr}; give a number above 0, such as 2e-4, or null",
        )
        require(0 < self.eps < math.inf, f"optim.eps={self.eps}; give a number above 0")
        require(0 <= self.weight_decay < math.inf, f"optim.weight_decay={self.weight_decay}; give 0 or more")
        for name in ("beta1", "beta2", "warmup_ratio", "muon_momentum"):
            value = getattr(self, name)
            require(value is None or 0 <= value < 1, f"optim.{name}={value}; give a number in [0, 1)")
        require(0 < self.layer_decay <= 1, f"optim.layer_decay={self.layer_decay}; give a number in (0, 1]")
        require(
            1 <= self.lora_plus_ratio < math.inf,
            f"optim.lora_plus_ratio={self.lora_plus_ratio}; give a number of at least 1, such as 16",
        )
        require(0 <= self.min_lr_ratio <= 1, f"optim.min_lr_ratio={self.min_lr_ratio}; give a number in [0, 1]")
        self._require_schedule()
        self._require_optimizer()

    def _require_schedule(self) -> None:
        """Settings of the schedule fit it."""
        require(
            self.min_lr_ratio == 0 or self.schedule is not Schedule.constant,
            f"optim.min_lr_ratio={self.min_lr_ratio} has no effect with optim.schedule=constant; use linear, cosine "
            "or wsd",
        )
        if self.schedule is Schedule.wsd:
            require(0 < self.decay_ratio <= 1, f"optim.decay_ratio={self.decay_ratio}; give a number in (0, 1]")
            require(
                self.warmup_ratio + self.decay_ratio <= 1,
                f"optim.warmup_ratio={self.warmup_ratio} and optim.decay_ratio={self.decay_ratio} add up to more than "
                "all steps; lower one",
            )
            return
        self._require_default("decay_ratio", f"optim.schedule={self.schedule.value}", "optim.schedule=wsd")
        self._require_default("decay_shape", f"optim.schedule={self.schedule.value}", "optim.schedule=wsd")

    def _require_optimizer(self) -> None:
        """Settings of the optimizer fit it."""
        setting = f"optim.name={self.name.value}"
        if self.name is not OptimizerName.muon:
            self._require_default("muon_momentum", setting, "optim.name=muon, or optim.beta1 for the first moment")
        if self.name.is_lion:
            self._require_default("eps", setting, "an AdamW, since a sign has no denominator")
        if self.name is OptimizerName.adamw_schedule_free:
            require(
                self.schedule is Schedule.constant,
                f"optim.schedule={self.schedule.value} cannot be combined with {setting}, whose average of the weights "
                "takes the decay's place; use optim.schedule=constant",
            )
            require(
                self.beta1 > 0, f"optim.beta1=0 cannot be combined with {setting}, which interpolates by it; use 0.9"
            )

    def _require_default(self, key: str, setting: str, instead: str) -> None:
        """A setting that `setting` does not look at has its default."""
        value, default = getattr(self, key), type(self).__dataclass_fields__[key].default
        shown = value.value if isinstance(value, Enum) else value
        require(value == default, f"optim.{key}={shown} has no effect with {setting}; use {instead}")


@dataclass
class QuantConfig:
    codebook: Codebook = Codebook.nf4
    """What packed weights can be: nf4 (arXiv:2305.14314), fp4 (bitsandbytes' floats), nf3, nf2 (NormalFloats of 3 and 2
    bits, for LoftQ), int4, int8 (round to nearest); none leaves the base in the compute dtype."""
    block_size: int | None = None
    """nf4, fp4, nf3, nf2: weights that share one scale; a power of two in 32..4096, null for 64."""
    double_quant: bool | None = None
    """nf4, fp4, nf3, nf2: store each scale in 8 bits too, 0.127 instead of 0.5 bits a weight; null for true."""
    group_size: int | None = None
    """int4, int8: input features that share one scale: 32, 64, 128 or -1 for a row; null for 32 (int4), -1 (int8)."""
    symmetric: bool | None = None
    """int4: no zero point; null for true."""
    divisor: float | None = None
    """int4, symmetric: a scale is the group's largest weight over 7, 7.5 or 8; null for 7."""
    scale_dtype: ScaleDType | None = None
    """int4, int8: float32, bfloat16 or float16, to which scales are rounded (float32 stores them); null for float32."""
    bits_budget: float | None = None
    """Average bits of a code, scales aside, e.g. 2.5: some layers get `codebook`, others `low_codebook`; null for
    `codebook` everywhere."""
    low_codebook: Codebook | None = None
    """With bits_budget: nf2 or nf3, of the layers that get fewer bits; null for nf2."""
    mixed: MixedBits | None = None
    """With bits_budget: who gets more bits: first (layers in the model's order, as in arXiv:2310.08659, section 4) or
    error (layers that gain most by it, for a bit, in relative error); null for first."""

    def __post_init__(self) -> None:
        for names, users in _QUANT_SETTINGS:
            for name in names:
                value = getattr(self, name)
                shown = value.value if isinstance(value, Enum) else value
                require(
                    value is None or self.codebook.value in users,
                    f"quant.{name}={shown} has no effect with quant.codebook={self.codebook.value}; leave it out, or "
                    f"use one of {', '.join(users)}",
                )
        sizes = [2**k for k in range(5, 13)]
        for name, values in (("block_size", sizes), ("group_size", [-1, 32, 64, 128]), ("divisor", [7, 7.5, 8])):
            value = getattr(self, name)
            require(value is None or value in values, f"quant.{name}={value}; use one of {values}")
        require(
            self.divisor is None or self.symmetric is not False,
            f"quant.divisor={self.divisor} has no effect with quant.symmetric=false; leave it out",
        )
        self._require_budget()

    def _require_budget(self) -> None:
        """The budget lies between the bits of two codebooks."""
        if self.bits_budget is None:
            for name in ("low_codebook", "mixed"):
                value = getattr(self, name)
                require(
                    value is None, f"quant.{name}={value} has no effect without quant.bits_budget; set it, e.g. 2.5"
                )
            return
        low = self.low_codebook or Codebook.nf2
        high_bits, low_bits = (_MIXED_BITS.get(codebook, 0) for codebook in (self.codebook, low))
        require(
            low_bits < high_bits and low in (Codebook.nf2, Codebook.nf3),
            f"quant.bits_budget={self.bits_budget} mixes quant.codebook={self.codebook.value} with "
            f"quant.low_codebook={low.value}; use nf4, fp4 or nf3 with nf2, or nf4 or fp4 with nf3",
        )
        require(
            low_bits <= self.bits_budget <= high_bits,
            f"quant.bits_budget={self.bits_budget} is not between the {low_bits} bits of {low.value} and the "
            f"{high_bits} of {self.codebook.value}; give a number between them, or leave it out",
        )


_BLOCK_CODEBOOKS = ("nf4", "fp4", "nf3", "nf2")
_QUANT_SETTINGS = (
    (("block_size", "double_quant", "bits_budget", "low_codebook", "mixed"), _BLOCK_CODEBOOKS),
    (("group_size", "scale_dtype"), ("int4", "int8")),
    (("symmetric", "divisor"), ("int4",)),
)
"""Settings of QuantConfig, and the codebooks that have them."""
_MIXED_BITS = {Codebook.nf4: 4, Codebook.fp4: 4, Codebook.nf3: 3, Codebook.nf2: 2}


@dataclass
class LoraConfig:
    rank: int = 16
    """Rank of the update B A."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank, or alpha / sqrt(rank) with use_rslora."""
    dropout: float = 0.0
    """Dropout on the adapter's input."""
    target_modules: Any = "all-linear"
    """all-linear (each linear layer but the head), a list of module names such as `[q_proj,v_proj]`, or a regular
    expression for whole names, such as `'model.layers.[0-7].mlp.*_proj'` with `.*` for the star."""
    layers: list[int] | None = None
    """Numbers of the layers that get an adapter, from 0; null for all."""
    rank_pattern: list[str] = field(default_factory=list)
    """Other ranks by the ends of layers' names, regular expressions, such as `[down_proj:32,layers.0.*:8]`; the first
    that matches counts."""
    alpha_pattern: list[str] = field(default_factory=list)
    """Other alphas, in the same way."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole and saved with the adapter, such as `[embed_tokens]` or `[norm]`."""
    use_rslora: bool = False
    """rsLoRA (arXiv:2312.03732): scale by alpha / sqrt(rank), so that the update does not shrink as the rank grows."""
    use_dora: bool = False
    """DoRA (arXiv:2402.09353): also train the length of each row of the weight."""
    init: LoraInit = LoraInit.default
    """Where the adapter starts: default (A random, B zero), pissa (arXiv:2404.02948: the weight's largest singular
    parts, the base keeps the rest), olora (arXiv:2406.01775: its QR factors), eva (arXiv:2410.07170: A from the
    activations of training rows, ranks where they explain most)."""
    eva_rho: float = 2.0
    """eva: a layer gets at most this multiple of the rank; 1 gives each layer its own rank."""

    def __post_init__(self) -> None:
        require(self.rank > 0, f"lora.rank={self.rank}; give at least 1")
        require(0 < self.alpha < math.inf, f"lora.alpha={self.alpha}; give a number above 0")
        require(0 <= self.dropout < 1, f"lora.dropout={self.dropout}; give a number in [0, 1)")
        self._require_targets()
        for key in ("rank_pattern", "alpha_pattern"):
            self._require_pattern(key, r"\d+" if key == "rank_pattern" else r"\d+(\.\d+)?")
        both = set(self.modules_to_save) & set(self.target_modules if isinstance(self.target_modules, list) else [])
        require(not both, f"lora.modules_to_save and lora.target_modules both have {sorted(both)}; choose one for each")
        require(1 <= self.eva_rho < math.inf, f"lora.eva_rho={self.eva_rho}; give a number of at least 1")
        require(
            self.eva_rho == 2.0 or self.init is LoraInit.eva,
            f"lora.eva_rho={self.eva_rho} has no effect with lora.init={self.init.value}; use lora.init=eva",
        )

    @property
    def ranks(self) -> dict[str, int]:
        """rank_pattern as a mapping, in its order."""
        return {pattern: int(value) for pattern, value in _split(self.rank_pattern)}

    @property
    def alphas(self) -> dict[str, float]:
        """alpha_pattern as a mapping, in its order."""
        return {pattern: float(value) for pattern, value in _split(self.alpha_pattern)}

    def _require_pattern(self, key: str, number: str) -> None:
        for item, (pattern, value) in zip(getattr(self, key), _split(getattr(self, key)), strict=True):
            require(
                bool(pattern) and _is_regex(pattern) and re.fullmatch(number, value) and float(value) > 0,
                f"lora.{key} has {item!r}; give the end of layers' names, a regular expression, and a number above 0, "
                "such as down_proj:32",
            )

    def _require_targets(self) -> None:
        """target_modules becomes all-linear, a list of names or a pattern; layers fit it."""
        targets = self.target_modules
        if isinstance(targets, str) and targets != "all-linear" and re.fullmatch(r"\w+", targets):
            self.target_modules = targets = [targets]
        is_names = isinstance(targets, list) and bool(targets) and all(isinstance(n, str) and n for n in targets)
        require(
            is_names or (isinstance(targets, str) and bool(targets) and _is_regex(targets)),
            f"lora.target_modules={targets}; use all-linear, a list of names such as [q_proj,v_proj], or a regular "
            "expression that matches whole names",
        )
        if self.layers is not None:
            require(
                bool(self.layers) and all(index >= 0 for index in self.layers),
                f"lora.layers={self.layers}; give numbers from 0, such as [0,1], or null for all layers",
            )
            require(
                isinstance(targets, list) or targets == "all-linear",
                f"lora.layers={self.layers} cannot be combined with the pattern lora.target_modules={targets}; write "
                "the numbers into the pattern",
            )


def _split(patterns: list[str]) -> list[tuple[str, str]]:
    """`pattern:value` at the last colon."""
    return [(item.rpartition(":")[0], item.rpartition(":")[2]) for item in patterns]


def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


@dataclass
class LoftqConfig:
    iterations: int = 0
    """LoftQ (arXiv:2310.08659): start from codes and adapter that together are close to the 16-bit weights, after this
    many rounds of quantizing and fitting; the best one is kept. 1 leaves the base's codes as they are; 0 is off."""
    calibration_rows: int = 0
    """Training rows that weight the error by each layer's inputs; 0 for unweighted."""
    fallback: bool = True
    """Start the adapter of a layer plain where LoftQ does not lower the error; false stops the run there."""

    def __post_init__(self) -> None:
        for name in ("iterations", "calibration_rows"):
            require(getattr(self, name) >= 0, f"loftq.{name}={getattr(self, name)}; give 0 or more")
        if self.iterations == 0:
            key = f"loftq.calibration_rows={self.calibration_rows}"
            require(not self.calibration_rows, f"{key} has no effect with loftq.iterations=0; use conf=loftq")
            require(self.fallback, "loftq.fallback=false has no effect with loftq.iterations=0; use conf=loftq")


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
    """What to write at the end of the run: adapter (PEFT), merged (the whole model in 16 bits), merged_4bit (merged and
    rounded to 4 bits again, which loses most of the update: needs `allow_lossy`)."""
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
    loftq: LoftqConfig = field(default_factory=LoftqConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, f"seed={self.seed}; give a whole number in 0..{2**32 - 1}")
        self._require_one_method()
        self._require_optimizer_fits()

    def _require_optimizer_fits(self) -> None:
        """The optimizer's settings have something to work on; `optim.build_optimizer` checks again, on the model."""
        adapter = self.train.weights is Weights.lora
        require(
            adapter or self.optim.lora_plus_ratio == 1,
            f"optim.lora_plus_ratio={self.optim.lora_plus_ratio} has no effect with train.weights=all, which has no "
            "lora_B; use 1",
        )
        require(
            not adapter or bool(self.lora.modules_to_save) or self.optim.name is not OptimizerName.muon,
            "optim.name=muon is for whole hidden matrices, and an adapter's factors are none (docs/decisions.md); use "
            "conf=full, or optim.name=adamw",
        )

    def _require_one_method(self) -> None:
        """What is trained, how it starts and what is written fit each other."""
        packed, loftq, init = self.quant.codebook is not Codebook.none, self.loftq.iterations > 0, self.lora.init
        require(
            packed or not loftq,
            f"loftq.iterations={self.loftq.iterations} makes up for quantization, and quant.codebook=none has none; "
            "choose a codebook such as nf4, or loftq.iterations=0",
        )
        require(
            not loftq or init is LoraInit.default,
            f"loftq.iterations={self.loftq.iterations} and lora.init={init.value} both choose where the adapter "
            "starts; use loftq.iterations=0, or lora.init=default",
        )
        bitsandbytes = self.quant.codebook in (Codebook.nf4, Codebook.fp4) and self.quant.bits_budget is None
        require(
            bitsandbytes or "merged_4bit" not in self.export.formats,
            f"export.formats has merged_4bit, whose files hold nf4 and fp4, but quant.codebook="
            f"{self.quant.codebook.value} or quant.bits_budget={self.quant.bits_budget} packs otherwise; export merged",
        )
        if self.train.weights is Weights.lora:
            return
        key = "train.weights=all"
        require(
            not packed,
            f"{key} trains every weight, and quant.codebook={self.quant.codebook.value} packs them, which cannot be "
            "trained; use quant.codebook=none (conf=full), or train.weights=lora",
        )
        require(self.lora == LoraConfig(), f"lora.* has no effect with {key}; leave it out, or use conf=lora")
        require(
            "adapter" not in self.export.formats,
            f"export.formats={self.export.formats} has adapter, and {key} trains none; use export.formats=[merged]",
        )


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain values (enums by value), for YAML and trackers."""
    return {key: _plain(value) for key, value in asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else value
