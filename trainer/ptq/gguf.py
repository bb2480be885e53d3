"""llama.cpp's block formats of a 16-bit model, weighed by what calibration says of each input (its "imatrix").

The importance of an input channel is the mean square of what it carries: a rounding error of a weight counts by it. The
file is written by trainer/formats/gguf_write.py, and its values are put back into the model, to be compared.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.ptq import PtqConfig
from trainer.formats.gguf_read import read_gguf
from trainer.formats.gguf_report import GgufReport
from trainer.formats.gguf_write import write_gguf
from trainer.fused_decoder import STAGES
from trainer.ptq.blocks import open_decoder, open_streams
from trainer.ptq.statistics import InputStatistics

FLOOR = 1e-4
"""Of a layer's mean importance, at least: a block of channels that calibration never reached would become zeros."""


@torch.no_grad()
def input_importance(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], config: PtqConfig, *, device: torch.device
) -> dict[str, Tensor]:
    """Name of a layer -> mean square of each of its input channels, [in_features] float32.

    rows    token ids of the calibration
    raises  UserError for a model whose blocks are not computed here
    """
    decoder, streams = open_decoder(model, ()), open_streams(model, rows, config, device)
    model.model.rotary_emb.to(device)
    found: dict[str, Tensor] = {}
    for index, block in enumerate(model.model.layers):
        block.to(device)
        statistics = [InputStatistics(with_hessian=False) for _ in STAGES]
        for passed in streams.passes():
            hidden_states = streams.inputs.take(passed, device)
            cu_seqlens = streams.inputs.cu_seqlens(passed, device)
            for stage, own in enumerate(statistics):
                x = decoder.projection_input(index, stage, hidden_states, cu_seqlens, layer=block)
                own.add(x)
                if stage % 2:
                    hidden_states = decoder.add_projection(x, stage, hidden_states, block)
            streams.inputs.put(passed, hidden_states)
        block.cpu()
        for names, own in zip(STAGES, statistics, strict=True):
            square = own.mean_square.float().cpu()
            importance = square.clamp(min=FLOOR * square.mean().item()) if bool(square.any()) else square + 1
            found |= {f"model.layers.{index}.{name}": importance for name in names}
    model.model.rotary_emb.cpu()
    return found


def quantize_to_gguf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    importance: Mapping[str, Tensor] | None,
    config: PtqConfig,
    provenance: dict[str, str],
) -> GgufReport:
    """Write the file, and give the model the values that it holds.

    raises  UserError if llama.cpp has no place for something, or the disk is too full
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    report = write_gguf(
        *(model, tokenizer, path), gguf_type=config.gguf_type, importance=importance, provenance=provenance
    )
    values = read_gguf(path, dtype=model.dtype)
    loading = model.load_state_dict(values, strict=False)
    if loading.unexpected_keys:
        raise RuntimeError(f"{path} holds tensors that the model lacks: {loading.unexpected_keys[:3]}")
    return report
