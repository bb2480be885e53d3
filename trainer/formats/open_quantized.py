"""A folder of codes in another engine's layout, opened with our layers: gptq, awq, compressed-tensors, bitsandbytes.

Codes, scales, zero points and groups are taken as they are, whoever wrote them; what the folder has dense stays so.
"""

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.config.errors import UserError, require
from trainer.formats import awq, bnb, compressed_tensors, gptq
from trainer.formats.empty_model import empty_model, fill, quantization_config, read_tensors

READERS = {
    gptq.LAYOUT: gptq.gptq_reader,
    awq.LAYOUT: awq.awq_reader,
    compressed_tensors.LAYOUT: compressed_tensors.compressed_tensors_reader,
    bnb.LAYOUT: bnb.bnb_reader,
}
"""`quant_method` -> from a quantization config to how its layers are read."""


def open_foreign(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model in a folder whose config.json has a `quantization_config` of `READERS`, on the CPU, frozen.

    dtype   the compute dtype
    raises  UserError for settings that are not read, files that are missing or damaged, tensors without a place
    """
    config = quantization_config(folder) or {}
    method = config.get("quant_method")
    require(
        method in READERS,
        f"{folder} is quantized with quant_method={method}; read here: {', '.join(READERS)}, and lowbit's own folders. "
        "Give the 16-bit model that it was made from",
    )
    try:
        read = READERS[method](config)
    except KeyError as error:
        raise UserError(f"{folder}/config.json lacks {error} in its quantization_config; copy it again") from None
    model, tensors = empty_model(folder, dtype), read_tensors(folder)
    num_packed = 0
    for name, dense in [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]:
        layer = read(name, dense, tensors)
        if layer is not None:
            model.set_submodule(name, layer)
            num_packed += 1
    require(num_packed > 0, f"{folder} says that it is quantized with {method}, and no layer of it is packed")
    for name in [name for name in tensors if name.endswith("rotary_emb.inv_freq")]:
        del tensors[name]  # older exporters saved what is computed from the config
    fill(model, folder, tensors, dtype)
    return model
