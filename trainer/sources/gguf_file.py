"""A GGUF file of the user's as a Hugging Face folder in bfloat16, converted once.

transformers reads the file and knows the architectures. What it gets wrong or leaves out is put right here or
refused: it marks the model as quantized and would not save it, joins digits that some tokenizers split, drops
Llama 3's RoPE factors, and reads one part of a split file as the whole. Channels keep the file's order.

The cache goes by path, size and time of modification: a hash of the content would read gigabytes at each start.
"""

import hashlib
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.sources.cache import prepare_once
from trainer.sources.hf_folder import split_digits
from trainer.sources.llama_gguf import DIGIT_SPLITTING, read_metadata

log = logging.getLogger(__name__)

LAYOUT = 1
"""Part of the cache name; raise it when the same file would become another folder."""

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The published values of Llama 3.1 to 3.3; `factor` differs among them and is read off the file."""


def gguf_model(path: Path) -> Path:
    """The folder made from the file `path`, converted on first use.

    raises  UserError if the file is no GGUF file, is damaged or one part of several, or holds what cannot be converted
    """
    path = path.resolve()
    stat = path.stat()
    with path.open("rb") as file:
        require(
            file.read(4) == b"GGUF",
            f"model.path={path} is not a GGUF file (it does not begin with GGUF); give one, or use model=folder",
        )
    state = hashlib.sha256(f"{path}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()
    name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', path.stem)}-gguf{LAYOUT}-{state[:12]}"
    # Weights of 4 bits take four times the room in bfloat16; less dense files need less.
    return prepare_once(name, lambda folder: _convert(path, folder), needs_bytes=4 * stat.st_size + 50_000_000)


def _convert(path: Path, folder: Path) -> None:
    reader = _open(path)
    metadata = read_metadata(reader)
    num_parts = metadata.get("split.count", 1)
    require(
        num_parts <= 1,
        f"model.path={path} is one of {num_parts} parts; join them with `llama-gguf-split --merge` and give the whole",
    )
    log.info("model    %s is converted to bfloat16 once, in the cache", path.name)
    model, tokenizer = _load(path, metadata["general.architecture"])
    _restore_rope(model.config, metadata, reader, path)
    # Its weights are plain bfloat16; with these two marks save_pretrained would refuse it all the same.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    vars(model.config).pop("_model_name_or_path", None)  # general.name, which is no path
    model.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    if metadata.get("tokenizer.ggml.pre") in DIGIT_SPLITTING:
        tokenizer.backend_tokenizer.pre_tokenizer = split_digits()
    tokenizer.save_pretrained(folder)


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise UserError(f"model.path={path} is cut off or damaged ({error}); copy or download it again") from error


def _load(path: Path, architecture: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Through transformers, in bfloat16 and with no weight left packed or missing."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    # Newer releases keep some architectures packed unless told otherwise; older ones know no such setting.
    unpack = {"quantization_config": transformers.GgufConfig(dequantize=True)} if _can_stay_packed() else {}
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            **source, **unpack, dtype="bfloat16", output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"model.path={path} holds the architecture {architecture!r}, which transformers {transformers.__version__} "
            f"does not convert: {reason}. Use the original model instead: model=hub or model=folder"
        ) from error
    missing = sorted(loading["missing_keys"])
    require(not missing, f"model.path={path} lacks the weights {missing[:3]} ({len(missing)} in all)")
    return model, tokenizer


def _can_stay_packed() -> bool:
    return hasattr(transformers, "GgufConfig")


def _restore_rope(config: PreTrainedConfig, metadata: dict[str, Any], reader: GGUFReader, path: Path) -> None:
    """Write the file's RoPE scaling into the config where transformers has left it out; raises UserError if it cannot.

    Llama 3 states it as a tensor: what each inverse frequency is divided by, [head_dim / 2].
    """
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") != "default":
        return
    scaling = metadata.get(f"{metadata['general.architecture']}.rope.scaling.type", "none")
    require(
        scaling == "none",
        f"model.path={path} scales RoPE by {scaling!r}, which transformers does not read from GGUF; "
        "use the original model: model=hub or model=folder",
    )
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is None:
        return
    factor = float(np.max(factors))
    expected = _llama3_rope_factors(rope["rope_theta"], 2 * len(factors), factor)
    require(
        np.allclose(factors, expected, rtol=1e-3),
        f"model.path={path} has RoPE factors that are not Llama 3's; use the original model: model=hub or model=folder",
    )
    config.rope_parameters = {**rope, "rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


def _llama3_rope_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """What Llama 3.1 divides each inverse frequency by: 1 for short waves, `factor` for long ones, smooth between."""
    low, high, max_positions = LLAMA3_ROPE.values()
    wave_lens = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((max_positions / wave_lens - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
