"""From a config to a model in memory: resolve where it comes from, load it in the compute dtype, pack its weights.

`trainer/sources/` turns each source into a Hugging Face folder; from there on there is one path, `from_pretrained`.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub.errors import HFValidationError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from trainer.config.errors import UserError, require
from trainer.config.model import DType, ModelConfig
from trainer.config.quant import Codebook, MixedBits, QuantConfig
from trainer.formats.empty_model import quantization_config
from trainer.formats.lowbit import open_packed, packed_entry
from trainer.formats.open_quantized import open_foreign
from trainer.linear import Pack, QuantizationSummary, linears_to_pack, pack_nearest, quantize_linears
from trainer.quant_plan import QuantPlan, error_gain, first_layers, log_plan, most_gaining_layers
from trainer.quantizer import Quantizer
from trainer.sources.resolve import resolve_model
from trainer.vocabulary import add_tokens, extend_tokenizer

log = logging.getLogger(__name__)

MIN_QUANTIZED_SHARE = 0.5
"""Under this share of packed weights (embeddings aside) the layers that matter were missed, as fused experts are."""


def compute_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype for `model.dtype`; auto is bfloat16 where the hardware multiplies it natively, else float32."""
    if dtype is not DType.auto:
        return getattr(torch, dtype.value)
    if torch.cuda.is_available():
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if _cpu_multiplies_bfloat16() else torch.float32


def _cpu_multiplies_bfloat16() -> bool:
    """Whether /proc/cpuinfo names a bfloat16 dot product (AVX512-BF16, AMX, Arm BF16); False without the file."""
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def load_model(config: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer in the compute dtype, on the CPU, in eval mode, every parameter frozen.

    raises  UserError if the model is not there, is incomplete, is no causal language model, or has a token of
            `model.add_tokens` already
    """
    path, dtype = resolve_model(config), compute_dtype(config.dtype)
    if quantization_config(path) is not None:
        return _load_packed(config, Path(path))
    if not sys.stderr.isatty():
        disable_progress_bar()
    tokenizer = _open_tokenizer(path, config)
    with _explained(config):
        model, loading = AutoModelForCausalLM.from_pretrained(
            path, revision=config.revision, dtype=dtype, output_loading_info=True
        )
    missing = sorted(loading["missing_keys"])
    require(not missing, f"{path} lacks the weights {missing[:3]} ({len(missing)} in all); it would run on random ones")
    quantized = getattr(model.config, "quantization_config", None)
    require(
        quantized is None,
        f"{path} is quantized already; only folders of such models are opened: download it and use model=folder, or "
        "give the 16-bit model that it was made from",
    )
    if config.add_tokens:
        add_tokens(model, tokenizer, config.add_tokens)
    model.requires_grad_(False).eval()
    log.info(
        "model    %s, %.0f M parameters, %s", path, model.num_parameters() / 1e6, str(dtype).removeprefix("torch.")
    )
    return model, tokenizer


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that `load_model` gives, without the model.

    raises  UserError as `load_model` does, but for what is wrong with the weights
    """
    path = resolve_model(config)
    is_packed = quantization_config(path) is not None
    require(not (is_packed and config.add_tokens), _PACKED_GROWS.format(tokens=config.add_tokens, folder=path))
    tokenizer = _open_tokenizer(path, config)
    if config.add_tokens:
        extend_tokenizer(tokenizer, config.add_tokens)
    return tokenizer


def _open_tokenizer(path: str, config: ModelConfig) -> PreTrainedTokenizerBase:
    try:
        with _explained(config):
            tokenizer = AutoTokenizer.from_pretrained(path, revision=config.revision)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} holds no tokenizer that can be read ({reason}); put its files beside it") from error
    require(tokenizer.eos_token_id is not None, f"{path}: the tokenizer has no eos token; set one in its config")
    return tokenizer


def load_stop_ids(config: ModelConfig) -> set[int]:
    """The tokens at which engines stop: those of generation_config.json, or without one of config.json."""
    path = resolve_model(config)
    try:
        ids = GenerationConfig.from_pretrained(path, revision=config.revision).eos_token_id
    except OSError:
        with _explained(config):
            ids = AutoConfig.from_pretrained(path, revision=config.revision).get_text_config().eos_token_id
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


@contextmanager
def _explained(config: ModelConfig) -> Iterator[None]:
    try:
        yield
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"model.path={config.path} could not be loaded: {reason} "
            "Check the name, the network and HF_TOKEN, or use model=folder with a local copy"
        ) from error


