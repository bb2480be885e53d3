"""One block gets its codes, projection by projection, as its inputs become known.

    stage      q, k, v       ->  attention  ->  output   ->  gate, up      ->  SwiGLU  ->  down
    inputs     norm(stream)      of the packed  ^            norm(stream)      of the packed  ^

A stage's inputs are computed through the stages before it, which are packed by then (GPTQ's "true sequential"), and
none is computed twice but those of down. What folds into weights is chosen first, on the block as it was.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from trainer.blockwise.activation_stream import ActivationStream
from trainer.config.errors import UserError
from trainer.config.ptq import INT8_METHODS, ActOrder, Fold, Match, PtqConfig, PtqMethod
from trainer.fused_decoder import STAGES, FusedDecoder
from trainer.ptq.awq import clipped_codes, searched_factor
from trainer.ptq.folds import BlockWeights
from trainer.ptq.gptq import gptq, inverse_of, layer_error, towards_16bit
from trainer.ptq.hqq import hqq
from trainer.ptq.smoothquant import ALPHAS, searched_smoothing, signal_to_noise, static_scale
from trainer.ptq.statistics import SAMPLE_TOKENS, InputStatistics
from trainer.qat.packed_linear import pack_layer
from trainer.qat.scheme import Scheme
from trainer.quantizer import QuantizedTensor
from trainer.resident import release_file_pages

FOLD_ROWS = 32
"""Rows of calibration on which factors are searched: a factor has few degrees of freedom."""


@dataclass(frozen=True)
class LayerReport:
    """One layer's line in quantize.json.

    weight_error  ||W - W'|| / ||W||
    output_error  ||(W - W') X||^2 / ||W X||^2 over the calibration; None without inputs
    note          what was done otherwise than asked: damping, a scale a token, dead channels
    """

    name: str
    scheme: dict[str, object]
    weight_error: float
    output_error: float | None = None
    note: str = ""

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class Streams:
    """Hidden states of all rows before a block: of the quantized model, and if they are matched of the 16-bit one."""

    def __init__(self, inputs: ActivationStream, original: ActivationStream | None, *, max_tokens: int) -> None:
        self.inputs, self.original, self.max_tokens = inputs, original, max_tokens

    def passes(self, *, num_rows: int | None = None) -> Iterator[list[int]]:
        return self.inputs.passes(range(min(num_rows or self.inputs.num_rows, self.inputs.num_rows)), self.max_tokens)

    def sample(self, rows: list[int], *, num_rows: int | None = None) -> Tensor:
        """Places of the tokens of a pass that are kept: evenly over all rows, however these are cut into passes."""
        num_tokens = self.inputs.num_tokens(min(num_rows or self.inputs.num_rows, self.inputs.num_rows))
        return self.inputs.every(max(1, num_tokens // SAMPLE_TOKENS), rows)


class BlockQuantizer:
    """The settings of a run, applied to block after block."""

    def __init__(self, decoder: FusedDecoder, config: PtqConfig, device: torch.device) -> None:
        self._decoder, self._config, self._device = decoder, config, device

    @torch.no_grad()
    def run(
        self,
        index: int,
        block: nn.Module,
        schemes: Mapping[str, Scheme],
        streams: Streams,
        original: nn.Module | None = None,
    ) -> list[LayerReport]:
        """Pack the layers `schemes` (by their names inside the block), and put the streams behind the block.

        original  a copy of the block, where the 16-bit model's stream goes beside
        raises    UserError naming a layer that cannot be quantized so
        """
        weights = BlockWeights(block)
        if self._config.fold is not Fold.none:
            self._fold(index, weights, schemes, streams)
        reports: list[LayerReport] = []
        attended: dict[str, ActivationStream] = {}
        for stage, names in enumerate(STAGES):
            own = {name: schemes[name] for name in names if name in schemes}
            statistics = None
            if own or stage == 1:
                statistics = self._observe(index, stage, block, original, streams, attended)
            reports += self._pack(index, weights, own, statistics)
            if stage % 2:
                self._advance(index, stage, block, original, streams, attended)
        return reports

    @torch.no_grad()
    def pass_on(self, index: int, block: nn.Module, stream: ActivationStream, *, max_tokens: int) -> None:
        """Put a stream behind a block that stays as it is."""

        def forward(hidden_states: Tensor, cu_seqlens: Tensor) -> Tensor:
            for stage in (1, 3):
                x = self._decoder.projection_input(index, stage, hidden_states, cu_seqlens, layer=block)
                hidden_states = self._decoder.add_projection(x, stage, hidden_states, block)
            return hidden_states

        stream.advance(forward, self._device, max_tokens=max_tokens)

    # ---- streams

    def _observe(
        self,
        index: int,
        stage: int,
        block: nn.Module,
        original: nn.Module | None,
        streams: Streams,
        attended: dict[str, ActivationStream],
    ) -> InputStatistics:
        """The inputs of a stage, over all rows; what attention gave is kept, to be multiplied once more."""
        statistics, sampled = InputStatistics(), self._config.method in INT8_METHODS
        for rows in streams.passes():
            x = self._input(index, stage, streams.inputs, rows, block)
            x16 = None if original is None else self._input(index, stage, streams.original, rows, original)
            statistics.add(x, x16, sample=streams.sample(rows) if sampled else None)
            if stage == 1:
                for key, stream, part in (("inputs", streams.inputs, x), ("original", streams.original, x16)):
                    if part is not None:
                        if key not in attended:
                            attended[key] = stream.like(part.shape[1])
                        attended[key].put(rows, part)
        return statistics

    def _input(self, index: int, stage: int, stream: ActivationStream, rows: list[int], block: nn.Module) -> Tensor:
        hidden_states, cu_seqlens = stream.take(rows, self._device), stream.cu_seqlens(rows, self._device)
        return self._decoder.projection_input(index, stage, hidden_states, cu_seqlens, layer=block)

    def _advance(
        self,
        index: int,
        stage: int,
        block: nn.Module,
        original: nn.Module | None,
        streams: Streams,
        attended: dict[str, ActivationStream],
    ) -> None:
        """Add what a stage gives out to the streams."""
        for key, stream, module in (("inputs", streams.inputs, block), ("original", streams.original, original)):
            if stream is None:
                continue
            for rows in streams.passes():
                if stage == 1:
                    x = attended[key].take(rows, self._device)
                else:
                    x = self._input(index, stage, stream, rows, module)
                hidden_states = stream.take(rows, self._device)
                stream.put(rows, self._decoder.add_projection(x, stage, hidden_states, module))

    # ---- factors

    def _fold(
        self, index: int, weights: BlockWeights, schemes: Mapping[str, Scheme], streams: Streams
    ) -> list[float | None]:
        """Choose and apply the factor of each stage."""
        found = self._block_statistics(index, weights.block, streams)
        static = self._config.method is PtqMethod.smoothquant
        for stage, names in enumerate(STAGES):
            own = [name for name in names if name in schemes]
            if len(own) < len(names):
                continue  # a layer that stays in 16 bits would be scaled without need
            matrices = [weights.weights[name] for name in own]
            quantizers = [schemes[name].weight for name in own]
            statistics, usable = found[stage], lambda factor, stage=stage: weights.usable(stage, factor)
            if self._config.fold is Fold.awq:
                factor = searched_factor(matrices, quantizers, statistics.hessian, statistics.mean_abs, usable)
            else:
                alphas = ALPHAS if self._config.alpha is None else (self._config.alpha,)
                _, factor = searched_smoothing(
                    *(matrices, quantizers, statistics.sample, statistics.absmax, usable), static=static, alphas=alphas
                )
            weights.fold(stage, factor)

    def _block_statistics(self, index: int, block: nn.Module, streams: Streams) -> list[InputStatistics]:
        """Of all stages, through the block as it is, on some rows."""
        awq = self._config.fold is Fold.awq
        found = [InputStatistics(with_hessian=awq) for _ in STAGES]
        for rows in streams.passes(num_rows=FOLD_ROWS):
            stream = streams.inputs
            hidden_states, cu_seqlens = stream.take(rows, self._device), stream.cu_seqlens(rows, self._device)
            for stage in range(len(STAGES)):
                x = self._decoder.projection_input(index, stage, hidden_states, cu_seqlens, layer=block)
                found[stage].add(x, sample=None if awq else streams.sample(rows, num_rows=FOLD_ROWS))
                if stage == 1:
                    hidden_states = self._decoder.add_projection(x, stage, hidden_states, block)
        return found

    # ---- codes

    def _pack(
        self, index: int, weights: BlockWeights, schemes: Mapping[str, Scheme], statistics: InputStatistics | None
    ) -> list[LayerReport]:
        """Choose the codes of layers that share their inputs, and put packed layers in their place."""
        if not schemes:
            return []
        where = f"model.layers.{index}"
        chosen, notes = {}, []
        try:
            choose = self._chooser(f"{where}.{', '.join(schemes)}", statistics, notes)
            for name, scheme in schemes.items():
                chosen[name] = choose(weights.weights[name], scheme)
        except ValueError as error:
            raise UserError(f"{where}.{name}: {error}") from None
        schemes, scale = self._inputs(weights, schemes, chosen, statistics, notes)
        reports = []
        for name, scheme in schemes.items():
            weight, module = weights.weights[name], weights.block.get_submodule(name)
            reports.append(_report(f"{where}.{name}", scheme, weight, chosen[name], statistics, "; ".join(notes)))
            release_file_pages(module.weight)
            own_scale = None if scale is None else scale.clone()  # files hold each tensor once
            layer = pack_layer(scheme, chosen[name], module.bias, input_scale=own_scale)
            weights.block.set_submodule(name, layer)
        return reports

    def _chooser(
        self, where: str, statistics: InputStatistics | None, notes: list[str]
    ) -> Callable[[Tensor, Scheme], QuantizedTensor]:
        """weight [out, in] float32, scheme -> codes"""
        config = self._config
        if config.method is PtqMethod.hqq:
            return lambda weight, scheme: hqq(weight, scheme.weight)
        if config.method is PtqMethod.awq:
            return lambda weight, scheme: clipped_codes(weight, scheme.weight, statistics.hessian)
        if config.method is PtqMethod.rtn:
            return lambda weight, scheme: scheme.weight.quantize(weight)
        of_floats = config.method is PtqMethod.gptq
        hessian = statistics.hessian
        inverse = inverse_of(
            hessian, damping=config.damping, act_order=config.act_order is not ActOrder.none, name=where
        )
        if inverse.damping > config.damping:
            notes.append(f"damping {inverse.damping:g}")
        if statistics.num_dead:
            notes.append(f"{statistics.num_dead} channels without inputs")

        def choose(weight: Tensor, scheme: Scheme) -> QuantizedTensor:
            if config.match is Match.original:
                weight = towards_16bit(weight, hessian, statistics.cross, damping=inverse.damping)
            return gptq(
                *(weight, scheme.weight, hessian, inverse),
                damping=inverse.damping,
                search=config.search_scales and of_floats,
                refit=config.refit_scales and of_floats,
                grouped_order=config.act_order is ActOrder.groups,
            )

        return choose

    def _inputs(
        self,
        weights: BlockWeights,
        schemes: Mapping[str, Scheme],
        chosen: Mapping[str, QuantizedTensor],
        statistics: InputStatistics | None,
        notes: list[str],
    ) -> tuple[Mapping[str, Scheme], Tensor | None]:
        """How layers of one input round it, and the scale if that is static: as asked where enough of the product is
        left, else with a scale a token, else not at all."""
        if not any(scheme.activations is not None for scheme in schemes.values()):
            return schemes, None
        values = [chosen[name].dequantize(torch.float32) for name in schemes]
        if any(scheme.activations.static for scheme in schemes.values()):
            wanted = [weights.weights[name] for name in schemes]
            scale = static_scale(wanted, values, statistics.sample, statistics.absmax)
            scale = scale.to(getattr(torch, self._config.scale_dtype)).float()  # as files will hold it
            signal = signal_to_noise(values, statistics.sample, scale)
            if signal >= self._config.min_signal:
                return schemes, scale
            notes.append(f"a scale a token: static inputs leave {signal:.1f} dB")
            schemes = {name: Scheme.named("int8", **_int8_settings(scheme)) for name, scheme in schemes.items()}
        signal = signal_to_noise(values, statistics.sample, None)
        if signal >= self._config.min_signal:
            return schemes, None
        notes.append(f"inputs in 16 bits: a scale a token leaves {signal:.1f} dB")
        return {name: Scheme(scheme.weight) for name, scheme in schemes.items()}, None


def _int8_settings(scheme: Scheme) -> dict[str, object]:
    return {name: value for name, value in scheme.weight.settings.items() if name != "codebook"}


def _report(
    name: str,
    scheme: Scheme,
    weight: Tensor,
    quantized: QuantizedTensor,
    statistics: InputStatistics | None,
    note: str,
) -> LayerReport:
    values = quantized.dequantize(torch.float32)
    norm = weight.norm().item()
    weight_error = (weight - values).norm().item() / norm if norm else 0.0
    output_error = None
    if statistics is not None and statistics.hessian is not None:
        whole = layer_error(weight, torch.zeros_like(weight), statistics.hessian)
        output_error = layer_error(weight, values, statistics.hessian) / whole if whole else 0.0
    return LayerReport(name, scheme.settings, weight_error, output_error, note)


def block_names(schemes: Mapping[str, Scheme], index: int) -> dict[str, Scheme]:
    """The schemes of a block's layers by their names inside it."""
    prefix = f"model.layers.{index}."
    return {name.removeprefix(prefix): scheme for name, scheme in schemes.items() if name.startswith(prefix)}


@torch.no_grad()
def quantize_layer(model: nn.Module, name: str, scheme: Scheme, config: PtqConfig) -> LayerReport:
    """Pack one layer of a model by a method that needs no inputs.

    raises  UserError naming it
    """
    layer = model.get_submodule(name)
    weight = layer.weight.detach().float()
    try:
        hqq_codes = config.method is PtqMethod.hqq
        quantized = hqq(weight, scheme.weight) if hqq_codes else scheme.weight.quantize(weight)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
    model.set_submodule(name, pack_layer(scheme, quantized, layer.bias))
    release_file_pages(layer.weight)
    return _report(name, scheme, weight, quantized, None, "")
