"""The configuration: a dataclass schema whose values are validated where they stand.

`trainer/compose.py` fills it from recipes and the command line, before torch is imported; from then on everybody gets
these plain dataclasses and nobody a DictConfig. `__post_init__` answers a mistake with the key, the value, what is
accepted and the next step.
"""

from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from typing import Any

from trainer.config.data import DataConfig
from trainer.config.errors import require
from trainer.config.export import EvaluateConfig, ExportConfig
from trainer.config.lora import LoftqConfig, LoraConfig, LoraInit
from trainer.config.model import ModelConfig
from trainer.config.optim import OptimConfig, OptimizerName
from trainer.config.preference import Method, PreferenceConfig
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
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, f"seed={self.seed}; give a whole number in 0..{2**32 - 1}")
        self._require_one_method()
        self._require_optimizer_fits()
        self._require_preference_fits()

    def _require_preference_fits(self) -> None:
        """A preference method has its columns, and a reference that is the model before training."""
        preference, method = self.preference, self.preference.method
        read = {
            Method.none: ("messages", "prompt", "completion", "text"),
            Method.kto: ("prompt", "completion", "label"),
        }.get(method, ("prompt", "chosen", "rejected"))
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
