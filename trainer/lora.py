"""LoRA and its family on frozen linear layers: PEFT owns the adapter's life, this layer does its arithmetic.

PEFT creates, names, saves, loads and switches adapters; through its custom-module hook it puts a `LoraLinear` over each
packed layer, and over each 16-bit layer of a base that is not packed. The common case (one active adapter, no dropout)
is one fused op, see kernels/lora_linear.py.

    LoRA, rsLoRA   y = x W^T + s (x A^T) B^T                      s = alpha / rank, or alpha / sqrt(rank) with rsLoRA
    DoRA           y = m / ||W + s B A|| * (x W^T + s (x A^T) B^T)      norms of rows, which get no gradient
    PiSSA, OLoRA   the adapter starts at B_0 A_0, parts of W, and the base is what they leave: see lora_init.py

The surprising thing: a 16-bit base is never changed by PiSSA or OLoRA. W - s B_0 A_0 is computed as W beside a frozen
update -s B_0 A_0, so that W is not rounded a second time, and what is exported is a plain adapter of twice the rank
over the W that everybody has. A packed base is different codes, because that is what the smaller residual is for.
"""

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import EvaConfig, LoraLayer
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from trainer.config.errors import UserError, require
from trainer.config.lora import LoraConfig, LoraInit
from trainer.kernels.frozen_weight import FrozenWeight, multiply
from trainer.kernels.lora_linear import Adapter, lora_linear
from trainer.linear import QuantLinear

Factors = dict[str, tuple[Tensor, Tensor]]
"""Layer name -> lora_A [rank, in_features], lora_B [out_features, rank]."""

PLAIN_INITS = (True, False, "gaussian", "eva")
"""Values of PEFT's init_lora_weights that neither read nor change the base."""


class _Dora(LoraVariant):
    """PEFT's hook for DoRA (arXiv:2402.09353, equation 5): where the magnitudes live. `LoraLinear` does the rest."""

    @staticmethod
    def init(module: "LoraLinear", adapter_name: str, **kwargs: Any) -> None:
        magnitude = DoraLinearLayer(fan_in_fan_out=False)
        magnitude.weight = nn.Parameter(module.row_norms(adapter_name))
        module.lora_magnitude_vector[adapter_name] = magnitude


