"""FakeQuantLinear: a trainable linear layer that computes what its quantized self will compute.

The layer of quantization-aware training: forward multiplies values that lie on the scheme's grid, backward passes the
rounding straight through (trainer/fake_weight.py has the ways to round). `quantized` gives the codes that the last
forward multiplied, learned scales included. The surprising thing: autograd keeps only the input and the weight
themselves, and both fake quantizations are computed again in backward, a few percent of the products' time.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from trainer.kernels.float_grids import FloatWeight
from trainer.qat.fake_product import fake_product, fake_values
from trainer.qat.fake_weight import (
    FromWeight,
    InputFunction,
    Learned,
    PerLayer,
    PerToken,
    Soft,
    Stochastic,
    WeightFunction,
)
from trainer.qat.observers import Observer
from trainer.qat.rounding import rounding_seed
from trainer.qat.scheme import Rounding, Scheme
from trainer.quantizer import QuantizedTensor


class FakeQuantWeight(nn.Module):
    """A weight with a scheme, and what is trained beside it: what FakeQuantLinear and FakeQuantEmbedding share.

    weight         [out_features, in_features] float; float32 beside 16-bit inputs is a master copy, of which only Q(W)
                   is rounded
    scales, zeros  learned: [out_features, groups] float32 parameters, zeros for asymmetric groups, not rounded
    soft_rounding  rounding=soft: [out_features, in_features] float32 parameter; the weight is frozen then
    enabled        False: the weight and inputs as they are, before the schedule's start
    rounding_amount, rounding_seed   of stochastic rounding, in training mode; 0 makes soft rounding hard
    """

    scales: nn.Parameter | None
    zeros: nn.Parameter | None
    soft_rounding: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, scheme: Scheme) -> None:
        super().__init__()
        if weight.dim() != 2:
            raise ValueError(f"weight has shape {tuple(weight.shape)}; a layer takes [out_features, in_features]")
        scheme.check(weight.shape[1])
        self.scheme, self.weight = scheme, weight
        self.enabled, self.rounding_amount, self.rounding_seed = True, 1.0, 0
        self.scales = self.zeros = self.soft_rounding = None
        if scheme.learn_scales:
            scales, zeros = Learned(scheme.weight).start(weight.detach(), scheme.scale_init)
            self.scales, self.zeros = nn.Parameter(scales), None if zeros is None else nn.Parameter(zeros)
        elif scheme.rounding is Rounding.soft:
            self.soft_rounding = nn.Parameter(Soft(scheme.weight, hard=False).start(weight.detach()))
            weight.requires_grad_(False)

    @property
    def function(self) -> str:
        """What the layer computes from its tensors; part of the hash of a base (see `weights_sha256`)."""
        return self.scheme.function

    @property
    def quantized(self) -> QuantizedTensor | FloatWeight:
        """The codes of the weight as it is: those that the last forward multiplied, if no step was taken since.

        raises  ValueError naming a weight that is inf or nan
        """
        if self.soft_rounding is not None:
            return Soft(self.scheme.weight, hard=True).codes(self.weight.detach(), self.soft_rounding.detach())
        function, parameters = self.weight_function()
        return function.codes(self.weight.detach(), *(p if p is None else p.detach() for p in parameters))

    def weight_function(self) -> tuple[WeightFunction, tuple[Tensor | None, ...]]:
        """How this forward rounds the weight, and the parameters of that."""
        quantizer, rounding = self.scheme.weight, self.scheme.rounding
        if self.scales is not None:
            return Learned(quantizer), (self.scales, self.zeros)
        if self.soft_rounding is not None:
            return Soft(quantizer, hard=not self.training or self.rounding_amount == 0), (self.soft_rounding,)
        if rounding is Rounding.stochastic and self.training and self.rounding_amount > 0:
            return Stochastic(quantizer, self.rounding_amount, self.rounding_seed), ()
        return FromWeight(quantizer), ()

    def multiplied_weight(self, dtype: torch.dtype) -> Tensor:
        """What stands for the weight in the product, [out_features, in_features], with its gradient.

        For those that multiply by themselves, such as the loss over an output head.
        """
        if not self.enabled:
            return self.weight.to(dtype)
        function, parameters = self.weight_function()
        return fake_values(self.weight, function, *parameters).to(dtype)


class FakeQuantLinear(FakeQuantWeight):
    """y = Q(x) Q(W)^T + bias; W and bias are parameters like those of nn.Linear.

    in   x [..., in_features] float
    out  [..., out_features] of x's dtype

    input_scale  static inputs: [] float32, 0 until a range is known (inputs stay as they are until then); a parameter
                 with learn_scales. `commit_observers` sets it between two steps as long as the layer observes, so all
                 passes and processes of a step round alike
    observing    static inputs: take ranges from training passes, also while `enabled` is False
    """

    input_scale: Tensor | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, scheme: Scheme) -> None:
        """weight [out_features, in_features], bias [out_features] or None: kept as they are, the same objects

        raises  ValueError naming the group sizes that fit in_features, or a weight that is inf or nan
        """
        super().__init__(weight, scheme)
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        static = scheme.activations is not None and scheme.activations.static
        self.observing = static
        self.observer = Observer(scheme.activations.observer, weight.device) if static else None
        scale = torch.zeros((), device=weight.device) if static else None
        if static and scheme.learn_scales:
            self.input_scale = nn.Parameter(scale)
        else:
            self.register_buffer("input_scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        self._observe(x)
        if not self.enabled:
            return linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        weight_function, parameters = self.weight_function()
        input_function = self._input_function()
        on_grid = not isinstance(weight_function, Soft) or weight_function.hard
        integer = self.scheme.integer and on_grid and input_function is not None
        scale = self.input_scale if isinstance(input_function, PerLayer) else None
        functions = weight_function, input_function
        return fake_product(x, self.weight, self.bias, scale, functions, integer, *parameters)

    def rounded_input(self, x: Tensor) -> Tensor:
        """Q(x), with its gradient; for those that multiply by themselves."""
        self._observe(x)
        function = self._input_function() if self.enabled else None
        if function is None:
            return x
        return fake_values(x, function, *(() if isinstance(function, PerToken) else (self.input_scale,)))

    @torch.no_grad()
    def set_input_scale(self, scale: Tensor) -> None:
        """A static scale from elsewhere, such as calibration; [] float32, positive."""
        self.input_scale.copy_(scale)

    def _observe(self, x: Tensor) -> None:
        """Passes of a step share the scale of the steps before, on every process; only the first ones have none."""
        if self.observer is None or not (self.observing and self.training):
            return
        self.observer.observe(x)
        if bool(self.observer.range == 0):
            self.set_input_scale(self.observer.scale())

    def _input_function(self) -> InputFunction | None:
        activations = self.scheme.activations
        if activations is None:
            return None
        if not activations.static:
            return PerToken(activations.grid)
        return PerLayer() if bool(self.input_scale != 0) else None  # a learned one may cross 0, and is clamped

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.scheme}"
        )


class FakeQuantEmbedding(FakeQuantWeight):
    """Rows of Q(W): an embedding whose table ships in codes.

    in   ids [...] int64
    out  [..., embedding_dim] of the weight's dtype

    With the scheme of an output head over the same weight both use one function of it, and `head` shares what is
    trained beside the weight: tied tables stay tied.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        scheme: Scheme,
        *,
        padding_idx: int | None = None,
        head: FakeQuantLinear | None = None,
    ) -> None:
        """weight [num_embeddings, embedding_dim]; padding_idx: the row that gets no gradient from here

        head    the output head over the same weight, if it is quantized too
        raises  ValueError if head has another weight or scheme, or as FakeQuantLinear
        """
        if head is not None and (head.weight is not weight or head.scheme.weight != scheme.weight):
            raise ValueError(
                f"embeddings of {scheme.weight} are tied to a head of {head.scheme.weight}; give both one scheme"
            )
        super().__init__(weight, scheme)
        self.num_embeddings, self.embedding_dim = weight.shape
        self.padding_idx = padding_idx
        if head is not None:
            self.scales, self.zeros, self.soft_rounding = head.scales, head.zeros, head.soft_rounding

    def forward(self, ids: Tensor) -> Tensor:
        if not self.enabled:
            return embedding(ids, self.weight, self.padding_idx)
        return embedding(ids, self.multiplied_weight(self.weight.dtype), self.padding_idx)

    def extra_repr(self) -> str:
        return f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, {self.scheme}"


