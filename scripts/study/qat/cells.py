"""What the study of quantization-aware training measures: formats, methods, what merging keeps, time.

The order makes a study that is stopped halfway useful: the formats, every method once, further seeds of the main rows.
"""

from dataclasses import dataclass

from study.cell import Cell, choose

TRAIN_FILE, TEST_FILE = "wikitext2_valid.txt", "wikitext2_test.txt"
MAIN = ("qad_g32", "lora_g32", "blocks_g32")
"""The rows with several seeds."""
LAST = ("qad_int4_int8", "lora_nf4", "blocks_g64")
"""Rows that come after these seeds."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    model: str = "smollm2_135m"
    steps: int = 32
    batch_size: int = 4
    row_len: int = 512
    """Tokens of a training row."""
    eval_rows: int = 8
    """Rows at the end of the training text that no step sees: the run's own held-out loss."""
    block_rows: int = 256
    """Rows that block-wise training sees, those aside included."""
    block_val_rows: int = 16
    windows: int = 24
    """Pieces from the start of the test text, whose first token is no target."""
    window_len: int = 1024
    cost_steps: int = 8
    """Steps of a cost cell; the first two are not timed."""
    groups: tuple[int, int, int] = (32, 64, 192)
    seeds: tuple[int, ...] = (0, 1, 2)
    cells_per_process: int = 1
    """1 gives each cell a process of its own: its peak memory is its own, and nothing of the last cell is left."""


FULL = Sizes()
QUICK = Sizes(
    model="tiny",
    steps=2,
    batch_size=2,
    row_len=64,
    eval_rows=2,
    block_rows=8,
    block_val_rows=2,
    windows=2,
    window_len=64,
    cost_steps=4,
    groups=(32, -1, -1),  # the tiny model has rows of 96 and 160 features
    seeds=(0, 1),
    cells_per_process=32,
)
_TEST = ("model", "windows", "window_len")
_TRAIN = ("model", "batch_size", "row_len", "eval_rows")
_SIZES_OF = {
    "rounded": _TEST,
    "trained": (*_TEST, *_TRAIN, "steps"),
    "blocks": (*_TEST, *_TRAIN, "steps", "block_rows", "block_val_rows"),
    "cost": (*_TRAIN, "cost_steps"),
}
"""The sizes that a kind of cell depends on."""


def formats(sizes: Sizes) -> dict[str, tuple[str, ...]]:
    """Name -> the settings of `qat` of every format that is rounded to without training."""
    first, second, third = sizes.groups
    int4 = ("qat.scheme=int4", f"qat.group_size={first}")
    return {
        "16bit": (),
        "g32": int4,
        "g32_asymmetric": (*int4, "qat.symmetric=false"),
        "g64": ("qat.scheme=int4", f"qat.group_size={second}"),
        "g192": ("qat.scheme=int4", f"qat.group_size={third}"),
        "nf4": ("qat.scheme=nf4",),
        "int4_int8": ("qat.scheme=int4_int8", f"qat.group_size={first}"),
        "int8": ("qat.scheme=int8",),
        "fp8": ("qat.scheme=fp8",),
        "mxfp4": ("qat.scheme=mxfp4",),
        "nvfp4": ("qat.scheme=nvfp4",),
    }


def methods(sizes: Sizes) -> dict[str, tuple[str, ...]]:
    """Name -> overrides of what is trained, in the order of the table; the end of the name is its format."""
    by_format = formats(sizes)
    teacher = ("distill.weight=1",)
    found = {"qat_g32": ("conf=qat", *by_format["g32"])}
    for name in ("g32", "g64", "g192", "nf4", "int4_int8"):
        found[f"qad_{name}"] = ("conf=qat", *by_format[name], *teacher)
    found["lora_g32"] = ("conf=qat_lora", *by_format["g32"], *teacher)
    found["lora_nf4"] = ("conf=qat_lora", *by_format["nf4"], *teacher)
    found["naive_g32"] = _naive(sizes, *teacher)
    for name in ("g32", "g64"):
        found[f"blocks_{name}"] = ("conf=qat_blocks", *by_format[name], *teacher)
    found["full_16bit"] = ("conf=full",)
    return found


def _naive(sizes: Sizes, *others: str) -> tuple[str, ...]:
    """What is usually done: an adapter of packed weights, trained as Q(W) x + s B A x and shipped as Q(W + s B A)."""
    packed = "quant.codebook=int4", f"quant.group_size={sizes.groups[0]}", "quant.scale_dtype=float32"
    return "conf=qlora", "lora.alpha=32", *packed, *others


def study_cells(sizes: Sizes) -> list[Cell]:
    """All cells of the study but the costs, in the order in which they are measured."""
    found = methods(sizes)
    return [
        *(_cell(sizes, f"rounded_{name}", "rounded", 0, overrides) for name, overrides in formats(sizes).items()),
        *(_trained(sizes, name, sizes.seeds[0]) for name in found if name not in LAST),
        *(_trained(sizes, name, seed) for seed in sizes.seeds[1:] for name in MAIN),
        *(_trained(sizes, name, sizes.seeds[0]) for name in LAST),
    ]


def cost_cells(sizes: Sizes) -> list[Cell]:
    """Time and memory of a step; for a machine that does nothing else."""
    costs = {name: overrides for name, overrides in methods(sizes).items() if not name.startswith("blocks")}
    return [_cell(sizes, f"cost_{name}", "cost", 0, overrides) for name, overrides in costs.items()]


def _trained(sizes: Sizes, name: str, seed: int) -> Cell:
    kind = "blocks" if name.startswith("blocks") else "trained"
    return _cell(sizes, name, kind, seed, methods(sizes)[name])


def _cell(sizes: Sizes, name: str, kind: str, seed: int, overrides: tuple[str, ...]) -> Cell:
    return Cell(name, kind, seed, overrides, {key: getattr(sizes, key) for key in _SIZES_OF[kind]})


def chosen_cells(sizes: Sizes, only: str) -> list[Cell]:
    """The cells whose names, or beginnings of them, `only` lists; those of `study_cells` for an empty text.

    raises  ValueError naming the names that exist
    """
    return choose([*study_cells(sizes), *cost_cells(sizes)], only) if only else study_cells(sizes)
