"""What post-training quantization keeps in memory: the mapped model, one block, and the hidden states between blocks.

Methods that look at data (gptq, awq, smoothquant) keep the second moments of one layer's inputs in float64, [in, in],
and work on copies of them: for wide layers that is more than the block itself. Round-to-nearest needs one layer.
"""

from trainer.config.model import ModelConfig
from trainer.model import compute_dtype
from trainer.plan.estimate import Estimate
from trainer.plan.sizes import meta_model, num_parameters, packable, packed_bytes, sizes_of
from trainer.plan.training import PROCESS_BYTES, layer_bytes_a_token
from trainer.quantizer import Quantizer

CALIBRATION_ROWS = 128
"""Rows whose hidden states are kept, as GPTQ and AWQ take them (arXiv:2210.17323, section 4)."""
MOMENT_COPIES = 3
"""The second moments, damped and permuted, and their inverse's factor."""


def estimate_post_training(model_config: ModelConfig, *, length: int, device: str, calibrated: bool) -> Estimate:
    """Memory of quantizing a 16-bit model to INT4 block by block.

    length      tokens of a calibration row
    calibrated  by a method that looks at data; else round-to-nearest
    """
    model, dtype = meta_model(model_config), compute_dtype(model_config.dtype)
    sizes, linears = sizes_of(model), packable(model)
    length = min(length, sizes.max_positions)
    matrices = sum(rows * columns for rows, columns in linears.values())
    widest = max(rows * columns for rows, columns in linears.values())
    parts = {
        "process": PROCESS_BYTES if device == "cpu" else 0,
        "weights": num_parameters(model) * dtype.itemsize,
        "codes": sum(packed_bytes(Quantizer("int4"), shape) for shape in linears.values()),
    }
    if calibrated:
        columns = max(columns for _, columns in linears.values())
        parts["a block"] = matrices // sizes.num_layers * (4 + dtype.itemsize)
        parts["streams"] = 3 * CALIBRATION_ROWS * length * sizes.hidden_size * dtype.itemsize
        parts["moments of inputs"] = MOMENT_COPIES * 8 * columns**2
        parts["activations"] = 2048 * layer_bytes_a_token(sizes, dtype, fused=False)
    else:
        parts["a layer"] = 2 * 4 * widest
    parts = {name: value for name, value in parts.items() if value}
    name = "post-training, calibrated" if calibrated else "post-training, nearest"
    return Estimate(name, parts, {"a block" if calibrated else "a layer": sum(parts.values())})