def fake_quantize_linears(model: nn.Module, scheme_of: Callable[[str], Scheme | None]) -> int:
    """Replace each nn.Linear of `model` by a FakeQuantLinear over the same parameters, in place; returns how many.

    scheme_of  a layer's name to its scheme; None leaves the layer as it is
    raises     ValueError naming the layer whose in_features the groups do not divide; the model is unchanged then
    """
    replaced: dict[str, FakeQuantLinear] = {}
    for name, layer in model.named_modules():
        scheme = scheme_of(name) if type(layer) is nn.Linear else None
        if scheme is None:
            continue
        try:
            replaced[name] = FakeQuantLinear(layer.weight, layer.bias, scheme).train(layer.training)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for name, layer in replaced.items():
        _put(model, name, layer)
    return len(replaced)


def fake_quantize_embeddings(model: nn.Module, scheme_of: Callable[[str], Scheme | None]) -> int:
    """Replace each nn.Embedding by a FakeQuantEmbedding, after `fake_quantize_linears`: a tied head is found there.

    scheme_of  an embedding's name to its scheme; None leaves it as it is
    raises     ValueError naming the embedding whose dimension the groups do not divide, or whose tied head has another
               scheme
    """
    heads = {id(layer.weight): layer for layer in model.modules() if isinstance(layer, FakeQuantLinear)}
    replaced: dict[str, FakeQuantEmbedding] = {}
    for name, layer in model.named_modules():
        scheme = scheme_of(name) if type(layer) is nn.Embedding else None
        if scheme is None:
            continue
        if layer.max_norm is not None or layer.scale_grad_by_freq:
            raise ValueError(f"{name} has max_norm or scale_grad_by_freq, and a table of codes has neither")
        options = {"padding_idx": layer.padding_idx, "head": heads.get(id(layer.weight))}
        try:
            replaced[name] = FakeQuantEmbedding(layer.weight, scheme, **options).train(layer.training)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for name, layer in replaced.items():
        _put(model, name, layer)
    return len(replaced)