_PACKED_GROWS = "model.add_tokens={tokens} would change {folder}, whose codes are what it is; leave it out"


def _load_packed(config: ModelConfig, folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model of codes, our own or another engine's; of ours, auto is the dtype that it was trained in."""
    require(not config.add_tokens, _PACKED_GROWS.format(tokens=config.add_tokens, folder=folder))
    own, dtype = packed_entry(folder), config.dtype
    if own is not None and dtype is DType.auto:
        dtype = DType(own["dtype"])
    open_codes = open_foreign if own is None else open_packed
    model = open_codes(folder, compute_dtype(dtype))
    log.info("model    %s, packed, %s", folder, str(model.dtype).removeprefix("torch."))
    return model, AutoTokenizer.from_pretrained(folder)


def prepare_model(
    model: PreTrainedModel, config: QuantConfig, *, pack: Pack = pack_nearest, plan: QuantPlan | None = None
) -> QuantizationSummary:
    """Pack the linear layers of `model` in place; the output head and the embeddings stay in 16 bits.

    pack    chooses a layer's codes, see `quantize_linears`
    plan    packs by this plan instead of the config's: that of an adapter which was trained over such a base
    raises  UserError if a weight holds inf or nan, if groups do not divide a layer, or if most weights are not in
            nn.Linear layers
    """
    skip: set[nn.Module] = {m for m in (model.get_output_embeddings(), model.get_input_embeddings()) if m is not None}
    names = linears_to_pack(model, skip)
    plan = plan or plan_of_config(model, names, config)
    _require_fitting_groups(model, names, plan)
    try:
        summary = quantize_linears(model, plan.of, skip=skip, pack=pack)
    except ValueError as error:
        raise UserError(f"{error}. The checkpoint is damaged; load another one") from None
    require(
        summary.share >= MIN_QUANTIZED_SHARE,
        f"only {summary.share:.0%} of {model.config.model_type}'s weights lie in linear layers: {summary.num_layers} "
        "packed layers would leave the model mostly in 16 bits; this architecture is not supported yet",
    )
    if plan.low is not None:
        log_plan(plan, names)
    log.info(
        "quantize %d layers to %s, %.3f bits a weight, %.1f MB (%.1f %% of the weights outside the embeddings)",
        summary.num_layers,
        plan,
        8 * summary.quantized_bytes / summary.num_quantized,
        summary.quantized_bytes / 1e6,
        100 * summary.share,
    )
    return summary


def quantizer_of(config: QuantConfig) -> Quantizer:
    """The quantizer that the `quant` section describes; with a bits budget, that of more bits."""
    settings = ("block_size", "double_quant", "group_size", "symmetric", "divisor", "scale_dtype")
    return Quantizer(config.codebook.value, **{name: getattr(config, name) for name in settings})


def low_quantizer_of(config: QuantConfig) -> Quantizer:
    """With a bits budget, the quantizer of the layers that get fewer bits."""
    return replace(quantizer_of(config), codebook=(config.low_codebook or Codebook.nf2).value)


def plan_of_config(model: nn.Module, names: list[str], config: QuantConfig) -> QuantPlan:
    """Which quantizer packs which of the layers `names`, still dense, by the `quant` section."""
    quantizer = quantizer_of(config)
    if config.bits_budget is None:
        return QuantPlan(quantizer)
    low = low_quantizer_of(config)
    weights = {name: model.get_submodule(name).weight.detach() for name in names}
    sizes = {name: weight.numel() for name, weight in weights.items()}
    if config.mixed is not MixedBits.error:
        return first_layers(sizes, quantizer, low, bits_budget=config.bits_budget)
    gains = {name: _error_gain(name, weight, quantizer, low) for name, weight in weights.items()}
    return most_gaining_layers(sizes, gains, quantizer, low, bits_budget=config.bits_budget)


def _error_gain(name: str, weight: Tensor, high: Quantizer, low: Quantizer) -> float:
    try:
        return error_gain(weight, high, low)
    except ValueError as error:
        raise UserError(f"{name}.weight: {error}. The checkpoint is damaged; load another one") from None


def _require_fitting_groups(model: nn.Module, names: list[str], plan: QuantPlan) -> None:
    """Groups of input features end where each layer's rows end."""
    for name in names:
        try:
            plan.of(name).span(model.get_submodule(name).in_features)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None