class LoraLinear(nn.Module, LoraLayer):
    """A frozen layer (`QuantLinear`, or an nn.Linear in 16 or 32 bits) and its adapters.

    in   x [..., in_features] float
    out  [..., out_features] of x's dtype
    """

    def __init__(
        self,
        base_layer: QuantLinear | nn.Linear,
        adapter_name: str,
        config: PeftLoraConfig,
        r: int,
        lora_alpha: float,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self.fan_in_fan_out = False
        self._active_adapter = adapter_name
        self._start_of: str | None = None
        self.register_buffer("_start_A", None, persistent=False)
        self.register_buffer("_start_B", None, persistent=False)
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    # ---- PEFT's hooks

    @property
    def lora_variants(self) -> dict[tuple[str, ...], type[LoraVariant] | None]:
        return {(): None, ("use_dora",): _Dora}

    def resolve_lora_variant(self, *, config: PeftLoraConfig, **kwargs: Any) -> LoraVariant | None:
        """Refuse what would read a dense weight that is not there, or train what this layer does not compute."""
        if config.lora_bias:
            raise ValueError("lora_bias=True is not computed over a frozen base layer; leave it out")
        if config.init_lora_weights not in PLAIN_INITS:
            raise ValueError(
                f"init_lora_weights={config.init_lora_weights!r} would decompose the base layer's stored tensor, which "
                "for a packed layer is nibbles; set lora.init, which computes it from the 16-bit weight before packing"
            )
        return super().resolve_lora_variant(config=config, **kwargs)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """To the base layer's device, and never to its dtype: factors are float32, also over a 16-bit base."""
        device = device or frozen_weight(self.get_base_layer()).tensors[0].device
        for modules in (self.lora_A, self.lora_B, self.lora_magnitude_vector):
            if adapter_name in modules and not any(p.is_meta for p in modules[adapter_name].parameters()):
                modules[adapter_name].to(device)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise ValueError(
            "an adapter is not merged in place: packed weights would lose most of the update by rounding again. Serve "
            "base and adapter unmerged, which is exact, or export a 16-bit model with export.formats=[merged]"
        )

    # ---- the adapter, as numbers

    def start_from(self, name: str, lora_A: Tensor, lora_B: Tensor) -> None:
        """Let adapter `name` start at these factors, whose product was taken out of the weight.

        Over a packed base, whose codes are those of W - s B A, they are the adapter's first values, and what the layer
        adds while adapters are disabled: "the base" stays the model that was given. Over a dense base they are its
        first values, and a frozen update of the opposite sign keeps W - s B A.
        """
        device = self.lora_A[name].weight.device
        self._start_of = name
        self._start_A, self._start_B = (factor.detach().float().to(device) for factor in (lora_A, lora_B))
        with torch.no_grad():
            self.lora_A[name].weight.copy_(lora_A)
            self.lora_B[name].weight.copy_(lora_B)
            if name in self.lora_magnitude_vector:
                self.lora_magnitude_vector[name].weight.copy_(self.row_norms(name))

    @property
    def adapter(self) -> Adapter | None:
        """The one active adapter, or None if none is active (disabled, unloaded, or of other layers only).

        raises  ValueError if the layer is no single product: several active adapters, or dropout in training
        """
        names = self._active_names()
        if not names:
            return self.start if self.disable_adapters else None
        if len(names) > 1 or self._drops(names[0]):
            why = f"{len(names)} active adapters {names}" if len(names) > 1 else f"dropout of adapter {names[0]!r}"
            raise ValueError(f"{why} cannot be fused into one product; check `fusable` first, or call the layer")
        return Adapter(*self.factors(names[0]), self.scaling[names[0]])

    @property
    def row_scale(self) -> Tensor | None:
        """m / ||W + s B A|| of an active DoRA adapter [out_features] float32, by which the product is multiplied.

        The norm is a constant to autograd (section 4.3 of the paper); None if no magnitude is trained.
        """
        names = [name for name in self._active_names() if name in self.lora_magnitude_vector]
        return self.lora_magnitude_vector[names[0]].weight / self.row_norms(names[0]) if names else None

    @property
    def fusable(self) -> bool:
        """Whether base, `adapter` and `row_scale` say all that the layer computes."""
        names = self._active_names()
        return not names or (len(names) == 1 and not self._drops(names[0]))

    @torch.no_grad()
    def row_norms(self, name: str) -> Tensor:
        """||W + s B A|| of each row, [out_features] float32, without W + s B A.

        ||w + s b A||^2 = ||w||^2 + 2 s (A w) b + s^2 b (A A^T) b: the dense weight is decoded into a buffer for the
        first two terms and forgotten.
        """
        lora_A, lora_B = (factor.float() for factor in self.factors(name))
        scaling, weight = self.scaling[name], frozen_weight(self.get_base_layer())
        squares = weight.decoded(torch.float32).tensors[0].square().sum(1)
        squares += 2 * scaling * (multiply(lora_A, [weight]).T * lora_B).sum(1)
        squares += scaling**2 * (lora_B @ (lora_A @ lora_A.T) * lora_B).sum(1)
        return squares.clamp_min(torch.finfo(torch.float32).tiny).sqrt()

    @property
    def _is_packed(self) -> bool:
        return isinstance(self.get_base_layer(), QuantLinear)

    @property
    def start(self) -> Adapter | None:
        """Factors that belong to a packed base, which computes with them while adapters are disabled."""
        if self._start_of is None or not self._is_packed:
            return None
        return Adapter(self._start_A, self._start_B, self.scaling[self._start_of])

    def taken_out(self, name: str) -> Adapter | None:
        """The frozen update -s B_0 A_0 beside a dense base, if adapter `name` started from parts of it."""
        if name != self._start_of or self._is_packed:
            return None
        return Adapter(self._start_A, -self._start_B, self.scaling[name])

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """A and B of adapter `name` as one update s B A of W, with what was taken out of a dense W; differentiable."""
        lora_A, lora_B = self.lora_A[name].weight, self.lora_B[name].weight
        taken_out = self.taken_out(name)
        if taken_out is None:
            return lora_A, lora_B
        return torch.cat([lora_A, taken_out.lora_A]), torch.cat([lora_B, taken_out.lora_B], dim=1)

    def _active_names(self) -> list[str]:
        return [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]

    def _drops(self, name: str) -> bool:
        return self.training and isinstance(self.lora_dropout[name], nn.Dropout)

    # ---- the product

    def forward(self, x: Tensor) -> Tensor:
        rows, bias = x.reshape(-1, self.in_features), self.get_base_layer().bias
        bias = None if bias is None else bias.to(x.dtype)
        y = self._fused(rows, bias) if self.fusable else self._summed(rows, bias)
        return y.view(*x.shape[:-1], self.out_features)

    def _fused(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[T, in_features] -> [T, out_features]"""
        weight, scale = frozen_weight(self.get_base_layer()), self.row_scale
        if scale is None:
            return lora_linear(x, [weight], [self.adapter], bias=bias)
        y = lora_linear(x, [weight], [self.adapter]) * scale.to(x.dtype)
        return y if bias is None else y + bias

    def _summed(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same adapter by adapter: each drops parts of its own x, and DoRA's base product then sees them too.

        That is how the authors of DoRA and PEFT combine the two; the first base product sees all of x.
        """
        weight, names = frozen_weight(self.get_base_layer()), self._active_names()
        y = lora_linear(x, [weight], bias=bias)
        for name in names:
            lora_A, lora_B = self.lora_A[name].weight.to(x.dtype), self.lora_B[name].weight.to(x.dtype)
            dropped, taken_out = self.lora_dropout[name](x), self.taken_out(name)
            update = self.scaling[name] * (dropped @ lora_A.T) @ lora_B.T
            if taken_out is not None:
                y = y + lora_linear(x, [weight], [taken_out]) - lora_linear(x, [weight])
            if name in self.lora_magnitude_vector:
                scale = (self.lora_magnitude_vector[name].weight / self.row_norms(name)).to(x.dtype)
                y = y + (scale - 1) * lora_linear(dropped, [weight], [taken_out]) + scale * update
            else:
                y = y + update
        return y


def frozen_weight(layer: QuantLinear | nn.Linear) -> FrozenWeight:
    """The weight of a base layer, as the kernels multiply by it."""
    return layer.frozen_weight if isinstance(layer, QuantLinear) else FrozenWeight.dense(layer.weight)


def register_layers(peft_config: PeftLoraConfig, *, over_dense: Callable[..., LoraLinear] = LoraLinear) -> None:
    """Make PEFT put a `LoraLinear` over packed and over dense layers; call it before the config is used."""
    peft_config._register_custom_module({QuantLinear: LoraLinear, nn.Linear: over_dense})


# ---- attaching


def attach_lora(
    model: nn.Module,
    config: LoraConfig,
    *,
    seed: int,
    start: Factors | None = None,
    token_ids: list[int] | None = None,
    over_dense: Callable[..., LoraLinear] = LoraLinear,
) -> PeftModel:
    """Put a trainable adapter on the linear layers of `model`: A from a seeded uniform, B zero, or both from `start`.

    start      what was taken out of each layer that does not start plain: from `lora_init.principal_factors`, which
               lora.init=pissa and olora need, or from LoftQ
    token_ids  tokens whose rows of the embedding, and of the head, are trained too
    over_dense  makes the layer over an nn.Linear from the arguments of `LoraLinear`
    raises  UserError if a name, pattern or layer number in `lora` fits no linear layer
    """
    needs_start = config.init in (LoraInit.pissa, LoraInit.olora)
    require(
        start is not None or not needs_start,
        f"lora.init={config.init.value} decomposes the 16-bit weights, but the layers are packed already, and an SVD "
        "of 4-bit codes means nothing; give the 16-bit model, or use lora.init=default",
    )
    peft_config = peft_lora_config(config, _target_modules(model, config))
    peft_config.ensure_weight_tying = bool(config.modules_to_save) and _is_tied(model)
    _check_modules_to_save(model, config)
    if token_ids:
        peft_config.trainable_token_indices = _token_indices(model, config, token_ids)
    register_layers(peft_config, over_dense=over_dense)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unsupported layer type")  # said of every custom module
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern")  # an error below
        warnings.filterwarnings("ignore", "lora with eva initialization")  # the low-memory way needs a dense base
        warnings.filterwarnings("ignore", "You have requested `ensure_weight_tying`, but no tied modules are added")
        torch.manual_seed(seed)
        peft_model = get_peft_model(model, peft_config)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}
    _check_patterns(config, list(layers))
    if start is not None:
        for name in layers.keys() & start.keys():
            layers[name].start_from("default", *start[name])
    return peft_model


def _token_indices(model: nn.Module, config: LoraConfig, token_ids: list[int]) -> list[int] | dict[str, list[int]]:
    """As PEFT wants them: ids for an embedding that is the head as well, else embedding and head by name."""
    both = model.get_input_embeddings(), model.get_output_embeddings()
    names = [name.rpartition(".")[2] for name, module in model.named_modules() if any(module is m for m in both)]
    saved = [name for name in names if name in config.modules_to_save]
    require(
        not saved,
        f"lora.modules_to_save has {saved}, whose new rows model.add_tokens trains alone; leave one of the two out",
    )
    return token_ids if _is_tied(model) else dict.fromkeys(names, token_ids)


def peft_lora_config(config: LoraConfig, target_modules: list[str] | str) -> PeftLoraConfig:
    """The `lora` section in PEFT's terms."""
    with_eva = config.init is LoraInit.eva
    return PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=target_modules,
        layers_to_transform=config.layers,
        rank_pattern=config.ranks,
        alpha_pattern=config.alphas,
        modules_to_save=list(config.modules_to_save) or None,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        init_lora_weights="eva" if with_eva else True,
        eva_config=EvaConfig(rho=config.eva_rho) if with_eva else None,
    )


