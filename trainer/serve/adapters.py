"""Adapters: many LoRA updates over one base, loaded and unloaded while requests run.

An adapter is known by the hash of its content: KV blocks are shared under that hash and never under a name or a path,
so an adapter that is loaded again with other weights can never meet its old keys and values. Unloading takes the name
away at once and the slot when the last request that uses it has ended.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trainer.config.errors import UserError, require
from trainer.export.adapter import AdapterFactors, check_base, read_adapter_factors, read_identity
from trainer.kernels.lora_rows import MAX_RANK, LoraTable
from trainer.lora import LoraLinear
from trainer.serve.decoder import Decoder, Linear
from trainer.serve.tensor_parallel import TensorParallel
from trainer.vocabulary import check_tokenizer


@dataclass(eq=False, slots=True)
class Adapter:
    """A loaded adapter. `slot` is its place in each layer's table."""

    name: str
    path: str
    factors: AdapterFactors
    slot: int
    registry: "AdapterRegistry"
    num_requests: int = 0
    unloaded: bool = False

    @property
    def sha256(self) -> str:
        return self.factors.sha256

    def release(self) -> None:
        """A request has ended; the last one of an unloaded adapter frees the slot."""
        self.num_requests -= 1
        if self.unloaded and self.num_requests == 0:
            self.registry.clear(self)


@dataclass(eq=False)
class AdapterRegistry:
    """The adapters of one decoder, by name, and the free slots."""

    decoder: Decoder
    max_loras: int
    base_sha256: str
    parallel: TensorParallel = TensorParallel()
    by_name: dict[str, Adapter] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None
    """What requests are tokenized with; an adapter that was trained with another one is refused."""

    def __post_init__(self) -> None:
        self._free_slots = list(reversed(range(self.max_loras)))
        self._linears: dict[str, tuple[Linear, int]] = {}
        for layer in self.decoder.layers:
            for linear in layer.linears:
                sizes = list(linear.parts.values())
                dtype, device = self.decoder.config.dtype, self.decoder.device
                linear.lora = LoraTable(sizes, linear.weight.in_features, self.max_loras, dtype, device)
                self._linears |= {part: (linear, number) for number, part in enumerate(linear.parts)}

    def read(self, name: str, folder: str) -> AdapterFactors:
        """Read and check an adapter; may run in any thread, for it changes nothing.

        raises  UserError if it is no LoRA adapter of this base
        """
        require(bool(re.fullmatch(r"[\w.:/@-]{1,200}", name)), f"lora_name={name!r}; use letters, digits and ._:/@-")
        path = Path(folder).expanduser()
        require(path.is_dir(), f"lora_path={folder} is not a folder; give one that holds adapter_config.json")
        check_base(path, self.base_sha256)
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer, read_identity(path), folder)
        factors = read_adapter_factors(path)
        self._check(factors, folder)
        return factors

    def install(self, name: str, path: str, factors: AdapterFactors) -> Adapter:
        """Give the adapter a slot; runs between steps.

        raises  UserError if the name is taken, no slot is free, or the factors do not fit
        """
        self._check(factors, path)
        require(name not in self.by_name, f"lora_name={name} is loaded already; unload it first, or use another name")
        require(
            bool(self._free_slots),
            f"max_loras={self.max_loras} adapters are loaded, or unloaded and still in use; unload one, or start the "
            "server with a larger max_loras",
        )
        slot = self._free_slots[-1]
        self.write(slot, factors.factors)
        self._free_slots.pop()
        self.by_name[name] = Adapter(name, path, factors, slot, self)
        return self.by_name[name]

    def unload(self, name: str) -> None:
        """Take the name away; requests that use the adapter finish with it.

        raises  UserError if no adapter has this name
        """
        adapter = self.by_name.pop(name, None)
        if adapter is None:
            raise UserError(f"lora_name={name} is not loaded; loaded are: {', '.join(self.by_name) or 'none'}")
        adapter.unloaded = True
        if adapter.num_requests == 0:
            self.clear(adapter)

    def clear(self, adapter: Adapter) -> None:
        self.write(adapter.slot, {})
        self._free_slots.append(adapter.slot)

    def replace(self, adapter: Adapter, factors: AdapterFactors) -> None:
        """Put new factors into a slot that no request uses: a live adapter that was trained further.

        raises  UserError if a request uses it, or if the factors do not fit
        """
        num = adapter.num_requests
        require(num == 0, f"{num} requests use the adapter {adapter.name}; let them finish, then replace it")
        self._check(factors, adapter.path)
        adapter.factors = factors
        self.write(adapter.slot, factors.factors)

    def write(self, slot: int, factors: dict[str, tuple[Tensor, Tensor, float]]) -> None:
        """Put factors into a slot, on every process; without any the slot is empty."""
        if self.parallel.rank == 0:
            self.parallel.send(("adapter", slot, factors))
        for module, (linear, part) in self._linears.items():
            lora_A, lora_B, scaling = factors.get(module, (None, None, 1.0))
            if lora_A is not None and self.parallel.size > 1:
                if linear.partial is not None:
                    lora_A = lora_A[:, self.parallel.slice(lora_A.shape[1])]
                else:
                    lora_B = lora_B[self.parallel.slice(lora_B.shape[0])]
            linear.lora.set(slot, part, lora_A, lora_B, scaling)

    def _check(self, factors: AdapterFactors, source: str) -> None:
        for ids, rows in (pair for module, pair in factors.token_rows.items() if module == "embed_tokens"):
            embedding = self.decoder.embedding
            known = max(ids) < len(embedding) and torch.equal(embedding[ids], rows.to(embedding))
            require(
                known,
                f"{source} brings trained rows of the tokens {ids}, which the running model does not have; start the "
                f"server with model={source}, or merge the adapter and serve the merged model",
            )
        for module, (lora_A, lora_B, _) in factors.factors.items():
            if module not in self._linears:
                raise UserError(
                    f"{source} adapts {module}, which is no linear layer inside this model's decoder layers; it has "
                    f"layers 0..{len(self.decoder.layers) - 1} with "
                    f"{', '.join(sorted({name.rpartition('.')[2] for name in self._linears}))}"
                )
            wanted = self._full_shape(module)
            got = lora_B.shape[0], lora_A.shape[1]
            require(
                got == wanted,
                f"{source}: the update of {module} is {got[0]} x {got[1]}, the layer {wanted[0]} x {wanted[1]}; the "
                "adapter belongs to another base model",
            )
            rank, rank_B = lora_A.shape[0], lora_B.shape[1]
            require(rank == rank_B, f"{source}: {module} has lora_A of rank {rank} and lora_B of rank {rank_B}")
            require(rank <= MAX_RANK, f"{source}: {module} has rank {rank}; the server takes up to {MAX_RANK}")
            finite = all(bool(factor.isfinite().all()) for factor in (lora_A, lora_B))
            require(finite, f"{source}: {module} has factors that are inf or nan; its training diverged")

    def _full_shape(self, module: str) -> tuple[int, int]:
        """[out_features, in_features] of a layer over all processes."""
        linear, part = self._linears[module]
        out_features, in_features = list(linear.parts.values())[part], linear.weight.in_features
        if linear.partial is not None:
            return out_features, in_features * self.parallel.size
        return out_features * self.parallel.size, in_features


