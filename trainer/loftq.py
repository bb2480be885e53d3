"""LoftQ: codes and adapter factors that together are close to the 16-bit weight (arXiv:2310.08659, algorithm 1).

    Q_t = quantize(W - s B_{t-1} A_{t-1}),   s B_t A_t = the best update of rank r to W - Q_t,   t = 1 .. iterations

It runs while the base is packed, layer by layer, on the quantizer that training and serving use, double quantization
included. The iterate with the smallest ||W - (Q + s B A)|| is kept. With per-channel input scales d the error is that
of the layer's output, ||(W - (Q + s B A)) diag(d)||, for inputs whose channels have these root mean squares.

The surprising thing: what a layer adds is s B A and not B A, with s = alpha / r, or alpha / sqrt(r) for rsLoRA. Factors
that leave s out, as the paper's code and PEFT write them, have the squared error ||E - E_r||^2 + (1 - s)^2 ||E_r||^2
for a residual E whose best part of rank r is E_r: at s = 2 that of plain QLoRA, above it a larger one. Here both
factors carry 1 / sqrt(s), and alpha decides how fast the adapter learns, not how well it begins.
"""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trainer.config.errors import require
from trainer.config.lora import LoftqConfig, LoraConfig
from trainer.lora import Factors, LoraLinear, adapter_size
from trainer.quantizer import QuantizedTensor, Quantizer
from trainer.svd import truncated_svd

log = logging.getLogger(__name__)

DAMPING = 0.01
"""Added to each channel's mean square, as a share of the layer's mean: a channel that was silent on the calibration
rows is not free. The share is that of GPTQ (arXiv:2210.17323, section 3.3)."""


@dataclass(frozen=True)
class Fit:
    """Codes and factors of one layer; errors are Frobenius norms, weighted if there were input scales.

    lora_A       [k, in_features] float32, lora_B [out_features, k] float32; k <= rank is the residual's own rank
    iteration    which iterate this is, counted from 1
    error_plain  of the nearest codes without an update: plain QLoRA's start
    error        of codes and update
    """

    quantized: QuantizedTensor
    lora_A: Tensor
    lora_B: Tensor
    iteration: int
    error_plain: float
    error: float

    @property
    def better(self) -> bool:
        """Whether the update brings the layer closer than plain QLoRA; not for a weight that its codes already are."""
        return self.error < self.error_plain


def fit_layer(
    weight: Tensor,
    quantizer: Quantizer,
    *,
    rank: int,
    scaling: float,
    iterations: int,
    input_scale: Tensor | None = None,
    device: torch.device | None = None,
) -> Fit:
    """LoftQ of one layer; the best of `iterations` iterates.

    weight       [out_features, in_features] float
    scaling      s, what the layer multiplies B A by
    input_scale  [in_features] float32, root mean square of each input channel; None weighs all alike
    device       where the factors are computed; None for the weight's. Codes are chosen where the weight is
    raises       ValueError if the weight holds inf or nan
    """
    wanted = weight.float()
    best, update = None, None
    for iteration in range(1, iterations + 1):
        quantized = quantizer.quantize(weight if update is None else wanted - update)
        fit, update = _fit(wanted, quantized, rank, scaling, input_scale, device or weight.device)
        error_plain = fit.error_plain if best is None else best.error_plain
        if best is None or fit.error < best.error:
            best = Fit(quantized, fit.lora_A, fit.lora_B, iteration, error_plain, fit.error)
    return best


def fit_codes(
    weight: Tensor, quantized: QuantizedTensor, *, rank: int, scaling: float, input_scale: Tensor | None = None
) -> Fit:
    """Factors for codes that are given and stay: one SVD of W - dequantize(Q). Arguments as in `fit_layer`."""
    return _fit(weight.float(), quantized, rank, scaling, input_scale, weight.device)[0]


def _fit(
    wanted: Tensor,
    quantized: QuantizedTensor,
    rank: int,
    scaling: float,
    input_scale: Tensor | None,
    device: torch.device,
) -> tuple[Fit, Tensor]:
    """One SVD: the fit of these codes, and s B A [out_features, in_features] on the weight's device."""
    residual = (wanted - quantized.dequantize(torch.float32).to(wanted.device)).to(device)
    scale = torch.ones(1, device=device) if input_scale is None else input_scale.to(device)
    weighted = residual * scale
    U, S, Vt = truncated_svd(weighted, rank=rank)
    there = S > S[0] * torch.finfo(torch.float32).eps  # directions of size 0 would have factors that never learn
    U, S, Vt = U[:, there], S[there], Vt[there]
    root = (S / scaling).sqrt()  # scaling * B A = U S Vt / scale
    lora_A, lora_B = root[:, None] * Vt / scale, U * root
    update = scaling * lora_B @ lora_A
    error_plain, error = weighted.norm().item(), ((residual - update) * scale).norm().item()
    return Fit(quantized, lora_A, lora_B, 1, error_plain, error), update.to(wanted.device)


