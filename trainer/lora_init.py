"""Where an adapter starts: parts of the weight (PiSSA, OLoRA), or directions of its input (EVA).

    PiSSA   W = U S V^T,   A_0 = sqrt(S_r / s) V_r^T,   B_0 = U_r sqrt(S_r / s)       arXiv:2404.02948, equations 2 to 4
    OLoRA   W = Q R,       A_0 = R_r,                   B_0 = Q_r                     arXiv:2406.01775, section 3.2
    EVA     A_0 = the leading right singular vectors of the layer's inputs, B_0 = 0   arXiv:2410.07170, section 3

PiSSA and OLoRA read dense weights, one at a time, before they are packed: `principal_factors` keeps the factors, and
`pack_residual` then packs W - s B_0 A_0, which differs from W by the rank that is trained.

The surprising thing: what is drawn here is written to the run folder and read from there on resume. A decomposition
may end in other bits on another number of threads, and codes made from it would be another base.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, initialize_lora_eva_weights
from peft.tuners.lora.eva import get_eva_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.config.errors import UserError
from trainer.config.lora import LoraConfig, LoraInit
from trainer.linear import Pack
from trainer.lora import Factors, adapter_size, linear_layers
from trainer.quantizer import QuantizedTensor, Quantizer

log = logging.getLogger(__name__)

FACTORS_FILE = "initial_factors.safetensors"
MAX_EVA_PASSES = 400
"""Forward passes after which EVA is given up: PEFT's routine goes round the rows until its vectors settle, which they
need not do."""
EVA_TARGETS = 16
"""Target tokens of one EVA pass, as a multiple of the components that it fits. A pass spends more on each layer's
update of the vectors than on its tokens: 4 to 8 s for 128 targets, SmolLM2-135M, rank 16, one Zen 4 core."""


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


# ---- directions of the input


def initialize_eva(model: PeftModel, rows: Sequence[dict[str, Any]], *, seed: int) -> dict[str, Tensor]:
    """Start the adapter from the singular vectors of its layers' inputs over training rows, by PEFT's own routine.

    Ranks move to the layers whose inputs they explain best; their sum stays. A layer that is left without one loses its
    adapter.

    model    attached with lora.init=eva
    rows     tokenized rows, `input_ids` and `labels`; the target positions are what is decomposed
    returns  what `restore_eva` takes: layer name -> A_0 [rank, in_features] float32
    raises   UserError if the rows have too few targets, or if the vectors do not settle
    """
    config = model.peft_config["default"]
    num_components = round(max([config.r, *config.rank_pattern.values()]) * config.eva_config.rho)
    batches = _batches(rows, num_targets=EVA_TARGETS * num_components)
    if not batches or _num_targets(batches[0]) < num_components:
        raise UserError(
            f"lora.init=eva fits {num_components} components (rank times lora.eva_rho) to the target tokens of the "
            "training rows, and they have fewer; give more rows, or lower lora.rank or lora.eva_rho"
        )
    num_passes = 0

    def forward(module: nn.Module, inputs: dict[str, Tensor]) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes > MAX_EVA_PASSES:
            raise UserError(
                f"lora.init=eva: the input directions of some layer did not settle in {MAX_EVA_PASSES} passes; use "
                "more training rows, a lower lora.rank or lora.eva_rho=1, or lora.init=default"
            )
        inputs = {key: value for key, value in inputs.items() if key != "labels"}
        module.get_base_model().base_model(**inputs, use_cache=False)  # without the head: nobody reads logits

    device = next(model.parameters()).device
    batches = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        found = get_eva_state_dict(
            model, batches, forward_fn=forward, gather_distributed_inputs=False, show_progress_bar=False
        )
    directions = {name: vectors.float().cpu().clone().contiguous() for name, vectors in found.items()}
    ranks = [len(vectors) for vectors in directions.values()]
    log.info("adapter  eva: %d passes, ranks %d to %d", num_passes, min(ranks), max(ranks))
    return directions


def restore_eva(model: PeftModel, directions: dict[str, Tensor]) -> None:
    """Give each layer the rank and the A_0 of `directions`, in place; the config becomes that of plain LoRA."""
    training = model.training
    initialize_lora_eva_weights(model, eva_state_dict=dict(directions))
    config = model.peft_config["default"]
    config.init_lora_weights, config.eva_config = True, None
    model.train(training)


def _batches(rows: Sequence[dict[str, Any]], *, num_targets: int) -> list[dict[str, Tensor]]:
    """Rows in their order, padded on the right, as many as make `num_targets` targets a batch; a short rest is left."""
    batches, group, found = [], [], 0
    for row in rows:
        group.append(row)
        found += sum(label != -100 for label in row["labels"])
        if found >= num_targets:
            batches.append(_padded(group))
            group, found = [], 0
    return batches or ([_padded(group)] if group else [])


def _padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """input_ids, attention_mask and labels [B, longest] int64"""
    longest = max(len(row["input_ids"]) for row in rows)

    def fill(values: Sequence[int], with_: int) -> list[int]:
        return [*values, *[with_] * (longest - len(values))]

    return {
        "input_ids": torch.tensor([fill(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([fill([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([fill(row["labels"], -100) for row in rows]),
    }


def _num_targets(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"] != -100).sum())


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