def fake_quantize_kv_cache(model: nn.Module, enabled: bool) -> int:
    """Whether attention reads keys and values as an INT8 cache gives them back; returns in how many layers.

    The fused decoder does it (trainer/fused_decoder.py); transformers' own modules keep 16-bit keys and values, so turn
    it on when both have been compared, such as at the start step.
    """
    blocks = [block for block in model.modules() if hasattr(block, "k_proj") and hasattr(block, "v_proj")]
    for block in blocks:
        block.int8_kv_cache = enabled
    return len(blocks)


def head_operands(head: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """What a loss over an output head multiplies: its input and weight, rounded if the head is.

    hidden_states  [N, hidden_size]
    returns        [N, hidden_size] and [vocab_size, hidden_size], with their gradients
    """
    if isinstance(head, FakeQuantLinear):
        return head.rounded_input(hidden_states), head.multiplied_weight(hidden_states.dtype)
    if not hasattr(type(head), "quantized"):
        return hidden_states, head.weight
    rounded = head.rounded_input(hidden_states) if hasattr(head, "rounded_input") else hidden_states
    return rounded, head.quantized.dequantize(hidden_states.dtype)


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def fake_quant_layers(model: nn.Module) -> Iterator[tuple[str, FakeQuantWeight]]:
    """The fake-quantized layers of a model by name, in the model's order."""
    for name, layer in model.named_modules():
        if isinstance(layer, FakeQuantWeight):
            yield name, layer


def set_rounding(model: nn.Module, *, amount: float, seed: int, step: int) -> None:
    """Stochastic rounding of the coming step: how much, and draws that only (seed, step, layer) decide.

    amount  0..1; 0 is the nearest code, and the hard choice of soft rounding
    """
    weights: dict[int, int] = {}  # a tied weight is rounded once
    for _, layer in fake_quant_layers(model):
        index = weights.setdefault(id(layer.weight), len(weights))
        layer.rounding_amount, layer.rounding_seed = amount, rounding_seed(seed, step, index)


def commit_observers(model: nn.Module) -> None:
    """Between two steps: what the last one has shown becomes the range, over all processes (see observers.py)."""
    for _, layer in fake_quant_layers(model):
        if isinstance(layer, FakeQuantLinear) and layer.observer is not None and layer.observing:
            layer.observer.commit()
            if bool(layer.observer.range > 0):
                layer.set_input_scale(layer.observer.scale())
