"""The configuration: a dataclass schema whose values are validated where they stand.

`trainer/compose.py` fills it from recipes and the command line, before torch is imported; from then on everybody gets
these plain dataclasses and nobody a DictConfig. `__post_init__` answers a mistake with the key, the value, what is
accepted and the next step.
"""

from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from typing import Any

from trainer.config.blockwise import BlockwiseConfig
from trainer.config.data import DataConfig
from trainer.config.distill import DistillConfig
from trainer.config.errors import require
from trainer.config.export import EvaluateConfig, ExportConfig
from trainer.config.lora import LoftqConfig, LoraConfig, LoraInit
from trainer.config.model import ModelConfig
from trainer.config.optim import OptimConfig, OptimizerName
from trainer.config.preference import Method, PreferenceConfig
from trainer.config.qat import QatConfig, RoundingName, SchemeName
from trainer.config.quant import Codebook, QuantConfig
from trainer.config.train import TrainConfig, Weights


class Tracker(StrEnum):
    none = "none"
    wandb = "wandb"
    tensorboard = "tensorboard"


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
    """Where metrics go besides metrics.jsonl: none, wandb (a sweep's runs are a group, the report is an artifact; a run
    goes on where it cannot start; WANDB_MODE=offline needs no network) or tensorboard."""
    project: str = "lowbit"
    """wandb: the project's name."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    loftq: LoftqConfig = field(default_factory=LoftqConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    qat: QatConfig = field(default_factory=QatConfig)
    blockwise: BlockwiseConfig = field(default_factory=BlockwiseConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, f"seed={self.seed}; give a whole number in 0..{2**32 - 1}")
        self._require_one_method()
        self._require_qat_fits()
        self._require_scales_fit()
        self._require_optimizer_fits()
        self._require_preference_fits()
        self._require_streaming_fits()

    def _require_streaming_fits(self) -> None:
        """What is read while training has no end of its own, and no row that can be looked up."""
        if not self.data.streaming:
            return
        key = "data.streaming=true"
        require(
            self.train.max_steps is not None,
            f"{key} does not know how many rows there are, so train.epochs={self.train.epochs:g} says nothing; set "
            "train.max_steps",
        )
        for is_set, setting, instead in (
            (self.distill.enabled and self.distill.top_k > 0, f"distill.top_k={self.distill.top_k}", "distill.top_k=0"),
            (self.preference.precompute, "preference.precompute=true", "preference.precompute=false"),
            (self.preference.method is Method.kto, "preference.method=kto", "data.streaming=false"),
            (self.blockwise.epochs > 0, f"blockwise.epochs={self.blockwise.epochs}", "data.streaming=false"),
        ):
            require(
                not is_set,
                f"{setting} looks at all rows before the first step, and {key} never has them; use {instead}",
            )

    def _require_preference_fits(self) -> None:
        """A preference method has its columns, and a reference that is the model before training."""
        preference, method = self.preference, self.preference.method
        shared = ("system", "tools")
        read = {
            Method.none: tuple(name for name in vars(self.data.columns) if name not in ("chosen", "rejected", "label")),
            Method.kto: ("prompt", "completion", "label", *shared),
        }.get(method, ("prompt", "chosen", "rejected", *shared))
        unread = [f"{name}={value}" for name, value in vars(self.data.columns).items() if value and name not in read]
        require(
            not unread,
            f"data.columns.{', data.columns.'.join(unread)} has no effect with preference.method={method.value}, which "
            f"reads {', '.join(read)}; leave it out, or choose another method",
        )
        require(
            method is Method.none or not self.train.neftune_alpha,
            f"train.neftune_alpha={self.train.neftune_alpha} cannot be combined with preference.method={method.value}: "
            "log-probabilities with noise are not those that are compared; use train.neftune_alpha=0",
        )
        require(
            not method.has_reference or preference.precompute or self.train.weights is Weights.lora,
            f"train.weights={self.train.weights.value} leaves no model before training that preference.method="
            f"{method.value} could compare with; use preference.precompute=true, train.weights=lora, or method=orpo",
        )
        require(
            method is Method.none or not (self.qat.enabled or self.distill.enabled),
            f"preference.method={method.value} with qat.scheme={self.qat.scheme.value}, distill.weight="
            f"{self.distill.weight:g}: both compare with the model before training, each in its own way; train the "
            "preference first, export it merged, and give that model to conf=qat",
        )

    def _require_qat_fits(self) -> None:
        """Quantization-aware training has a 16-bit base, begins before it ends, and exports what it trained."""
        formats, key = set(self.export.formats), f"qat.scheme={self.qat.scheme.value}"
        if not self.qat.enabled:
            require(
                "quantized" not in formats,
                f"export.formats={self.export.formats} has quantized, the codes of quantization-aware training, and "
                f"{key} trains in 16 bits; use conf=qat, or another format",
            )
            return
        require(
            bool(formats & {"quantized", "merged"}),
            f"export.formats={self.export.formats} has no model of the codes that {key} trains; add quantized",
        )
        require(
            self.quant.codebook is Codebook.none,
            f"{key} quantizes the weights that are trained, and quant.codebook={self.quant.codebook.value} packs them "
            "before; use quant.codebook=none",
        )
        require(
            self.optim.name is not OptimizerName.adamw_schedule_free,
            f"optim.name=adamw_schedule_free exports an average of weights, and {key} trains the codes of one weight; "
            "use optim.name=adamw with optim.schedule=wsd",
        )
        if self.train.max_steps:
            self.qat.require_moments(self.train.max_steps)

    def _require_scales_fit(self) -> None:
        """Block-wise training and the training of scales come together, and what they leave aside is not set."""
        scales, epochs, steps = self.train.weights is Weights.scales, self.blockwise.epochs, self.train.max_steps
        require(
            scales or not epochs,
            f"blockwise.epochs={epochs} fixes codes, and train.weights={self.train.weights.value} trains none of what "
            "is left; use train.weights=scales (conf=qat_blocks)",
        )
        require(
            steps != 0 or epochs > 0,
            "train.max_steps=0 trains nothing without blockwise.epochs; give at least 1, or use conf=qat_blocks",
        )
        if not scales:
            return
        key = "train.weights=scales"
        require(
            self.qat.enabled, f"{key} trains the scales of codes, and qat.scheme=none has none; use qat.scheme=int4"
        )
        require(
            self.qat.rounding is RoundingName.nearest and self.qat.start == 0,
            f"qat.start={self.qat.start:g} or qat.rounding={self.qat.rounding.value} has no effect with {key}, whose "
            "codes are fixed before the first step; leave them out, or use conf=qat",
        )
        require(
            not self.model.add_tokens,
            f"model.add_tokens={self.model.add_tokens}: {key} does not train embeddings, so the tokens would mean "
            "nothing; use conf=qat",
        )
        require(
            self.optim.name is not OptimizerName.muon and self.optim.weight_decay == 0,
            f"optim.name={self.optim.name.value}, optim.weight_decay={self.optim.weight_decay:g} with {key}: a smaller "
            "scale is another weight, not a simpler one, and scales are no matrix; use optim.name=adamw, no decay",
        )

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
            not (self.distill.enabled and self.model.add_tokens),
            f"model.add_tokens={self.model.add_tokens} with distill.weight={self.distill.weight:g}: the teacher does "
            "not know these tokens and would teach not to write them; use distill.weight=0, or leave the tokens out",
        )
        require(
            self.distill.weight < 1 or packed or (self.qat.enabled and not self.qat.start),
            f"distill.weight={self.distill.weight:g} with quant.codebook={self.quant.codebook.value}, qat.scheme="
            f"{self.qat.scheme.value}, qat.start={self.qat.start:g}: where nothing is quantized the student is its "
            "teacher and has no gradient; lower distill.weight, or quantize from the first step on",
        )
        if self.qat.enabled and self.train.weights is Weights.lora:
            self._require_merge_aware()
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
        key = f"train.weights={self.train.weights.value}"
        what = "every weight" if self.train.weights is Weights.all else "codes made from 16-bit weights"
        require(
            not packed,
            f"{key} trains {what}, and quant.codebook={self.quant.codebook.value} packs them, which cannot be trained; "
            "use quant.codebook=none (conf=full), or train.weights=lora",
        )
        require(self.lora == LoraConfig(), f"lora.* has no effect with {key}; leave it out, or use conf=lora")
        require(
            "adapter" not in self.export.formats,
            f"export.formats={self.export.formats} has adapter, and {key} trains none; use export.formats="
            f"[{'quantized' if self.qat.enabled else 'merged'}]",
        )

    def _require_merge_aware(self) -> None:
        """What LoRA has and the codes of a merged weight cannot have; see trainer/qat/merge_aware.py."""
        key, lora = f"qat.scheme={self.qat.scheme.value}", self.lora
        require(
            not self.loftq.iterations,
            f"loftq.iterations={self.loftq.iterations} makes up for codes that stay, and {key} chooses codes anew: at "
            "B = 0 they are the nearest already, and LoftQ's factors move them away; use loftq.iterations=0",
        )
        require(
            lora.dropout == 0,
            f"lora.dropout={lora.dropout} drops a part of the adapter's input, and {key} trains the merged weight, "
            "which has no such part; use lora.dropout=0",
        )
        require(
            not lora.use_dora,
            f"lora.use_dora=true trains the length of rows, and {key} rounds W + s B A to codes whose scales set it; "
            "use lora.use_dora=false",
        )
        rounding, static = self.qat.rounding.value, SchemeName.int8_static in self.qat.names
        require(
            rounding == "nearest",
            f"qat.rounding={rounding} draws or trains a direction for each weight, and an adapter trains factors; use "
            "qat.rounding=nearest, or conf=qat",
        )
        require(
            not static,
            "qat.scheme=int8_static observes ranges of inputs, which layers with an adapter do not; use "
            "qat.scheme=int8 (a scale a token), or conf=qat",
        )


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain values (enums by value), for YAML and trackers."""
    return {key: _plain(value) for key, value in asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else value