def adapter_size(config: LoraConfig, name: str) -> tuple[int, float] | None:
    """Rank and scaling that the layer `name` will get, by PEFT's own rules; None if it gets no adapter.

    For what must be computed while the dense weight is still there, before the adapter is attached.
    """
    targets = [name.rpartition(".")[2]] if config.target_modules == "all-linear" else config.target_modules
    peft_config = peft_lora_config(config, targets)
    if not check_target_module_exists(peft_config, name):
        return None
    rank = peft_config.rank_pattern.get(get_pattern_key(peft_config.rank_pattern, name), peft_config.r)
    alpha = peft_config.alpha_pattern.get(get_pattern_key(peft_config.alpha_pattern, name), peft_config.lora_alpha)
    return rank, alpha / (rank**0.5 if peft_config.use_rslora else rank)


def linear_layers(model: nn.Module) -> dict[str, QuantLinear | nn.Linear]:
    """The layers that may get an adapter: packed ones, and dense ones other than the output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, QuantLinear) or (type(layer) is nn.Linear and layer is not head)
    }


def _target_modules(model: nn.Module, config: LoraConfig) -> list[str] | str:
    """The last parts of the target layers' names, as other engines expect them in adapter_config.json, or a pattern.

    raises  UserError if there is no such layer
    """
    names = list(linear_layers(model))
    present = sorted({name.rpartition(".")[2] for name in names})
    if config.target_modules == "all-linear":
        return present
    if isinstance(config.target_modules, str):
        others = [name for name, _ in model.named_modules() if re.fullmatch(config.target_modules, name)]
        require(
            bool(others) and set(others) <= set(names),
            f"lora.target_modules={config.target_modules} matches {sorted(set(others) - set(names))[:3] or 'nothing'}; "
            f"give a pattern that matches whole names of linear layers only, such as {names[0]}",
        )
        return config.target_modules
    for target in config.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise UserError(
                f"lora.target_modules has {target!r}, which is no linear layer of the model; accepted: {present}"
            )
    return config.target_modules


def _check_patterns(config: LoraConfig, names: list[str]) -> None:
    """raises UserError if a pattern or a layer number fits none of the layers that have an adapter"""
    for key, patterns in (("rank_pattern", config.ranks), ("alpha_pattern", config.alphas)):
        for pattern in patterns:
            require(
                any(get_pattern_key([pattern], name) == pattern for name in names),
                f"lora.{key} has {pattern!r}, which fits no layer with an adapter; such layers are {names[:3]} ...",
            )
    for index in config.layers or []:
        require(
            any(f".{index}." in name for name in names),
            f"lora.layers has {index}, and no layer with an adapter has that number; the last one is {names[-1]}",
        )


def _check_modules_to_save(model: nn.Module, config: LoraConfig) -> None:
    """raises UserError if a name is not there, or is a packed layer"""
    for target in config.modules_to_save:
        found = [m for name, m in model.named_modules() if name == target or name.endswith(f".{target}")]
        require(bool(found), f"lora.modules_to_save has {target!r}, which the model does not have; see print(model)")
        require(
            not any(isinstance(part, QuantLinear) for module in found for part in module.modules()),
            f"lora.modules_to_save has {target!r}, whose weights are packed: codes cannot be trained. Name it in "
            "lora.target_modules, or keep the base in 16 bits with quant.codebook=none",
        )


def _is_tied(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


# ---- saving


def adapter_tensors(model: PeftModel) -> dict[str, Tensor]:
    """The adapter's tensors under PEFT's names, as any engine reads them.

    What was taken out of a dense base becomes part of the update, [B, -B_0] [A; A_0]: see `plain_config`.
    """
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    for name, layer in _layers_with_parts_out(model).items():
        lora_A, lora_B = layer.factors("default")
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = lora_A.detach(), lora_B.detach()
    return tensors


def plain_config(model: PeftModel, config: PeftLoraConfig) -> PeftLoraConfig:
    """`config` for the tensors of `adapter_tensors`: twice the ranks if parts were taken out of a dense base.

    That is what PEFT's `path_initial_model_for_weight_conversion` makes of PiSSA and OLoRA: a plain adapter over the
    base as it was. Scalings, alpha / rank or alpha / sqrt(rank), stay what they were.
    """
    if _layers_with_parts_out(model):
        factor = 2**0.5 if config.use_rslora else 2
        config.r, config.lora_alpha = 2 * config.r, factor * config.lora_alpha
        config.rank_pattern = {key: 2 * rank for key, rank in config.rank_pattern.items()}
        config.alpha_pattern = {key: factor * alpha for key, alpha in config.alpha_pattern.items()}
    return config


def _layers_with_parts_out(model: PeftModel) -> dict[str, LoraLinear]:
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}
    return {name: layer for name, layer in layers.items() if layer.taken_out("default") is not None}
