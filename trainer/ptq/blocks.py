"""Block after block: from a model in 16 bits to one of codes, in the memory of one block and of the rows between two.

Data-free methods (rtn, hqq, int8_dynamic) need no rows and serve every architecture; the others run the blocks of our
own decoder (trainer/fused_decoder.py). Finished blocks are files, so that a run that was stopped reads them, passes the
rows through the packed blocks and goes on, bit for bit.
"""

import copy
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.architecture import why_unsupported
from trainer.blockwise.activation_stream import ActivationStream
from trainer.config.errors import UserError, require
from trainer.config.ptq import Fold, Match, PtqConfig, PtqMethod
from trainer.fused_decoder import FusedDecoder
from trainer.ptq.block import BlockQuantizer, LayerReport, Streams, block_names, quantize_layer
from trainer.ptq.files import load_block, phase_sha256, save_block
from trainer.qat.scheme import Scheme

log = logging.getLogger(__name__)

MAX_PASS_TOKENS = (2048, 16384)
"""On CPUs and on GPUs, as in training."""
DATA_FREE = (PtqMethod.rtn, PtqMethod.hqq, PtqMethod.int8_dynamic)

Progress = Callable[[int, int], None]
"""Told how many blocks of how many are finished."""


def needs_data(config: PtqConfig) -> bool:
    """Whether codes depend on inputs."""
    return runs_blocks(config) or config.bits_budget is not None


def runs_blocks(config: PtqConfig) -> bool:
    """Whether the model's blocks are run here, and not only its layers looked at."""
    if config.method is PtqMethod.gguf:
        return config.imatrix
    return config.method not in DATA_FREE or config.fold is not Fold.none


@torch.no_grad()
def quantize_blocks(
    model: PreTrainedModel,
    schemes: Mapping[str, Scheme],
    rows: Sequence[Sequence[int]],
    config: PtqConfig,
    folder: Path,
    *,
    device: torch.device,
    progress: Progress | None = None,
) -> list[LayerReport]:
    """Pack the layers `schemes` (by name) of a model, in place; returns a report for each, in the model's order.

    rows    token ids of the calibration; without effect for data-free methods
    folder  where finished blocks are kept
    device  where a block is quantized; the model stays where it is
    raises  UserError naming the layer or what the model has that is not computed here
    """
    if not runs_blocks(config):
        return [quantize_layer(model, name, scheme, config) for name, scheme in schemes.items()]
    decoder = open_decoder(model, schemes)
    streams = open_streams(model, rows, config, device)
    phase = phase_sha256(model, schemes, rows, config, place=f"{device.type}, {streams.max_tokens} tokens a pass")
    folder.mkdir(parents=True, exist_ok=True)
    quantizer = BlockQuantizer(decoder, config, device)
    model.model.rotary_emb.to(device)
    reports: list[LayerReport] = []
    blocks = model.model.layers
    for index, block in enumerate(blocks):
        began, own = time.monotonic(), block_names(schemes, index)
        original = copy.deepcopy(block).to(device) if streams.original is not None else None
        found = load_block(folder, index, block, phase=phase)
        block.to(device)
        if found is None:
            found = quantizer.run(index, block, own, streams, original)
            save_block(folder, index, block, list(own), found, phase=phase)
            _say(index, len(blocks), found, time.monotonic() - began)
        else:
            for stream, module in ((streams.inputs, block), (streams.original, original)):
                if stream is not None:
                    quantizer.pass_on(index, module, stream, max_tokens=streams.max_tokens)
        block.cpu()
        reports += found
        if progress is not None:
            progress(index + 1, len(blocks))
    model.model.rotary_emb.cpu()
    return reports


def _say(index: int, count: int, reports: Sequence[LayerReport], seconds: float) -> None:
    errors = [report.output_error for report in reports if report.output_error is not None]
    worst = f"  error of the outputs {sum(errors) / len(errors):.3g}" if errors else ""
    left = seconds * (count - index - 1)
    log.info("block %d/%d%s  %.1f s, about %.0f s left", index + 1, count, worst, seconds, left)
    for report in reports:
        if report.note:
            log.info("         %s: %s", report.name, report.note)


def open_decoder(model: PreTrainedModel, names: Iterable[str]) -> FusedDecoder:
    """raises  UserError if our decoder does not run the model, or a layer lies in no block"""
    for name in names:
        require(
            why_unsupported(model.config) is not None or name.startswith("model.layers."),
            f"{name} lies in no block; methods that calibrate are for layers of blocks: exclude it",
        )
    try:
        return FusedDecoder(model)
    except ValueError as error:
        raise UserError(
            f"methods that calibrate run the blocks of Llamas, and {error}; use method=rtn, hqq, or int8_dynamic with "
            "fold=none, or gguf with imatrix=false"
        ) from None


def open_streams(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], config: PtqConfig, device: torch.device
) -> Streams:
    """What no block gives yet: the embeddings of all rows."""
    embedding: nn.Module = model.get_input_embeddings()
    lengths = [len(row) for row in rows]
    inputs = ActivationStream(lengths, embedding.weight.shape[1], embedding.weight.dtype)
    inputs.fill(embedding, rows)
    original = None
    if config.match is Match.original:
        original = inputs.like(embedding.weight.shape[1])
        original.values.copy_(inputs.values)
    return Streams(inputs, original, max_tokens=config.max_pass_tokens or MAX_PASS_TOKENS[device.type != "cpu"])