@dataclass(frozen=True)
class LayerReport:
    """One layer's line in loftq.json. Errors are Frobenius norms; `weighted` says by input scales.

    iteration  the iterate that was kept; 0: none was better, the adapter starts plain (B = 0)
    """

    name: str
    codebook: str
    rank: int
    scaling: float
    weighted: bool
    weight_norm: float
    error_plain: float
    error: float
    iteration: int

    @property
    def ratio(self) -> float:
        """Error after over error before; 1 where the adapter starts plain."""
        return self.error / self.error_plain if self.iteration else 1.0


@dataclass
class Loftq:
    """LoftQ over a model: chooses codes while layers are packed (`pack` of `quantize_linears`), then has the factors.

    input_scales  layer name -> [in_features], from `measure_input_scales`; empty: errors are unweighted
    device        where the SVDs run; None: where the weights are
    factors       where the adapter starts, for `attach_lora`; every layer with an adapter has its rank
    changed       layers whose codes are not the nearest ones: what must travel with the adapter
    """

    config: LoftqConfig
    lora: LoraConfig
    input_scales: dict[str, Tensor] = field(default_factory=dict)
    device: torch.device | None = None
    layers: list[LayerReport] = field(default_factory=list)
    factors: Factors = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    @torch.no_grad()
    def __call__(self, name: str, weight: Tensor, quantizer: Quantizer) -> QuantizedTensor:
        """The codes of one layer; the nearest ones where there is no adapter, or where LoftQ brings it no closer."""
        size = adapter_size(self.lora, name)
        if size is None:
            return quantizer.quantize(weight)
        rank, scaling = size
        scale = self.input_scales.get(name)
        fit = fit_layer(
            weight,
            quantizer,
            rank=rank,
            scaling=scaling,
            iterations=self.config.iterations,
            input_scale=scale,
            device=self.device,
        )
        self._record(name, weight, fit, rank, scaling, weighted=scale is not None)
        if not fit.better:
            return quantizer.quantize(weight)
        if fit.iteration > 1:
            self.changed.append(name)
        return fit.quantized

    @torch.no_grad()
    def fit_packed_base(self, model: nn.Module, folder: Path) -> None:
        """Start the adapter of a base that was packed before: its codes stay, its 16-bit weights are read one by one.

        model   a PEFT model over QuantLinear layers
        folder  the Hugging Face folder that the base was packed from, with safetensors
        raises  UserError if a layer's weight is not there or has another shape; what `finish` raises
        """
        weights, layers = StreamedWeights(folder), model.get_base_model().named_modules()
        adapted = {name: layer for name, layer in layers if isinstance(layer, LoraLinear)}
        for name, layer in adapted.items():
            base, adapter = layer.get_base_layer(), layer.active_adapters[0]
            weight = weights.read(f"{name}.weight", (base.out_features, base.in_features)).to(base.packed.device)
            rank, scaling, scale = layer.r[adapter], layer.scaling[adapter], self.input_scales.get(name)
            fit = fit_codes(weight, base.quantized, rank=rank, scaling=scaling, input_scale=scale)
            self._record(name, weight, fit, rank, scaling, weighted=scale is not None)
        self.finish()
        for name, layer in adapted.items():
            layer.start_from(layer.active_adapters[0], *self.factors[name])

    def finish(self) -> None:
        """Say how it went; raises UserError if a layer fell back and `loftq.fallback` is false."""
        failed = [layer.name for layer in self.layers if not layer.iteration]
        require(
            self.config.fallback or not failed,
            f"loftq.fallback=false, and LoftQ does not lower the error of {failed[:3]} ({len(failed)} layers); set "
            "loftq.fallback=true to start their adapters plain, or leave them out of lora.target_modules",
        )
        log.info(
            "loftq    %d layers in %.1f s: error %.4f -> %.4f of the weights, mean ratio %.4f; best iterates %s",
            len(self.layers),
            time.monotonic() - self._began,
            _relative(self.layers, "error_plain"),
            _relative(self.layers, "error"),
            self.mean_ratio,
            ", ".join(
                f"{n} x{count}" for n, count in sorted(Counter(layer.iteration for layer in self.layers).items())
            ),
        )
        if failed:
            log.warning(
                "loftq    %d layers start plain (B = 0), since no iterate is closer than the nearest codes: %s",
                len(failed),
                failed[:3],
            )

    def _record(self, name: str, weight: Tensor, fit: Fit, rank: int, scaling: float, *, weighted: bool) -> None:
        report = LayerReport(
            name=name,
            codebook=fit.quantized.quantizer.codebook,
            rank=rank,
            scaling=scaling,
            weighted=weighted,
            weight_norm=weight.float().norm().item(),
            error_plain=fit.error_plain,
            error=fit.error if fit.better else fit.error_plain,
            iteration=fit.iteration if fit.better else 0,
        )
        self.layers.append(report)
        kept = slice(None if fit.better else 0)
        self.factors[name] = _filled_up(fit.lora_A.cpu()[kept], fit.lora_B.cpu()[:, kept], rank)

    @property
    def mean_ratio(self) -> float:
        """Mean over layers of error after / error before."""
        return sum(layer.ratio for layer in self.layers) / max(1, len(self.layers))

    def write_report(self, path: Path) -> None:
        """loftq.json: settings, the mean ratio and a line for each layer."""
        report = {
            "settings": asdict(self.config),
            "mean_ratio": self.mean_ratio,
            "layers": [{**asdict(layer), "ratio": layer.ratio} for layer in self.layers],
        }
        path.write_text(json.dumps(report, indent=2) + "\n")


