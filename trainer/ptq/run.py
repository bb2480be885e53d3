"""From `python scripts/quantize.py ...` to a folder: load, check, calibrate, choose codes, compare, write.

    <output_dir>/quantize.json        settings, figures, warnings, a line a layer
    <output_dir>/export/<format>/     what was asked for, each complete or absent
    <output_dir>/.blocks/             finished blocks, until the exports are written

Everything that a user can get wrong is answered before the first block: what the model is, which layers are quantized
and how their groups fit, weights that are inf or nan, the calibration's rows.
"""

import fnmatch
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.config.model import DType, named_model, short_name
from trainer.config.ptq import REPORT, ActOrder, PtqConfig, PtqMethod
from trainer.evaluate.fidelity import Fidelity, Original
from trainer.export.layouts import Provenance, require_layout, write_layout
from trainer.linear import linears_to_pack
from trainer.metrics import peak_memory_bytes
from trainer.model import MIN_QUANTIZED_SHARE, load_model
from trainer.ptq.blocks import Progress, needs_data, quantize_blocks
from trainer.ptq.calibration import Calibration, load_calibration, warn_of_calibration
from trainer.ptq.describe import describe_ptq
from trainer.ptq.gguf import input_importance, quantize_to_gguf
from trainer.ptq.sensitivity import plan_by_sensitivity
from trainer.qat.packed_model import packed_layers, packed_sha256, scheme_of_layer
from trainer.qat.scheme import Scheme
from trainer.quant_grid import require_own_rows
from trainer.quantizer import Quantizer

log = logging.getLogger(__name__)


@dataclass
class PtqResult:
    """What a quantization gave.

    exports   format -> folder or file
    fidelity  on held-out rows, against the 16-bit model
    report    the content of quantize.json
    """

    output_dir: Path
    exports: dict[str, Path]
    fidelity: Fidelity
    report: dict[str, Any] = field(default_factory=dict)


