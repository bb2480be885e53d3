"""What the study of adapters measures: cells, each a method with its settings and a seed, and the order of them.

The order makes a study that is stopped halfway useful: every method once, the starting
points, then further seeds.
"""

from dataclasses import dataclass

from study.cell import Cell, choose

TRAIN_FILE, TEST_FILE, TEXT_FILE = "gsm8k_train.jsonl", "gsm8k_test.jsonl", "wikitext2_test.txt"
RANK = 16
START_ALPHAS = (8, 16, 32, 64)
"""r/2, r, 2r and 4r: alpha only enters through s = alpha / r, and LoftQ's start must not depend on it."""
ALPHA_ERRORS_ARE_READ_AT = 32


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    model: str = "smollm2_135m"
    steps: int = 24
    batch_size: int = 4
    max_seq_len: int = 320
    train_rows: int = 1024
    """The first rows of GSM8K's training file; a seed draws steps x batch_size of them."""
    eval_rows: int = 48
    """The first rows of GSM8K's test file: held-out loss."""
    questions: int = 64
    """The rows of the test file after these: answers."""
    answer_tokens: int = 128
    windows: int = 8
    """Pieces from the start of WikiText-2's test text, whose first token is no target."""
    window_len: int = 1024
    cost_steps: int = 5
    """Steps of a cost cell; the first is not timed."""
    long_steps: int = 192
    """Steps of a long cell, which is evaluated eight times on the way."""
    int4_group_size: int = 64
    seeds: tuple[int, ...] = (0, 1, 2)
    cells_per_process: int = 1
    """1 gives each cell a process of its own: its peak memory is its own, and nothing of the last cell is left."""


FULL = Sizes()
QUICK = Sizes(
    model="tiny",
    steps=2,
    batch_size=2,
    max_seq_len=192,
    train_rows=64,
    eval_rows=4,
    questions=4,
    answer_tokens=8,
    windows=2,
    window_len=128,
    cost_steps=2,
    long_steps=8,
    int4_group_size=32,  # the tiny model's rows of 96 have no whole number of groups of 64
    seeds=(0, 1),
    cells_per_process=24,
)
_SIZES_OF = {
    "trained": ("model", "steps", "batch_size", "max_seq_len", "train_rows", "eval_rows", "questions", "answer_tokens")
    + ("windows", "window_len"),
    "start": ("model", "max_seq_len", "train_rows", "windows", "window_len"),
    "cost": ("model", "batch_size", "max_seq_len", "train_rows", "cost_steps"),
    "long": ("model", "batch_size", "max_seq_len", "train_rows", "eval_rows", "long_steps"),
}
"""The sizes that a kind of cell depends on."""


def methods(sizes: Sizes) -> dict[str, tuple[str, ...]]:
    """Name -> overrides of every method that is trained, in the order of the tables."""
    alpha = ("lora.alpha=32",)
    qlora = ("conf=qlora", *alpha)
    int4 = (f"quant.group_size={sizes.int4_group_size}", "quant.scale_dtype=bfloat16")
    found = {
        "lora_16bit": ("conf=lora", *alpha),
        "qlora_nf4": qlora,
        "qlora_fp4": (*qlora, "quant.codebook=fp4"),
        "qlora_int4": (*qlora, "quant.codebook=int4", *int4),
        "qlora_nf3": (*qlora, "quant.codebook=nf3"),
        "qlora_nf2": (*qlora, "quant.codebook=nf2"),
    }
    for codebook in ("nf4", "nf3", "nf2"):
        found[f"loftq1_{codebook}"] = _loftq(codebook, 1, 0, *alpha)
        found[f"loftq5_{codebook}"] = _loftq(codebook, 5, 0, *alpha)
        found[f"loftq5c_{codebook}"] = _loftq(codebook, 5, 8, *alpha)
    starts = {"pissa_nf4": ("lora.init=pissa",), "eva_nf4": ("lora.init=eva",), "dora_nf4": ("lora.use_dora=true",)}
    found |= {name: (*qlora, *overrides) for name, overrides in starts.items()}
    # alpha / sqrt(r) = 4 is twice the others' scale; at alpha=8 rsLoRA would be qlora_nf4, bit for bit.
    found["rslora_nf4"] = ("conf=qlora", "lora.alpha=16", "lora.use_rslora=true")
    # A quarter of the default rate at width 576: factors that start large take larger steps.
    found |= {f"{name}_slow_nf4": (*found[f"{name}_nf4"], "optim.lr=3.3e-4") for name in ("qlora", "pissa", "eva")}
    return found


def starts() -> dict[str, tuple[str, ...]]:
    """Name -> overrides, without alpha, of every starting point that is measured without training."""
    found: dict[str, tuple[str, ...]] = {"start_16bit": ("conf=lora",)}
    for codebook in ("nf4", "nf3", "nf2"):
        found[f"start_{codebook}_plain"] = ("conf=qlora", f"quant.codebook={codebook}")
        found[f"start_{codebook}_loftq1"] = _loftq(codebook, 1, 0)
        found[f"start_{codebook}_loftq5"] = _loftq(codebook, 5, 0)
        found[f"start_{codebook}_loftq5c"] = _loftq(codebook, 5, 8)
    return found


def _loftq(codebook: str, iterations: int, calibration_rows: int, *others: str) -> tuple[str, ...]:
    settings = f"loftq.iterations={iterations}", f"loftq.calibration_rows={calibration_rows}"
    return "conf=loftq", f"quant.codebook={codebook}", *settings, *others


def study_cells(sizes: Sizes) -> list[Cell]:
    """All cells of the study but the costs and the long ones, in the order in which they are measured."""
    return [
        *_trained(sizes, sizes.seeds[0]),
        *(_cell(sizes, name, "start", 0, overrides) for name, overrides in starts().items()),
        *(cell for seed in sizes.seeds[1:] for cell in _trained(sizes, seed)),
    ]


def cost_cells(sizes: Sizes) -> list[Cell]:
    """Time and memory of each method; for a machine that does nothing else."""
    return [_cell(sizes, f"cost_{name}", "cost", 0, overrides) for name, overrides in methods(sizes).items()]


def long_cells(sizes: Sizes) -> list[Cell]:
    """The 16-bit baseline and QLoRA NF4 with eight times the steps: whether their distance shrinks."""
    names = ("lora_16bit", "qlora_nf4")
    return [_cell(sizes, f"long_{name}", "long", 0, methods(sizes)[name]) for name in names]


def _trained(sizes: Sizes, seed: int) -> list[Cell]:
    return [_cell(sizes, name, "trained", seed, overrides) for name, overrides in methods(sizes).items()]


def _cell(sizes: Sizes, name: str, kind: str, seed: int, overrides: tuple[str, ...]) -> Cell:
    return Cell(name, kind, seed, overrides, {key: getattr(sizes, key) for key in _SIZES_OF[kind]})


def chosen_cells(sizes: Sizes, only: str) -> list[Cell]:
    """The cells whose names, or beginnings of them, `only` lists; those of `study_cells` for an empty text.

    raises  ValueError naming the names that exist
    """
    if not only:
        return study_cells(sizes)
    return choose([*study_cells(sizes), *cost_cells(sizes), *long_cells(sizes)], only)
