"""`lora.*` and `loftq.*`: the adapter and where it starts."""

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trainer.config.errors import require


class LoraInit(StrEnum):
    default = "default"
    pissa = "pissa"
    olora = "olora"
    eva = "eva"


@dataclass
class LoraConfig:
    rank: int = 16
    """Rank of the update B A."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank, or alpha / sqrt(rank) with use_rslora."""
    dropout: float = 0.0
    """Dropout on the adapter's input."""
    target_modules: Any = "all-linear"
    """all-linear (each linear layer but the head), a list of module names such as `[q_proj,v_proj]`, or a regular
    expression for whole names, such as `'model.layers.[0-7].mlp.*_proj'` with `.*` for the star."""
    layers: list[int] | None = None
    """Numbers of the layers that get an adapter, from 0; null for all."""
    rank_pattern: list[str] = field(default_factory=list)
    """Other ranks by the ends of layers' names, regular expressions, such as `[down_proj:32,layers.0.*:8]`; the first
    that matches counts."""
    alpha_pattern: list[str] = field(default_factory=list)
    """Other alphas, in the same way."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole and saved with the adapter, such as `[embed_tokens]` or `[norm]`."""
    use_rslora: bool = False
    """rsLoRA (arXiv:2312.03732): scale by alpha / sqrt(rank), so that the update does not shrink as the rank grows."""
    use_dora: bool = False
    """DoRA (arXiv:2402.09353): also train the length of each row of the weight."""
    init: LoraInit = LoraInit.default
    """Where the adapter starts: default (A random, B zero), pissa (arXiv:2404.02948: the weight's largest singular
    parts, the base keeps the rest), olora (arXiv:2406.01775: its QR factors), eva (arXiv:2410.07170: A from the
    activations of training rows, ranks where they explain most)."""
    eva_rho: float = 2.0
    """eva: a layer gets at most this multiple of the rank; 1 gives each layer its own rank."""

    def __post_init__(self) -> None:
        require(self.rank > 0, f"lora.rank={self.rank}; give at least 1")
        require(0 < self.alpha < math.inf, f"lora.alpha={self.alpha}; give a number above 0")
        require(0 <= self.dropout < 1, f"lora.dropout={self.dropout}; give a number in [0, 1)")
        self._require_targets()
        for key in ("rank_pattern", "alpha_pattern"):
            self._require_pattern(key, r"\d+" if key == "rank_pattern" else r"\d+(\.\d+)?")
        both = set(self.modules_to_save) & set(self.target_modules if isinstance(self.target_modules, list) else [])
        require(not both, f"lora.modules_to_save and lora.target_modules both have {sorted(both)}; choose one for each")
        require(1 <= self.eva_rho < math.inf, f"lora.eva_rho={self.eva_rho}; give a number of at least 1")
        require(
            self.eva_rho == 2.0 or self.init is LoraInit.eva,
            f"lora.eva_rho={self.eva_rho} has no effect with lora.init={self.init.value}; use lora.init=eva",
        )

    @property
    def ranks(self) -> dict[str, int]:
        """rank_pattern as a mapping, in its order."""
        return {pattern: int(value) for pattern, value in _split(self.rank_pattern)}

    @property
    def alphas(self) -> dict[str, float]:
        """alpha_pattern as a mapping, in its order."""
        return {pattern: float(value) for pattern, value in _split(self.alpha_pattern)}

    def _require_pattern(self, key: str, number: str) -> None:
        for item, (pattern, value) in zip(getattr(self, key), _split(getattr(self, key)), strict=True):
            require(
                bool(pattern) and _is_regex(pattern) and re.fullmatch(number, value) and float(value) > 0,
                f"lora.{key} has {item!r}; give the end of layers' names, a regular expression, and a number above 0, "
                "such as down_proj:32",
            )

    def _require_targets(self) -> None:
        """target_modules becomes all-linear, a list of names or a pattern; layers fit it."""
        targets = self.target_modules
        if isinstance(targets, str) and targets != "all-linear" and re.fullmatch(r"\w+", targets):
            self.target_modules = targets = [targets]
        is_names = isinstance(targets, list) and bool(targets) and all(isinstance(n, str) and n for n in targets)
        require(
            is_names or (isinstance(targets, str) and bool(targets) and _is_regex(targets)),
            f"lora.target_modules={targets}; use all-linear, a list of names such as [q_proj,v_proj], or a regular "
            "expression that matches whole names",
        )
        if self.layers is not None:
            require(
                bool(self.layers) and all(index >= 0 for index in self.layers),
                f"lora.layers={self.layers}; give numbers from 0, such as [0,1], or null for all layers",
            )
            require(
                isinstance(targets, list) or targets == "all-linear",
                f"lora.layers={self.layers} cannot be combined with the pattern lora.target_modules={targets}; write "
                "the numbers into the pattern",
            )


def _split(patterns: list[str]) -> list[tuple[str, str]]:
    """`pattern:value` at the last colon."""
    return [(item.rpartition(":")[0], item.rpartition(":")[2]) for item in patterns]


def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


@dataclass
class LoftqConfig:
    iterations: int = 0
    """LoftQ (arXiv:2310.08659): start from codes and adapter that together are close to the 16-bit weights, after this
    many rounds of quantizing and fitting; the best one is kept. 1 leaves the base's codes as they are; 0 is off."""
    calibration_rows: int = 0
    """Training rows that weight the error by each layer's inputs; 0 for unweighted."""
    fallback: bool = True
    """Start the adapter of a layer plain where LoftQ does not lower the error; false stops the run there."""

    def __post_init__(self) -> None:
        for name in ("iterations", "calibration_rows"):
            require(getattr(self, name) >= 0, f"loftq.{name}={getattr(self, name)}; give 0 or more")
        if self.iterations == 0:
            key = f"loftq.calibration_rows={self.calibration_rows}"
            require(not self.calibration_rows, f"{key} has no effect with loftq.iterations=0; use conf=loftq")
            require(self.fallback, "loftq.fallback=false has no effect with loftq.iterations=0; use conf=loftq")