def quantize(config: PtqConfig, *, progress: Progress | None = None) -> PtqResult:
    """Quantize a model and write it.

    progress  is told how many blocks are finished
    raises    UserError for what can be put right by other settings, a better model or better data
    """
    began = time.monotonic()
    source = named_model(config.model, DType.auto if config.dtype == "float16" else DType(config.dtype))
    model, tokenizer = load_model(source)
    folder = Path(config.output_dir or f"outputs/ptq/{short_name(source).replace('/', '_')}_{config.method}")
    schemes = choose_layers(model, config)
    calibration = load_calibration(config, tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    original = Original.of(model.to(device), calibration.held_out)
    loss = math.log(original.compare(model).perplexity)
    model.to("cpu")
    warnings = warn_of_calibration(calibration, widest=_widest(model, schemes), loss=loss) if needs_data(config) else []
    run = _Run(config, model, tokenizer, folder, calibration, device)
    log.info("quantize %d layers: %s", len(schemes), describe_ptq(config, run.data))
    choose = run.to_gguf if config.method is PtqMethod.gguf else run.to_codes
    part, write = choose(schemes, progress)
    fidelity = original.compare(model.to(device))
    model.to("cpu")
    report = {
        "settings": {name: value for name, value in asdict(config).items() if name != "output_dir"},
        "data": run.data,
        "fidelity": fidelity.to_dict(),
        "seconds": time.monotonic() - began,
        "peak_memory_bytes": peak_memory_bytes(),
        "warnings": warnings,
        **part,
    }
    exports = write(report)
    for path in exports.values():
        log.info("export   %s", path)
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n")
    shutil.rmtree(folder / ".blocks", ignore_errors=True)
    return PtqResult(folder, exports, fidelity, report)


Write = Callable[[dict[str, Any]], dict[str, Path]]
"""Writes what was asked for, given the report."""


@dataclass(frozen=True)
class _Run:
    """What a quantization works on."""

    config: PtqConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    calibration: Calibration
    device: torch.device

    @property
    def data(self) -> str:
        """The calibration in words; empty where codes do not depend on it."""
        return self.calibration.description if needs_data(self.config) else ""

    def to_codes(self, schemes: dict[str, Scheme], progress: Progress | None) -> tuple[dict[str, Any], Write]:
        """Pack the model; returns its part of the report, and what writes it."""
        config, model = self.config, self.model
        schemes = _mixed(model, schemes, self.calibration, config)
        reports = quantize_blocks(
            *(model, schemes, self.calibration.rows, config, self.folder / ".blocks"),
            device=self.device,
            progress=progress,
        )
        part = {
            "packed_sha256": packed_sha256(model),
            "bits_per_weight": bits_per_weight(model),
            "layers": [layer.to_dict() for layer in reports],
        }

        def write(report: dict[str, Any]) -> dict[str, Path]:
            provenance = self._provenance(report)
            export = self.folder / "export"
            return {
                name: write_layout(name, model, self.tokenizer, export / name, provenance, dtype=_dtype(config))
                for name in config.formats
            }

        return part, write

    def to_gguf(self, schemes: dict[str, Scheme], progress: Progress | None) -> tuple[dict[str, Any], Write]:
        """Write the GGUF file; the model has its values then."""
        config = self.config
        importance = None
        if config.imatrix:
            importance = input_importance(self.model, self.calibration.rows, config, device=self.device)
        path = self.folder / "export" / "gguf" / f"{Path(config.model).name}-{config.gguf_type}.gguf"
        identity = {"base": config.model, "method": describe_ptq(config, ""), "data": self.data}
        found = quantize_to_gguf(self.model, self.tokenizer, path, importance, config, identity)
        part = {"bits_per_weight": found.bits_per_weight, "layers": [asdict(tensor) for tensor in found.tensors]}
        part["notes"] = found.lines()
        return part, lambda report: {"gguf": path}

    def _provenance(self, report: dict[str, Any]) -> Provenance:
        fidelity = report["fidelity"]
        figures = {
            "perplexity on held-out rows, 16 bits": fidelity["perplexity_original"],
            "perplexity on held-out rows, quantized": fidelity["perplexity"],
            "KL(16 bits || quantized), nats a token": fidelity["kl"],
            "same likeliest token": f"{100 * fidelity['same_token']:.1f} %",
            "bits a weight, scales included": f"{report['bits_per_weight']:.2f}",
        }
        method = describe_ptq(self.config, "")
        return Provenance(self.config.model, method, self.data, figures, report["packed_sha256"])


# ---- which layers, and how


def choose_layers(model: PreTrainedModel, config: PtqConfig) -> dict[str, Scheme | None]:
    """Name -> scheme of each layer that is quantized, in the model's order; output head and embeddings never are.

    raises  UserError naming a layer whose groups do not fit or whose weight is not finite, a model that is packed
            already or mostly not made of linear layers, or a pattern that fits no layer
    """
    require(
        not packed_layers(model),
        f"model={config.model} is quantized already; rounding it again would lose more: give the 16-bit model that it "
        "was made from",
    )
    outer = {module for module in (model.get_output_embeddings(), model.get_input_embeddings()) if module is not None}
    names = linears_to_pack(model, outer)
    for pattern in config.exclude:
        require(any(_fits(name, pattern) for name in names), f"exclude has {pattern!r}, which ends no layer's name")
    chosen = [name for name in names if not any(_fits(name, pattern) for pattern in config.exclude)]
    require(bool(chosen), f"exclude={config.exclude} leaves no layer to quantize")
    _require_share(model, outer, names)
    if config.method is PtqMethod.gguf:
        return dict.fromkeys(chosen, None)  # which type a tensor gets is llama.cpp's rule
    scheme = scheme_of(config)
    schemes = [scheme] if config.bits_budget is None else [scheme, scheme_of(config, config.high_codebook)]
    for name in chosen:
        layer = model.get_submodule(name)
        try:
            for each in schemes:
                each.check(layer.in_features)
                if config.method in (PtqMethod.gptq, PtqMethod.awq):
                    require_own_rows(each.weight, layer.in_features)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None
        require(
            bool(layer.weight.isfinite().all()),
            f"{name}.weight holds inf or nan; the checkpoint is damaged: load another one",
        )
    shapes = {name: tuple(model.get_submodule(name).weight.shape) for name in chosen}
    grouped = config.act_order is ActOrder.groups
    for name in config.formats:
        for each in schemes:
            require_layout(name, dict.fromkeys(chosen, each), shapes, grouped_order=grouped)
    return dict.fromkeys(chosen, scheme)


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, f"*{pattern}")


