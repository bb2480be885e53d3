"""Block-wise training: block by block, a model learns to compute in few bits, for models whose full QAT does not fit.

EfficientQAT's Block-AP (arXiv:2407.11062, section 3.2). Two streams of hidden states run through the model:

    16-bit     h  -> block i in 16 bits ---------------------> target -> the next block's h
    quantized  h' -> block i, fake-quantized and trained ----> nearer to the target
               h' -> block i, packed: the codes of the last step ------> the next block's h'

In memory are the model, one block's training (float32 weights, gradients, Adam's state) and the streams; a trained
block is packed and its 16-bit weights are gone. Its error is measured, packed, on rows that no step saw, for the
nearest codes and for the trained ones: a block that did not gain keeps the nearest. Norms and biases stay: at these
rates values of 16 bits never move.

Finished blocks are files (files.py). A run that was stopped reads them, passes the rows through the packed blocks
and goes on, bit for bit.
"""

import logging
import math
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.blockwise.activation_stream import ActivationStream
from trainer.blockwise.block import Codes, Pass, mean_error, nearest_codes, pack_block, train_codes
from trainer.blockwise.files import BlockReport, load_block, phase_sha256, save_block
from trainer.config.blockwise import BlockInputs, BlockwiseConfig
from trainer.config.errors import require
from trainer.data.loader import BatchPlan
from trainer.fused_decoder import FusedDecoder
from trainer.objective import NextTokenLoss
from trainer.qat.scheme import Scheme
from trainer.quantizer import Quantizer

log = logging.getLogger(__name__)


class BlockwiseTraining:
    """The phase over one model; `run` packs all its blocks."""

    def __init__(
        self,
        model: PreTrainedModel,
        schemes: Mapping[str, Scheme],
        rows: Sequence[Sequence[int]],
        config: BlockwiseConfig,
        folder: Path,
        *,
        seed: int,
        device: torch.device,
        max_pass_tokens: int,
    ) -> None:
        """model   a causal language model in 16 or 32 bits, its linear layers dense

        schemes          of the linear layers that are packed, by name; weights only
        rows             token ids of the training rows
        folder           where finished blocks are kept, and the streams if they lie on disk
        device           where a block is trained; model and streams stay where they are
        max_pass_tokens  tokens that go through a block at once
        raises           UserError if its blocks are not computed here, a scheme has activations or its layer lies in no
                         block, a weight is inf or nan, there are too few rows, or the folder is of another phase
        """
        _require_finite(model, schemes)
        self._model, self._blocks, self._config, self._folder = model, _blocks(model), config, folder
        self._device, self._max_tokens = device, max_pass_tokens
        self._schemes = by_block(schemes, len(self._blocks))
        self._decoder = FusedDecoder(model)
        self._rows = _calibration_rows(rows, config, seed)
        self._lengths = [len(row) for row in self._rows]
        self._plan = BatchPlan(len(self._rows) - config.val_rows, config.batch_size, 1, 1, seed, float(config.epochs))
        self._phase = phase_sha256(model, schemes, self._rows, config, seed=seed)
        self._loaded = list(self._load_finished())
        self._reports: list[BlockReport] = []

    def run(self) -> list[BlockReport]:
        """Train and pack what is not finished, pack what is; returns a report for each block, in order."""
        if len(self._loaded) == len(self._blocks):
            for block, (report, codes) in zip(self._blocks, self._loaded, strict=True):
                pack_block(block, codes)
                self._reports.append(report)
        else:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._streams() as streams:
                for index in range(len(self._blocks)):
                    self._pass_block(index, *streams)
        return self._reports

    def _pass_block(self, index: int, inputs: ActivationStream, targets: ActivationStream) -> None:
        """Both streams through one block, which is packed on the way."""
        began, block = time.monotonic(), self._blocks[index].to(self._device)
        if self._config.inputs is BlockInputs.original:
            inputs.values.copy_(targets.values)
        self._advance(targets, index)
        before = after = math.nan
        if index < len(self._loaded):
            pack_block(block, self._loaded[index][1])
            block.to(self._device)  # files are read into the CPU's memory
        else:
            before, after = self._train_block(index, inputs, targets)
        if self._config.inputs is BlockInputs.quantized:
            self._advance(inputs, index)
        block.cpu()
        if index < len(self._loaded):
            self._reports.append(self._loaded[index][0])
        else:
            self._finish(BlockReport(index, before, after, after < before, time.monotonic() - began))

    def _train_block(self, index: int, inputs: ActivationStream, targets: ActivationStream) -> tuple[float, float]:
        """Error before and after training; the codes of the lower one are in the block now."""
        block, schemes, config = self._blocks[index], self._schemes[index], self._config

        def forward(stream: Tensor, cu_seqlens: Tensor) -> Tensor:
            return self._decoder.layer(index, stream, cu_seqlens)

        def passes(rows: Sequence[int]) -> Iterator[Pass]:
            for part in inputs.passes(rows, self._max_tokens):
                both = (stream.take(part, self._device) for stream in (inputs, targets))
                yield Pass(*both, inputs.cu_seqlens(part, self._device))

        def passes_of(step: int) -> list[Pass]:
            return list(passes([config.val_rows + row for row in self._plan.row_ids(step)]))

        def error_of(codes: Codes) -> float:
            pack_block(block, codes)
            return mean_error(forward, passes(range(config.val_rows)), config.loss)

        weights = {name: block.get_submodule(name).weight.detach() for name in schemes}
        nearest = nearest_codes(weights, schemes)
        before = error_of(nearest)
        if not schemes:
            return before, before
        trained = train_codes(block, weights, schemes, forward, passes_of, config, num_steps=self._plan.num_steps)
        after = error_of(trained)
        if not after < before:
            pack_block(block, nearest)
        return before, after

    def _advance(self, stream: ActivationStream, index: int) -> None:
        def block(hidden_states: Tensor, cu_seqlens: Tensor) -> Tensor:
            return self._decoder.layer(index, hidden_states, cu_seqlens)

        stream.advance(block, self._device, max_tokens=self._max_tokens)

    @contextmanager
    def _streams(self) -> Iterator[tuple[ActivationStream, ActivationStream]]:
        """What no block gives yet, quantized and in 16 bits: the embeddings of all rows, twice."""
        embedding, rotary = self._model.get_input_embeddings(), self._model.model.rotary_emb
        size = 2 * sum(self._lengths) * embedding.weight[0].nbytes
        on_disk = size > self._config.activations_mb << 20
        self._announce(size, on_disk=on_disk)
        paths = [self._folder / f"{name}.bin" if on_disk else None for name in ("inputs", "targets")]
        rotary.to(self._device)
        try:
            inputs, targets = (
                ActivationStream(self._lengths, embedding.weight.shape[1], embedding.weight.dtype, path=path)
                for path in paths
            )
            inputs.fill(embedding, self._rows)
            targets.values.copy_(inputs.values)
            yield inputs, targets
        finally:
            rotary.cpu()
            for path in filter(None, paths):
                path.unlink(missing_ok=True)

    def _announce(self, size: int, *, on_disk: bool) -> None:
        """Say how much there is to do; the disk must hold the streams before the first block."""
        free = shutil.disk_usage(self._folder).free
        require(
            not on_disk or free > size,
            f"{self._folder} has {free / 1e9:.2f} GB free; hidden states of {len(self._rows)} rows take "
            f"{size / 1e9:.2f} GB; lower blockwise.rows, free some, or allow more memory by blockwise.activations_mb",
        )
        log.info(
            "blocks   %d of %d finished; %d rows, %d tokens, %d steps a block, hidden states of %.0f MB %s",
            *(len(self._loaded), len(self._blocks), len(self._rows), sum(self._lengths), self._plan.num_steps),
            *(size / 1e6, "on disk" if on_disk else "in memory"),
        )

    def _finish(self, report: BlockReport) -> None:
        """Save a block and say how it went."""
        block = self._blocks[report.index]
        codes = {name: block.get_submodule(name).quantized for name in self._schemes[report.index]}
        save_block(self._folder, report, codes, phase=self._phase)
        self._reports.append(report)
        done, total = len(self._reports), len(self._blocks)
        log.info(
            "block %d/%d  error %.4g -> %.4g%s  %.1f s, about %.0f s left",
            *(done, total, report.error_before, report.error_after),
            "" if report.accepted else " (nearest codes stay)",
            *(report.seconds, report.seconds * (total - done)),
        )

    def _load_finished(self) -> Iterator[tuple[BlockReport, Codes]]:
        """The finished blocks, from the first on."""
        for index, schemes in enumerate(self._schemes):
            found = load_block(self._folder, index, self._blocks[index], schemes, phase=self._phase)
            if found is None:
                return
            yield found


