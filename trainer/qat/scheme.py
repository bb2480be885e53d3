"""Scheme: how one layer is quantized while it is trained, and what is shipped of it.

A scheme has the mapping of the weight, the one that export and server use (trainer/quantizer.py or, for small floats,
kernels/float_grids.py), the rounding of the inputs, and what is trained beside the weight. `Scheme.named` gives those
that people know by name:

    name         weight                               input
    int4         INT4 in groups                       16 bits
    int4_int8    INT4 in groups                       INT8, one scale a token
    int8         INT8, one scale a row                INT8, one scale a token
    int8_static  INT8, one scale a row                INT8, one scale a layer, from observed ranges
    nf4          NF4 in blocks, double quantization   16 bits
    fp8          e4m3, one scale a row                e4m3, one scale a token
    mxfp4        e2m1 in blocks of 32, e8m0 scales    16 bits
    nvfp4        e2m1 in blocks of 16, e4m3 scales    16 bits
"""

from dataclasses import dataclass
from enum import StrEnum

import torch

from trainer.kernels.fake_quant import Grid
from trainer.kernels.float_grids import FloatGrid
from trainer.qat.observers import ObserverKind, ObserverSettings
from trainer.quantizer import WHOLE_ROW, Quantizer

NAMES = ("int4", "int4_int8", "int8", "int8_static", "int8_weight_only", "nf4", "fp8", "mxfp4", "nvfp4")


class Rounding(StrEnum):
    """How a weight becomes the code beside it, in training; what ships is always one code (see rounding.py)."""

    nearest = "nearest"
    stochastic = "stochastic"
    soft = "soft"


class ScaleInit(StrEnum):
    """Where learned scales start: at the largest weight, or where the squared error of the group is smallest."""

    minmax = "minmax"
    mse = "mse"


