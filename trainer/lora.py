"""LoRA on packed layers: PEFT owns the adapter's life, this layer does its arithmetic.

PEFT creates, names, saves, loads and switches adapters; through its custom-module hook it puts a `LoraQuantLinear`
over each `QuantLinear`. The common case (one active adapter, no dropout) is one fused op, see kernels/lora_linear.py.
"""

import warnings

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from trainer.config import LoraConfig, UserError
from trainer.kernels.lora_linear import Adapter
from trainer.linear import QuantLinear


class LoraQuantLinear(nn.Module, LoraLayer):
    """y = x W^T + scaling (dropout(x) A^T) B^T over a packed W.

    in   x [..., in_features] float
    out  [..., out_features] of x's dtype
    """

    def __init__(
        self, base_layer: QuantLinear, adapter_name: str, config: PeftLoraConfig, r: int, lora_alpha: float, **kwargs
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self.fan_in_fan_out = False
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def resolve_lora_variant(self, *, config: PeftLoraConfig, **kwargs) -> None:
        """Refuse what reads the dense base weight, which a packed layer does not have."""
        if config.use_dora or config.lora_bias or not isinstance(config.init_lora_weights, bool):
            raise ValueError(
                f"use_dora={config.use_dora}, lora_bias={config.lora_bias}, init_lora_weights="
                f"{config.init_lora_weights!r} cannot be combined with a packed base; use plain LoRA"
            )

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(
            "an adapter cannot be merged into packed weights: rounding to 4 bits again loses most of the update. "
            "Serve base and adapter unmerged, which is exact"
        )

    @property
    def adapter(self) -> Adapter | None:
        """The one active adapter, or None if none is active (disabled, unloaded, or of other layers only).

        raises  ValueError if the layer is no single product: several active adapters, or dropout in training
        """
        names = self._active_names()
        if not names:
            return None
        if len(names) > 1 or self._drops(names[0]):
            why = f"{len(names)} active adapters {names}" if len(names) > 1 else f"dropout of adapter {names[0]!r}"
            raise ValueError(f"{why} cannot be fused into one product; check `fusable` first, or call the layer")
        name = names[0]
        return Adapter(self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name])

    @property
    def fusable(self) -> bool:
        """Whether base and `adapter` say all that the layer computes."""
        names = self._active_names()
        return not names or (len(names) == 1 and not self._drops(names[0]))

    def _active_names(self) -> list[str]:
        return [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]

    def _drops(self, name: str) -> bool:
        return self.training and isinstance(self.lora_dropout[name], nn.Dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.fusable:
            return self.base_layer(x, self.adapter)
        y = self.base_layer(x)
        for name in self._active_names():
            lora_A, lora_B = self.lora_A[name].weight.to(x.dtype), self.lora_B[name].weight.to(x.dtype)
            y = y + (self.lora_dropout[name](x) @ lora_A.T) @ lora_B.T * self.scaling[name]
        return y


def attach_lora(model: nn.Module, config: LoraConfig, *, seed: int) -> PeftModel:
    """Put a trainable adapter on the packed layers of `model`: A from a seeded uniform, B zero.

    raises  UserError if a name in lora.target_modules is not a packed layer
    """
    peft_config = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=_target_modules(model, config),
    )
    peft_config._register_custom_module({QuantLinear: LoraQuantLinear})
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unsupported layer type")  # said of every custom module
        torch.manual_seed(seed)
        return get_peft_model(model, peft_config)


def _target_modules(model: nn.Module, config: LoraConfig) -> list[str]:
    """The last parts of the target layers' names, as other engines expect them in adapter_config.json."""
    present = sorted(
        {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    )
    if config.target_modules == "all-linear":
        return present
    for name in config.target_modules:
        if name not in present:
            raise UserError(f"lora.target_modules has {name!r}, which is no quantized layer; accepted: {present}")
    return config.target_modules
