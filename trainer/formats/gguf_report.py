"""What is said of a GGUF file that was written: types, what rounding lost, what llama.cpp does differently."""

from dataclasses import dataclass, field
from pathlib import Path

from trainer.formats.gguf_names import kind_of


@dataclass(frozen=True, slots=True)
class TensorReport:
    """A matrix of the file.

    name      in the file; layer: Hugging Face's name
    wanted    the type that was asked for; got: the one that it has
    reason    why got is another one, or why codes were not taken over
    """

    name: str
    layer: str
    wanted: str
    got: str
    num_weights: int
    reason: str = ""


@dataclass(slots=True)
class GgufReport:
    """What was written.

    tensors  the matrices, in the file's order
    errors   kind of tensor (`attn_q`, `token_embd`) -> |w' - w| / |w| over all layers, where weights were rounded
    notes    what llama.cpp does differently
    """

    path: Path
    gguf_type: str
    pre: str
    tensors: list[TensorReport] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def num_weights(self) -> int:
        """Weights in matrices."""
        return sum(tensor.num_weights for tensor in self.tensors)

    @property
    def fallbacks(self) -> list[TensorReport]:
        """Matrices that have another type than was asked for."""
        return [tensor for tensor in self.tensors if tensor.wanted != tensor.got]

    @property
    def fallback_share(self) -> float:
        """Their share of the weights."""
        return sum(tensor.num_weights for tensor in self.fallbacks) / max(1, self.num_weights)

    @property
    def bits_per_weight(self) -> float:
        """Of the whole file, metadata included."""
        return 8 * self.path.stat().st_size / max(1, self.num_weights)

    def lines(self) -> list[str]:
        """For a log or a model card."""
        lines = [
            f"{self.path.name}: {self.gguf_type}, {self.path.stat().st_size / 1e6:.1f} MB, "
            f"{self.bits_per_weight:.2f} bits a weight, tokenizer {self.pre}"
        ]
        changes: dict[tuple[str, str, str, str], int] = {}
        for tensor in self.fallbacks:
            key = kind_of(tensor.name), tensor.wanted, tensor.got, tensor.reason
            changes[key] = changes.get(key, 0) + tensor.num_weights
        for (kind, wanted, got, reason), num_weights in changes.items():
            share = 100 * num_weights / self.num_weights
            lines.append(f"{kind}: {got} instead of {wanted}, {share:.1f} % of the weights ({reason})")
        lines += [f"{kind}: relative error {error:.2g}" for kind, error in self.errors.items()]
        return lines + self.notes