def _require_finite(model: PreTrainedModel, schemes: Mapping[str, Scheme]) -> None:
    """A weight of inf or nan has no codes, and the block that it is in no error."""
    for name in schemes:
        require(
            bool(model.get_submodule(name).weight.isfinite().all()),
            f"{name}.weight holds inf or nan; the checkpoint is damaged: load another one",
        )


def _blocks(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The model's blocks, if our layers compute what transformers' do."""
    require(
        NextTokenLoss(model).fused_decoder,
        "blockwise.epochs trains blocks of Llama, Mistral, Qwen2 and Qwen3 models, and this model_type="
        f"{model.config.model_type} is left to transformers; use conf=qat",
    )
    return model.model.layers


def by_block(schemes: Mapping[str, Scheme], num_blocks: int) -> list[dict[str, Scheme]]:
    """For each block, its layers by their names inside it, and their schemes.

    raises  UserError naming a layer that lies in no block, or whose scheme has no packed weight or rounds its inputs
    """
    blocks: list[dict[str, Scheme]] = [{} for _ in range(num_blocks)]
    for name, scheme in schemes.items():
        place = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        require(
            place is not None,
            f"{name} lies in no block, and train.weights=scales is for blocks; use qat.schemes without it, or conf=qat",
        )
        require(
            scheme.activations is None and isinstance(scheme.weight, Quantizer),
            f"{name}: train.weights=scales is for codes of weights whose inputs stay in 16 bits, and its scheme is "
            f"{scheme.settings}; use qat.scheme=int4, or conf=qat",
        )
        blocks[int(place[1])][place[2]] = scheme
    return blocks


def _calibration_rows(rows: Sequence[Sequence[int]], config: BlockwiseConfig, seed: int) -> list[Sequence[int]]:
    """`blockwise.rows` of the rows, drawn by the seed; no step sees the first `val_rows` of them."""
    require(
        len(rows) > config.val_rows,
        f"blockwise.val_rows={config.val_rows} leaves none of the {len(rows)} training rows to train on; give fewer, "
        "or more data",
    )
    num_rows = min(config.rows or len(rows), len(rows))
    drawn = BatchPlan(len(rows), num_rows, 1, 1, seed, max_steps=1).row_ids(0)
    return [rows[row] for row in drawn]