def _require_share(model: PreTrainedModel, outer: set[nn.Module], names: list[str]) -> None:
    """Fused experts and the like are no nn.Linear, and would stay in 16 bits in silence."""
    outside = {id(parameter) for module in outer for parameter in module.parameters()}
    total = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in outside)
    linear = sum(model.get_submodule(name).weight.numel() for name in names)
    require(
        linear >= MIN_QUANTIZED_SHARE * total,
        f"only {linear / max(1, total):.0%} of {model.config.model_type}'s weights lie in linear layers; the model "
        "would stay mostly in 16 bits: this architecture is not supported yet",
    )


def scheme_of(config: PtqConfig, codebook: str | None = None) -> Scheme:
    """What the settings say of a layer; codebook: another one than `config.codebook`."""
    codebook = codebook or config.codebook
    settings: dict[str, Any] = {}
    if codebook in ("int4", "int8"):
        settings = {"group_size": config.group_size, "scale_dtype": config.scale_dtype}
        if codebook == "int4":
            settings["symmetric"] = config.symmetric
    else:
        settings = {"block_size": config.block_size, "double_quant": config.double_quant}
    match config.method:
        case PtqMethod.smoothquant:
            return Scheme.named("int8_static", **settings)
        case PtqMethod.int8_dynamic:
            return Scheme.named("int8" if codebook == "int8" else "int4_int8", **settings)
    return Scheme(Quantizer(codebook, **settings))


def _mixed(
    model: PreTrainedModel, schemes: dict[str, Scheme], calibration: Calibration, config: PtqConfig
) -> dict[str, Scheme]:
    """With `bits_budget`, more bits for the layers that need them most."""
    if config.bits_budget is None:
        return schemes
    low, high = scheme_of(config), scheme_of(config, config.high_codebook)
    bits = low.weight.code_bits, high.weight.code_bits
    require(
        bits[0] < config.bits_budget <= bits[1],
        f"bits_budget={config.bits_budget:g} is not between the {bits[0]} bits of {config.codebook} and the {bits[1]} "
        f"of {config.high_codebook}; give a mean between them",
    )
    plan, _ = plan_by_sensitivity(
        *(model, low.weight, high.weight, list(schemes), calibration.rows),
        bits_budget=config.bits_budget,
        seed=config.seed,
    )
    return {name: low if name in plan.low_layers else high for name in schemes}


def _widest(model: PreTrainedModel, schemes: Mapping[str, Scheme]) -> int:
    return max(model.get_submodule(name).in_features for name in schemes)


def bits_per_weight(model: PreTrainedModel) -> float:
    """Of the packed layers, scales as they are stored (in the quantizer's dtype)."""
    bits = weights = 0.0
    for layer in packed_layers(model).values():
        quantized = layer.quantized
        own = 8 * quantized.nbytes
        scales = quantized.tensors.get("scales")
        if scales is not None and scheme_of_layer(layer).weight.scale_dtype != "float32":
            own -= 16 * scales.numel()
        bits, weights = bits + own, weights + quantized.shape[0] * quantized.shape[1]
    return bits / weights


def _dtype(config: PtqConfig) -> torch.dtype | None:
    return None if config.dtype == "auto" else getattr(torch, config.dtype)
