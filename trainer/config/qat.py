"""`qat.*`: quantization-aware training: which layers compute in which few-bit scheme, and from which step on."""

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from trainer.config.errors import require


class SchemeName(StrEnum):
    none = "none"
    int4 = "int4"
    int4_int8 = "int4_int8"
    int8 = "int8"
    int8_static = "int8_static"
    int8_weight_only = "int8_weight_only"
    nf4 = "nf4"
    fp8 = "fp8"
    mxfp4 = "mxfp4"
    nvfp4 = "nvfp4"


class Observer(StrEnum):
    minmax = "minmax"
    moving_average = "moving_average"
    percentile = "percentile"
    mse = "mse"


class ScaleStart(StrEnum):
    minmax = "minmax"
    mse = "mse"


class RoundingName(StrEnum):
    nearest = "nearest"
    stochastic = "stochastic"
    soft = "soft"


@dataclass
class QatConfig:
    scheme: SchemeName = SchemeName.none
    """What the linear layers compute while they are trained, and after export: int4 (weights), int4_int8 (INT4 weights,
    INT8 activations with a scale a token), int8 (both in 8 bits), int8_static (activations in fixed ranges, observed in
    training), int8_weight_only, nf4, fp8, mxfp4, nvfp4; none trains in 16 bits. `conf=qat` sets it."""
    schemes: list[str] = field(default_factory=list)
    """Other schemes by the ends of layers' names, shell patterns, such as `['lm_head:int8','layers.0.*:none']`; the
    first that matches counts. Output head and embeddings stay in 16 bits unless a pattern names them."""
    group_size: int | None = None
    """int4, int4_int8: input features that share one scale: a multiple of 32 that divides the layers, or -1 for a row;
    null for 32."""
    symmetric: bool | None = None
    """int4, int4_int8: no zero point; null for true."""
    start: float = 0.0
    """The step from which weights are quantized, or with a number below 1 the share of the run that trains in 16 bits
    before that."""
    learn_scales: bool = False
    """int4, int4_int8, int8: scales (and zero points) are trained too (LSQ, arXiv:1902.08153; LSQ+, arXiv:2004.09576),
    not computed from the weights."""
    scale_init: ScaleStart = ScaleStart.minmax
    """Where learned scales start: minmax (nothing is clipped) or mse (the smallest error of the weights)."""
    rounding: RoundingName = RoundingName.nearest
    """nearest; stochastic (up or down by chance, less and less); soft (AdaRound, arXiv:2004.10568: weights are
    frozen, and whether each goes up or down is trained)."""
    observer: Observer | None = None
    """int8_static: how ranges of activations are chosen: minmax, moving_average, percentile or mse; null for
    moving_average."""
    freeze_observers: float | None = None
    """int8_static: the step, or share of the run, from which ranges stay as they are; null for half of the run."""
    calibration_rows: int | None = None
    """int8_static: training rows from which ranges start; null for 32."""
    kv_cache: bool = False
    """Attention reads keys and values as an INT8 cache gives them back, and the server has one for this model."""
    compare_tokens: int = 256
    """Held-out tokens on which the trained, the exported and the served model are compared at the end of the run."""

    def __post_init__(self) -> None:
        self.scheme, self.rounding = SchemeName(self.scheme), RoundingName(self.rounding)  # from Python, plain text
        self.observer = None if self.observer is None else Observer(self.observer)
        self.scale_init = ScaleStart(self.scale_init)
        self._require_patterns()
        size = self.group_size
        require(
            size is None or size == -1 or (size > 0 and size % 32 == 0),
            f"qat.group_size={size}; use -1 (one scale a row) or a multiple of 32 that divides the layers, such as 32, "
            "64 or 128",
        )
        for key in ("start", "freeze_observers"):
            _require_moment(f"qat.{key}", getattr(self, key))
        rows, tokens = self.calibration_rows, self.compare_tokens
        require(rows is None or rows > 0, f"qat.calibration_rows={rows}; give at least 1, or null")
        require(tokens >= 2, f"qat.compare_tokens={tokens}; give at least 2")
        self._require_users()
        require(
            not (self.learn_scales and self.rounding is RoundingName.soft),
            "qat.rounding=soft trains how weights are rounded on fixed scales, and qat.learn_scales=true moves them; "
            "choose one",
        )

        require(
            self.scale_init is ScaleStart.minmax or self.learn_scales,
            f"qat.scale_init={self.scale_init.value} has no effect with qat.learn_scales=false; leave it out",
        )

    @property
    def enabled(self) -> bool:
        """Whether any layer is quantized while it is trained."""
        return any(name is not SchemeName.none for name in self.names)

    @property
    def patterns(self) -> dict[str, SchemeName]:
        """schemes as a mapping, in its order."""
        return {item.rpartition(":")[0]: SchemeName(item.rpartition(":")[2]) for item in self.schemes}

    @property
    def names(self) -> set[SchemeName]:
        """Every scheme that is asked for."""
        return {self.scheme, *self.patterns.values()}

    def require_moments(self, num_steps: int) -> None:
        """The moments of the schedule lie in a run of num_steps.

        raises  UserError naming the one that does not
        """
        for key in ("start", "freeze_observers"):
            moment = getattr(self, key)
            require(
                moment is None or moment_step(moment, num_steps) < num_steps,
                f"qat.{key}={moment or 0:g} is beyond the end of a run of {num_steps} steps; give a step below that, a "
                "share of the run below 1 such as 0.1, or more train.max_steps",
            )

    def _require_patterns(self) -> None:
        accepted = ", ".join(SchemeName)
        for item in self.schemes:
            pattern, _, name = item.rpartition(":")
            require(
                bool(pattern) and name in list(SchemeName),
                f"qat.schemes has {item!r}; give a pattern of the ends of layers' names and a scheme ({accepted}), "
                "such as down_proj:int8",
            )
        patterns = [item.rpartition(":")[0] for item in self.schemes]
        twice = sorted({pattern for pattern in patterns if patterns.count(pattern) > 1})
        require(not twice, f"qat.schemes names {twice} twice; give each pattern once, the first that matches counts")

    def _require_users(self) -> None:
        """A setting that no scheme of this run looks at has its default."""
        defaults = type(self).__dataclass_fields__
        for keys, users in _SETTINGS:
            for key in keys:
                value = getattr(self, key)
                shown = value.value if isinstance(value, Enum) else value
                require(
                    value == defaults[key].default or bool(self.names & set(users)),
                    f"qat.{key}={shown} has no effect with qat.scheme={self.scheme.value} and qat.schemes="
                    f"{self.schemes}; leave it out, or use one of {', '.join(users)}",
                )


_INTEGERS = tuple(name for name in SchemeName if name.startswith("int"))
_SETTINGS = (
    (("group_size", "symmetric"), (SchemeName.int4, SchemeName.int4_int8)),
    (("learn_scales", "scale_init", "rounding"), _INTEGERS),
    (("observer", "freeze_observers", "calibration_rows"), (SchemeName.int8_static,)),
    (("start", "kv_cache", "compare_tokens"), tuple(name for name in SchemeName if name is not SchemeName.none)),
)
"""Settings of QatConfig, and the schemes that have them."""


def _require_moment(key: str, value: float | None) -> None:
    """A whole step from 1 on, or a share of the run."""
    require(
        value is None or (0 <= value < math.inf and (value < 1 or value == int(value))),
        f"{key}={value}; give a whole number of steps, such as 100, or a share of the run below 1, such as 0.1",
    )


def moment_step(moment: float, num_steps: int) -> int:
    """The 0-based step at which a moment of the schedule lies: steps from 1 on, below it a share of num_steps."""
    return int(moment) if moment >= 1 else math.floor(moment * num_steps)
