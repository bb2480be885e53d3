"""From a config to a model in memory: resolve where it comes from, load it in the compute dtype, pack its weights.

`trainer/sources/` turns each source into a Hugging Face folder; from there on there is one path, `from_pretrained`.
"""

import logging
import sys
from pathlib import Path

import torch
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from trainer.config import DType, ModelConfig, QuantConfig, UserError, require
from trainer.linear import QuantizationSummary, quantize_linears
from trainer.quantizer import Quantizer
from trainer.sources.resolve import resolve_model

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

    raises  UserError if the model is not there, is incomplete or is no causal language model
    """
    path, dtype = resolve_model(config), compute_dtype(config.dtype)
    if not sys.stderr.isatty():
        disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=config.revision)
        model, loading = AutoModelForCausalLM.from_pretrained(
            path, revision=config.revision, dtype=dtype, output_loading_info=True
        )
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"model.path={config.path} could not be loaded: {reason} "
            "Check the name, the network and HF_TOKEN, or use model=folder with a local copy"
        ) from error
    missing = sorted(loading["missing_keys"])
    require(not missing, f"{path} lacks the weights {missing[:3]} ({len(missing)} in all); it would run on random ones")
    require(tokenizer.eos_token_id is not None, f"{path}: the tokenizer has no eos token; set one in its config")
    model.requires_grad_(False).eval()
    log.info(
        "model    %s, %.0f M parameters, %s", path, model.num_parameters() / 1e6, str(dtype).removeprefix("torch.")
    )
    return model, tokenizer


def prepare_model(model: PreTrainedModel, config: QuantConfig) -> QuantizationSummary:
    """Pack the linear layers of `model` in place; the output head and the embeddings stay in 16 bits.

    raises  UserError if a weight holds inf or nan, or if most weights are not in nn.Linear layers
    """
    quantizer = Quantizer(
        codebook=config.codebook.value, block_size=config.block_size, double_quant=config.double_quant
    )
    skip: set[nn.Module] = {m for m in (model.get_output_embeddings(), model.get_input_embeddings()) if m is not None}
    try:
        summary = quantize_linears(model, quantizer, skip=skip)
    except ValueError as error:
        raise UserError(f"{error}. The checkpoint is damaged; load another one") from None
    require(
        summary.share >= MIN_QUANTIZED_SHARE,
        f"only {summary.share:.0%} of {model.config.model_type}'s weights lie in linear layers: {summary.num_layers} "
        "packed layers would leave the model mostly in 16 bits; this architecture is not supported yet",
    )
    log.info(
        "quantize %d layers to %s, %.3f bits a weight, %.1f MB (%.1f %% of the weights outside the embeddings)",
        summary.num_layers,
        config.codebook.value,
        8 * summary.quantized_bytes / summary.num_quantized,
        summary.quantized_bytes / 1e6,
        100 * summary.share,
    )
    return summary