def _relative(layers: Sequence[LayerReport], name: str) -> float:
    """The errors of all layers together, over the weights of all layers."""
    total = math.hypot(*(layer.weight_norm for layer in layers))
    return math.hypot(*(getattr(layer, name) for layer in layers)) / (total or 1.0)


def _filled_up(lora_A: Tensor, lora_B: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """As many directions as `rank`: those that the residual lacks start plain, B = 0, so that they can learn."""
    missing, in_features = rank - len(lora_A), lora_A.shape[1]
    plain = torch.rand(missing, in_features, generator=torch.Generator().manual_seed(0))
    plain = (2 * plain - 1) / in_features**0.5  # PEFT's kaiming uniform with a = sqrt(5)
    return torch.cat([lora_A, plain]), torch.cat([lora_B, lora_B.new_zeros(len(lora_B), missing)], dim=1)


@torch.inference_mode()
def measure_input_scales(model: nn.Module, rows: Iterable[Sequence[int]]) -> dict[str, Tensor]:
    """Root mean square of each input channel of each linear layer, over the tokens of `rows`, damped.

    model    a causal language model in 16 or 32 bits; it runs once over each row
    rows     token ids; one row is one pass
    returns  layer name -> [in_features] float32, with a mean square of 1 over a layer's channels
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str) -> object:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, layer.in_features).double()
            sums[name] = sums.get(name, 0) + x.square().sum(0)
            counts[name] = counts.get(name, 0) + len(x)

        return hook

    layers = [(name, layer) for name, layer in model.named_modules() if type(layer) is nn.Linear]
    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers]
    decoder = getattr(model, model.base_model_prefix)  # without the output head, which gets no adapter
    try:
        for row in rows:
            decoder(input_ids=torch.tensor([list(row)], device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {name: _damped_scale(total / counts[name]) for name, total in sums.items()}


def _damped_scale(mean_square: Tensor) -> Tensor:
    mean = mean_square.mean()
    if not mean > 0:  # a layer that only ever saw zeros
        return torch.ones_like(mean_square, dtype=torch.float32)
    return ((mean_square / mean + DAMPING) / (1 + DAMPING)).sqrt().float()


class StreamedWeights:
    """Tensors of a Hugging Face folder, read one at a time.

    raises  UserError if the folder holds no safetensors
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self._files = json.loads(index.read_text())["weight_map"]
            return
        path = folder / "model.safetensors"
        require(
            path.is_file(),
            f"{folder} holds no model.safetensors; a base that is packed already says nothing of the 16-bit weights "
            "that it was packed from: give their Hugging Face folder",
        )
        with safe_open(path, "pt") as file:
            self._files = dict.fromkeys(file.keys(), path.name)

    def read(self, name: str, shape: tuple[int, int]) -> Tensor:
        """The tensor `name`, float; raises UserError if there is none of this shape."""
        require(name in self._files, f"{self._folder} has no {name}; give the 16-bit model that was packed")
        with safe_open(self._folder / self._files[name], "pt") as file:
            tensor = file.get_tensor(name)
        require(
            tensor.is_floating_point() and tuple(tensor.shape) == shape,
            f"{self._folder}: {name} is {tensor.dtype} {tuple(tensor.shape)}, the packed layer is {shape}; give the "
            "16-bit model that was packed: LoftQ fits what its weights have and the codes lose",
        )
        return tensor
