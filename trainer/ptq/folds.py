"""Folds: channels of a projection's input are made smaller, its weights larger, and the function stays.

    y = W x = (W diag(s)) (x / s)        what comes before gives x / s: a norm's weight, or rows of a projection

AWQ chooses s so that weights of large inputs lose less (arXiv:2306.00978, section 3.2), SmoothQuant so that inputs and
weights are equally hard to round (arXiv:2211.10438, section 4). Where the factor goes, by stage of a block:

    q, k, v    the norm before attention
    output     rows of v; query heads that share a key-value head share its factors
    gate, up   the norm before the MLP
    down       rows of up, which SwiGLU multiplies in

The surprising thing: a norm's weight is stored in 16 bits, so the factor is what its rounding leaves: then W diag(s) is
exact in float32 and nothing is lost but by the codes.
"""

import torch
from torch import Tensor, nn

from trainer.fused_decoder import STAGES

MIN_FACTOR = 1e-4
NORMS = {0: "input_layernorm", 2: "post_attention_layernorm"}
ROWS = {1: "self_attn.v_proj", 3: "mlp.up_proj"}


class BlockWeights:
    """The projections of a block in float32 while their codes are chosen, beside the modules that compute.

    weights  name inside the block -> [out_features, in_features] float32
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        names = [name for names in STAGES for name in names]
        self.weights = {name: block.get_submodule(name).weight.detach().float() for name in names}

    @torch.no_grad()
    def fold(self, stage: int, factor: Tensor) -> Tensor:
        """Divide the inputs of a stage by factor [in_features] and multiply its weights, modules included.

        returns  the factor as it was applied, [in_features] float32
        """
        factor = self.usable(stage, factor)
        if stage in NORMS:
            norm = self.block.get_submodule(NORMS[stage])
            old = norm.weight.detach().float()
            new = (old / factor).to(norm.weight.dtype)
            usable = (new != 0) & (old != 0)
            factor = torch.where(usable, old / new.float(), 1.0)
            norm.weight = nn.Parameter(torch.where(usable, new, norm.weight), requires_grad=False)
        else:
            self._divide_rows(ROWS[stage], self._of_rows(stage, factor))
        for name in STAGES[stage]:
            self._set(name, self.weights[name] * factor)
        return factor

    def usable(self, stage: int, factor: Tensor) -> Tensor:
        """The factor, finite, positive, and the same where channels share a row of what comes before."""
        factor = torch.nan_to_num(factor.float(), nan=1.0, posinf=1.0, neginf=1.0).clamp(min=MIN_FACTOR)
        if stage != 1:
            return factor
        shared = self._by_kv_head(factor).log().mean(1, keepdim=True).exp()
        return shared.expand_as(self._by_kv_head(factor)).reshape(-1)

    def _by_kv_head(self, values: Tensor) -> Tensor:
        """[num_heads * head_dim] -> [num_kv_heads, query heads of each, head_dim]"""
        attention = self.block.self_attn
        num_kv_heads = attention.config.num_key_value_heads
        return values.view(num_kv_heads, -1, attention.head_dim)

    def _of_rows(self, stage: int, factor: Tensor) -> Tensor:
        """The factor of each row of what comes before."""
        return self._by_kv_head(factor)[:, 0].reshape(-1) if stage == 1 else factor

    def _divide_rows(self, name: str, factor: Tensor) -> None:
        self._set(name, self.weights[name] / factor[:, None])
        bias = self.block.get_submodule(name).bias
        if bias is not None:
            bias.data = (bias.float() / factor).to(bias.dtype)

    def _set(self, name: str, weight: Tensor) -> None:
        self.weights[name] = weight
        module = self.block.get_submodule(name)
        module.weight = nn.Parameter(weight.to(module.weight.dtype), requires_grad=False)