@dataclass(frozen=True, slots=True)
class Activations:
    """How a layer rounds its input.

    grid      Grid.int8() or FloatGrid("fp8"): the values
    observer  None: one scale a token, from the token. Else one scale a layer, from the ranges that were observed
    raises    ValueError if the grid has groups, or static scales are asked of floats
    """

    grid: Grid | FloatGrid
    observer: ObserverSettings | None = None

    def __post_init__(self) -> None:
        if self.grid not in (Grid.int8(), FloatGrid("fp8")):
            raise ValueError(f"activations are rounded to {self.grid}; use Grid.int8() or FloatGrid('fp8')")
        if self.observer is not None and self.grid != Grid.int8():
            raise ValueError(f"static scales with {self.grid}; use Grid.int8(), or observer=None")

    @property
    def static(self) -> bool:
        """Whether the scale is a layer's, and not a token's."""
        return self.observer is not None


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a layer is quantized; two equal schemes give the same function of the same parameters.

    weight        the mapping between weights and codes
    activations   None: inputs stay as they are
    integer       multiply codes in integers, as a server with INT8 activations does, bit for bit
    learn_scales  scales (and zero points) are trained: LSQ, arXiv:1902.08153, LSQ+, arXiv:2004.09576; a static scale of
                  the input too
    scale_init    where learned scales start
    rounding      how codes are chosen while training
    raises        ValueError naming the combination that has no meaning
    """

    weight: Quantizer | FloatGrid
    activations: Activations | None = None
    integer: bool = False
    learn_scales: bool = False
    rounding: Rounding = Rounding.nearest
    scale_init: ScaleInit = ScaleInit.minmax

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounding", Rounding(self.rounding))
        object.__setattr__(self, "scale_init", ScaleInit(self.scale_init))
        if self.learn_scales and not self.has_integer_codes:
            raise ValueError(
                f"learn_scales=true with {self.weight_name}, whose scales are functions of the weight; use "
                "learn_scales=false, int4 or int8"
            )
        if self.rounding is not Rounding.nearest and not self.has_integer_codes:
            raise ValueError(
                f"rounding={self.rounding} with {self.weight_name}; only steps of one size can be rounded up or down: "
                "use rounding=nearest, int4 or int8"
            )
        if self.learn_scales and self.rounding is not Rounding.nearest:
            raise ValueError(
                f"rounding={self.rounding} with learn_scales=true: a code would change with its scale and with its "
                "rounding at once; use rounding=nearest or learn_scales=false"
            )
        if self.scale_init is not ScaleInit.minmax and not self.learn_scales:
            raise ValueError(f"scale_init={self.scale_init} has no effect with learn_scales=false; leave it out")
        int8_inputs = self.activations is not None and self.activations.grid == Grid.int8()
        if self.integer and not (int8_inputs and self.has_integer_codes):
            raise ValueError(
                f"integer=true with weights {self.weight_name} and activations {self.activations}; integer products "
                "are for int4 or int8 weights with INT8 activations (int4_int8, int8, int8_static)"
            )

    @property
    def has_integer_codes(self) -> bool:
        """INT4 or INT8, and not a table of floats."""
        return isinstance(self.weight, Quantizer) and self.weight.codebook in ("int4", "int8")

    @property
    def weight_name(self) -> str:
        """int4, int8, nf4, fp8, ..."""
        return self.weight.format if isinstance(self.weight, FloatGrid) else self.weight.codebook

    @property
    def function(self) -> str:
        """What a layer computes from its tensors, in words that are part of a base's hash; how it is trained is not."""
        inputs = self.activations
        kind = "as they are" if inputs is None else f"{inputs.grid} {'static' if inputs.static else 'dynamic'}"
        return f"weights {self.weight}, inputs {kind}, integer {self.integer}"

    def check(self, in_features: int) -> None:
        """Whether a layer with so many inputs can have this scheme.

        raises  ValueError naming the group sizes that fit
        """
        self.weight.span(in_features)

    @classmethod
    def named(
        cls,
        name: str,
        *,
        group_size: int | None = None,
        symmetric: bool | None = None,
        divisor: float | None = None,
        scale_dtype: str | None = None,
        block_size: int | None = None,
        double_quant: bool | None = None,
        observer: ObserverSettings | ObserverKind | str | None = None,
        integer: bool | None = None,
        learn_scales: bool = False,
        scale_init: ScaleInit | str = ScaleInit.minmax,
        rounding: Rounding | str = Rounding.nearest,
    ) -> "Scheme":
        """A scheme of `NAMES`; None is the default of its quantizer.

        group_size, symmetric, divisor, scale_dtype   int4, int4_int8; all int8 ones: group_size and scale_dtype
        block_size, double_quant                      nf4
        observer   int8_static: its settings, or just a kind; None: a moving average
        integer    None: true where the server multiplies integers: int4_int8, int8, int8_static
        raises     ValueError for another name, or a setting that this scheme does not have
        """
        if name not in NAMES:
            raise ValueError(f"scheme={name}; use one of {', '.join(NAMES)}")
        static = name == "int8_static"
        if observer is not None and not static:
            raise ValueError(f"observer={observer} has no effect with scheme={name}; use scheme=int8_static")
        settings = {
            **{"group_size": group_size, "symmetric": symmetric, "divisor": divisor, "scale_dtype": scale_dtype},
            **{"block_size": block_size, "double_quant": double_quant},
        }
        if name in ("fp8", "mxfp4", "nvfp4"):
            given = [f"{key}={value}" for key, value in settings.items() if value is not None]
            if given:
                raise ValueError(f"{', '.join(given)} with scheme={name}, whose format says it all; leave it out")
            weight: Quantizer | FloatGrid = FloatGrid(name)
        else:
            weight = Quantizer("nf4" if name == "nf4" else name[:4], **settings)
        activations = None
        if name == "fp8":
            activations = Activations(FloatGrid("fp8"))
        elif name in ("int4_int8", "int8", "int8_static"):
            activations = Activations(Grid.int8(), _observer(observer) if static else None)
        integer = name in ("int4_int8", "int8", "int8_static") if integer is None else integer
        return cls(weight, activations, integer, learn_scales, Rounding(rounding), ScaleInit(scale_init))

    @property
    def settings(self) -> dict[str, object]:
        """What a folder with packed weights says of a layer; plain values, without None."""
        weight = {"format": self.weight.format} if isinstance(self.weight, FloatGrid) else self.weight.settings
        inputs = self.activations
        if inputs is None:
            return {"weight": weight}
        name = inputs.grid.format if isinstance(inputs.grid, FloatGrid) else "int8"
        return {"weight": weight, "inputs": name, "static": inputs.static, "integer": self.integer}

    @classmethod
    def from_settings(cls, settings: dict[str, object]) -> "Scheme":
        """The scheme of `settings`, as it is used after training.

        raises  ValueError or TypeError naming what is not known
        """
        weight = settings["weight"]
        quantizer = FloatGrid(**weight) if "format" in weight else Quantizer(**weight)
        if "inputs" not in settings:
            return cls(quantizer)
        grid = Grid.int8() if settings["inputs"] == "int8" else FloatGrid(settings["inputs"])
        observer = ObserverSettings() if settings["static"] else None
        return cls(quantizer, Activations(grid, observer), settings["integer"])


def _observer(observer: ObserverSettings | ObserverKind | str | None) -> ObserverSettings:
    if isinstance(observer, ObserverSettings):
        return observer
    return ObserverSettings() if observer is None else ObserverSettings(ObserverKind(observer))


def grid_of(quantizer: Quantizer) -> Grid:
    """The grid of an int4 or int8 quantizer, as kernels/fake_quant.py takes it."""
    group_size = None if quantizer.group_size == WHOLE_ROW else quantizer.group_size
    options = {"group_size": group_size, "scale_dtype": getattr(torch, quantizer.scale_dtype)}
    if quantizer.codebook == "int8":
        return Grid.int8(**options)
    if quantizer.symmetric:
        options["divisor"] = quantizer.divisor
    return Grid.int4(symmetric=quantizer.symmetric, **options)
