"""Where an adapter starts that begins with parts of the weight: PiSSA and OLoRA.

    PiSSA   W = U S V^T,   A_0 = sqrt(S_r / s) V_r^T,   B_0 = U_r sqrt(S_r / s)       arXiv:2404.02948, equations 2 to 4
    OLoRA   W = Q R,       A_0 = R_r,                   B_0 = Q_r                     arXiv:2406.01775, section 3.2

They read dense weights, one at a time, before they are packed: `principal_factors` keeps the factors, and
`pack_residual` then packs W - s B_0 A_0, which differs from W by the rank that is trained.

The surprising thing: what is drawn here is written to the run folder and read from there on resume. A decomposition
may end in other bits on another number of threads, and codes made from it would be another base.
"""

import logging
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.config.errors import UserError
from trainer.config.lora import LoraConfig, LoraInit
from trainer.linear import Pack
from trainer.lora import Factors, adapter_size, linear_layers
from trainer.quantizer import QuantizedTensor, Quantizer

log = logging.getLogger(__name__)

FACTORS_FILE = "initial_factors.safetensors"


# ---- parts of the weight


@torch.no_grad()
def principal_factors(model: nn.Module, config: LoraConfig) -> Factors:
    """B_0 and A_0 of each layer that gets an adapter, float32, on the layer's device; one layer's SVD at a time.

    model   16- or 32-bit, not packed, without adapters
    raises  UserError if a layer's rank exceeds its smaller side
    """
    factors: Factors = {}
    for name, layer in linear_layers(model).items():
        size = adapter_size(config, name)
        if size is None:
            continue
        rank, scaling = size
        if rank > min(layer.weight.shape):
            raise UserError(
                f"lora.rank={rank} exceeds the {min(layer.weight.shape)} singular values of {name}, which "
                f"lora.init={config.init.value} starts from; use a lower rank, or lora.rank_pattern"
            )
        split = singular_factors if config.init is LoraInit.pissa else triangular_factors
        factors[name] = split(layer.weight, rank, scaling)
    log.info("adapter  %s: %d layers start from parts of their weights", config.init.value, len(factors))
    return factors


def singular_factors(weight: Tensor, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    """A_0 [rank, in_features] and B_0 [out_features, rank] float32: s B_0 A_0 is the best approximation of that rank.

    weight [out_features, in_features] float. The eigenvectors of the smaller Gram matrix, in float64, are exact for the
    largest singular values and several times faster than an SVD.
    """
    wide = weight.shape[0] <= weight.shape[1]
    rows = weight.double() if wide else weight.double().T
    squares, vectors = torch.linalg.eigh(rows @ rows.T)
    squares, vectors = squares[-rank:].flip(0), vectors[:, -rank:].flip(1)
    singular = squares.clamp_min(0).sqrt()
    others = (vectors.T @ rows) / singular.clamp_min(torch.finfo(torch.float64).tiny)[:, None]
    root = (singular / scaling).sqrt()
    left, right = (vectors, others) if wide else (others.T, vectors.T)
    return (root[:, None] * right).float().contiguous(), (left * root).float().contiguous()


def triangular_factors(weight: Tensor, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    """A_0 = the first rows of R, B_0 = the first columns of Q; `scaling` does not enter, as in the paper's code."""
    orthogonal, triangular = torch.linalg.qr(weight.float())
    return triangular[:rank].contiguous(), orthogonal[:, :rank].contiguous()


def pack_residual(factors: Factors, config: LoraConfig) -> Pack:
    """Packs W - s B_0 A_0 where `factors` has the layer, and W elsewhere; for `prepare_model`.

    The difference is made in float64, so that the same factors give the same codes on every machine.
    """

    def pack(name: str, weight: Tensor, quantizer: Quantizer) -> QuantizedTensor:
        if name not in factors:
            return quantizer.quantize(weight)
        lora_A, lora_B = (factor.to(weight.device).double() for factor in factors[name])
        _, scaling = adapter_size(config, name)
        return quantizer.quantize((weight.double() - scaling * lora_B @ lora_A).float())

    return pack


# ---- on disk


def save_factors(folder: Path, factors: Factors | dict[str, Tensor]) -> None:
    """Write what a run started from into its folder."""
    tensors: dict[str, Tensor] = {}
    for name, value in factors.items():
        parts = {"": value} if isinstance(value, Tensor) else {".A": value[0], ".B": value[1]}
        tensors |= {name + suffix: tensor.cpu().contiguous() for suffix, tensor in parts.items()}
    partial = folder / f".{FACTORS_FILE}.partial"
    save_file(tensors, partial)
    partial.rename(folder / FACTORS_FILE)


def load_factors(folder: Path) -> Factors | None:
    """What `save_factors` wrote of `principal_factors`; None if there is no file."""
    path = folder / FACTORS_FILE
    if not path.is_file():
        return None
    tensors = load_file(path)
    return {
        name.removesuffix(".A"): (tensor, tensors[name.removesuffix(".A") + ".B"])
        for name, tensor in tensors.items()
        if name.endswith(".A")
    }


def load_directions(folder: Path) -> dict[str, Tensor] | None:
    """What `save_factors` wrote of `initialize_eva`; None if there is no file."""
    path = folder / FACTORS_FILE
    return load_file(path) if path.is_file() else None
