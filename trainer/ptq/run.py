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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.config.model import DType, ModelConfig, named_model, short_name
from trainer.config.ptq import REPORT, ActOrder, PtqConfig, PtqMethod
from trainer.evaluate.fidelity import Fidelity, Original
from trainer.export.layouts import Provenance, require_layout, write_layout
from trainer.linear import linears_to_pack
from trainer.metrics import peak_memory_bytes
from trainer.model import MIN_QUANTIZED_SHARE, load_model
from trainer.ptq.blocks import Progress, needs_data, open_decoder, quantize_blocks, runs_blocks
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
    source = _source(config)
    folder = Path(config.output_dir or f"outputs/ptq/{short_name(source).replace('/', '_')}_{config.method}")
    _require_free(folder, config)
    model, tokenizer = load_model(source)
    schemes = choose_layers(model, config)
    calibration = load_calibration(config, tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        original = Original.of(model.to(device), calibration.held_out)
    except ValueError as error:
        raise UserError(f"model={config.model} cannot be compared: {error}; it is not supported yet") from None
    loss = math.log(original.compare(model).perplexity)
    model.to("cpu")
    warnings = warn_of_calibration(calibration, widest=_widest(model, schemes), loss=loss) if needs_data(config) else []
    run = _Run(config, model, tokenizer, folder, calibration, device)
    log.info("quantize %d layers: %s", len(schemes), describe_ptq(config, run.data))
    choose = run.to_gguf if config.method is PtqMethod.gguf else run.to_codes
    with _only_writer(folder):
        part, write = choose(schemes, progress)
        fidelity = original.compare(model.to(device))
        model.to("cpu")
        report = {
            "settings": _settings(config),
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
        partial = folder / f".{REPORT}"
        partial.write_text(json.dumps(report, indent=2) + "\n")
        partial.replace(folder / REPORT)
        shutil.rmtree(folder / ".blocks", ignore_errors=True)
    return PtqResult(folder, exports, fidelity, report)


def _source(config: PtqConfig) -> ModelConfig:
    """The 16-bit model.

    raises  UserError for a folder of a run, an adapter or a quantization, which hold none
    """
    folder = Path(config.model).expanduser()
    kinds = {"config.yaml": "a run", REPORT: "a quantized model", "adapter_config.json": "an adapter"}
    for name, kind in kinds.items():
        require(
            not (folder / name).is_file() or (folder / "config.json").is_file(),
            f"model={config.model} is the folder of {kind}; give the 16-bit model: of a run the folder that "
            "python scripts/export.py run=<run> format=merged writes",
        )
    return named_model(config.model, DType.auto if config.dtype == "float16" else DType(config.dtype))


def _settings(config: PtqConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if name != "output_dir"}


def _require_free(folder: Path, config: PtqConfig) -> None:
    """raises  UserError if the folder holds other codes, beside which exports of these would lie, or a run or model"""
    for name in ("config.yaml", "config.json", "adapter_config.json"):
        require(not (folder / name).exists(), f"output_dir={folder} holds a {name}, of something else; give another")
    if not (folder / REPORT).is_file():
        return
    old, new = json.loads((folder / REPORT).read_text())["settings"], _settings(config)
    changed = [name for name in new if name != "formats" and str(new[name]) != str(old.get(name))]
    require(
        not changed,
        f"output_dir={folder} holds codes with other settings ({', '.join(changed)}); give another, or remove it",
    )


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder: of two processes the first to finish would remove the other's blocks.

    raises  UserError if another process holds it
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"output_dir={folder} is being written by another process; wait for it, or give another"
        ) from None
    try:
        yield
    finally:
        lock.release()
        (folder / ".lock").unlink(missing_ok=True)


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
            already, mostly not made of linear layers or of blocks that do not run here, or a pattern that fits no layer
    """
    require(
        not packed_layers(model),
        f"model={config.model} is quantized already; rounding it again would lose more: give the 16-bit model that it "
        "was made from",
    )
    outer = {module for module in (model.get_output_embeddings(), model.get_input_embeddings()) if module is not None}
    names = linears_to_pack(model, outer)
    _require_share(model, outer, names)
    for pattern in config.exclude:
        require(any(_fits(name, pattern) for name in names), f"exclude has {pattern!r}, which ends no layer's name")
    chosen = [name for name in names if not any(_fits(name, pattern) for pattern in config.exclude)]
    require(bool(chosen), f"exclude={config.exclude} leaves no layer to quantize")
    if runs_blocks(config):
        open_decoder(model, chosen)  # says what it does not compute
    if config.method is PtqMethod.gguf:
        return dict.fromkeys(chosen, None)  # which type a tensor gets is llama.cpp's rule
    schemes = _schemes(config)
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
    stored = _dtype(config) or (model.dtype if config.scale_dtype == "float32" else None)
    for name in config.formats:
        for each in schemes:
            require_layout(name, dict.fromkeys(chosen, each), shapes, grouped_order=grouped, dtype=stored)
    return dict.fromkeys(chosen, schemes[0])


def _schemes(config: PtqConfig) -> list[Scheme]:
    """What most layers get, and with `bits_budget` what sensitive ones do.

    raises  UserError for a setting that their codebooks do not accept
    """
    codebooks = [config.codebook] if config.bits_budget is None else [config.codebook, config.high_codebook]
    try:
        schemes = [scheme_of(config, codebook) for codebook in codebooks]
    except ValueError as error:
        raise UserError(str(error).replace("quant.", "")) from None
    if config.bits_budget is not None:
        low, high = (scheme.weight.code_bits for scheme in schemes)
        require(
            low < config.bits_budget <= high,
            f"bits_budget={config.bits_budget:g} is not between the {low} bits of {config.codebook} and the {high} of "
            f"{config.high_codebook}; give a mean between them",
        )
    return schemes


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
    low, high = _schemes(config)
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