def factors_from_module(model: nn.Module) -> AdapterFactors | None:
    """The active adapter of a PEFT model in memory, or None if it has none, or has it merged or switched off.

    raises  UserError if several adapters are active on a layer, or if one does more than scaling * B A
    """
    prompt_learning = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    require(not prompt_learning, "adapters that learn a prompt are not served; train LoRA")
    factors = {}
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            continue
        active = _active_adapters(module)
        if not active:
            continue
        require(len(active) == 1, f"{name} has the active adapters {active}; activate one")
        _check_plain_lora(name, module, active[0])
        ours = isinstance(module, LoraLinear)  # whose update may have a frozen part
        plain = (module.lora_A[active[0]].weight, module.lora_B[active[0]].weight)
        weights = module.factors(active[0]) if ours else plain
        name = name.removeprefix("base_model.model.").removeprefix("model.")
        factors[name] = (*(weight.detach() for weight in weights), module.scaling[active[0]])
    return AdapterFactors.of(factors) if factors else None


def _active_adapters(module: BaseTunerLayer | AuxiliaryTrainingWrapper) -> list[str]:
    """The adapters that change what a layer computes; a merged one lies in the base weight and is read with it."""
    if module.disable_adapters or getattr(module, "merged", False):
        return []
    return [adapter for adapter in module.active_adapters if adapter in module._get_available_adapters()]


def _check_plain_lora(name: str, module: nn.Module, adapter: str) -> None:
    plain = isinstance(module, LoraLayer) and adapter in module.lora_A
    require(plain, f"{name} is adapted by {type(module).__name__}; the server computes LoRA of linear layers only")
    require(adapter not in module.lora_variant, f"{name} has a LoRA variant, which is not served; use plain LoRA")
    require(not module.lora_bias[adapter], f"{name} has lora_bias, which is not served; train with lora_bias=False")
