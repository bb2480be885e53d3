"""`quant.*`: how the frozen base is packed; the settings of `trainer/quantizer.py`."""

from dataclasses import dataclass
from enum import Enum, StrEnum

from trainer.config.errors import require


class Codebook(StrEnum):
    none = "none"
    nf4 = "nf4"
    fp4 = "fp4"
    nf3 = "nf3"
    nf2 = "nf2"
    int4 = "int4"
    int8 = "int8"


class ScaleDType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class MixedBits(StrEnum):
    first = "first"
    error = "error"


@dataclass
class QuantConfig:
    codebook: Codebook = Codebook.nf4
    """What packed weights can be: nf4 (arXiv:2305.14314), fp4 (bitsandbytes' floats), nf3, nf2 (NormalFloats of 3 and 2
    bits, for LoftQ), int4, int8 (round to nearest); none leaves the base in the compute dtype."""
    block_size: int | None = None
    """nf4, fp4, nf3, nf2: weights that share one scale; a power of two in 32..4096, null for 64."""
    double_quant: bool | None = None
    """nf4, fp4, nf3, nf2: store each scale in 8 bits too, 0.127 instead of 0.5 bits a weight; null for true."""
    group_size: int | None = None
    """int4, int8: input features that share one scale: a multiple of 32 that divides them, such as 32, 64, 128 or 192,
    or -1 for a row; null for 32 (int4), -1 (int8)."""
    symmetric: bool | None = None
    """int4: no zero point; null for true."""
    divisor: float | None = None
    """int4, symmetric: a scale is the group's largest weight over 7, 7.5 or 8; null for 7."""
    scale_dtype: ScaleDType | None = None
    """int4, int8: float32, bfloat16 or float16, to which scales are rounded (float32 stores them); null for float32."""
    bits_budget: float | None = None
    """Average bits of a code, scales aside, e.g. 2.5: some layers get `codebook`, others `low_codebook`; null for
    `codebook` everywhere."""
    low_codebook: Codebook | None = None
    """With bits_budget: nf2 or nf3, of the layers that get fewer bits; null for nf2."""
    mixed: MixedBits | None = None
    """With bits_budget: who gets more bits: first (layers in the model's order, as in arXiv:2310.08659, section 4) or
    error (layers that gain most by it, for a bit, in relative error); null for first."""

    def __post_init__(self) -> None:
        for names, users in _QUANT_SETTINGS:
            for name in names:
                value = getattr(self, name)
                shown = value.value if isinstance(value, Enum) else value
                require(
                    value is None or self.codebook.value in users,
                    f"quant.{name}={shown} has no effect with quant.codebook={self.codebook.value}; leave it out, or "
                    f"use one of {', '.join(users)}",
                )
        sizes = [2**k for k in range(5, 13)]
        for name, values in (("block_size", sizes), ("divisor", [7, 7.5, 8])):
            value = getattr(self, name)
            require(value is None or value in values, f"quant.{name}={value}; use one of {values}")
        require(
            self.group_size in (None, -1) or (self.group_size > 0 and self.group_size % 32 == 0),
            f"quant.group_size={self.group_size} is no multiple of 32; use 32, 64, 128, or -1 for a row",
        )
        require(
            self.divisor is None or self.symmetric is not False,
            f"quant.divisor={self.divisor} has no effect with quant.symmetric=false; leave it out",
        )
        self._require_budget()

    def _require_budget(self) -> None:
        """The budget lies between the bits of two codebooks."""
        if self.bits_budget is None:
            for name in ("low_codebook", "mixed"):
                value = getattr(self, name)
                require(
                    value is None, f"quant.{name}={value} has no effect without quant.bits_budget; set it, e.g. 2.5"
                )
            return
        low = self.low_codebook or Codebook.nf2
        high_bits, low_bits = (_MIXED_BITS.get(codebook, 0) for codebook in (self.codebook, low))
        require(
            low_bits < high_bits and low in (Codebook.nf2, Codebook.nf3),
            f"quant.bits_budget={self.bits_budget} mixes quant.codebook={self.codebook.value} with "
            f"quant.low_codebook={low.value}; use nf4, fp4 or nf3 with nf2, or nf4 or fp4 with nf3",
        )
        require(
            low_bits <= self.bits_budget <= high_bits,
            f"quant.bits_budget={self.bits_budget} is not between the {low_bits} bits of {low.value} and the "
            f"{high_bits} of {self.codebook.value}; give a number between them, or leave it out",
        )


_BLOCK_CODEBOOKS = ("nf4", "fp4", "nf3", "nf2")
_QUANT_SETTINGS = (
    (("block_size", "double_quant", "bits_budget", "low_codebook", "mixed"), _BLOCK_CODEBOOKS),
    (("group_size", "scale_dtype"), ("int4", "int8")),
    (("symmetric", "divisor"), ("int4",)),
)
"""Settings of QuantConfig, and the codebooks that have them."""
_MIXED_BITS = {Codebook.nf4: 4, Codebook.fp4: 4, Codebook.nf3: 3, Codebook.nf2: 2}
