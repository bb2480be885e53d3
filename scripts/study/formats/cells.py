"""What the study of formats measures: one model in every format that it is shipped in, and how each serves.

A quality cell quantizes (or finds what an earlier cell of the same format left) and evaluates; a load cell serves the
same folder under a load. The order makes a study that is stopped halfway useful: quality first, cheap formats first.
"""

import os
from dataclasses import dataclass

from study.cell import Cell, choose

CALIBRATION_FILE, TEST_FILE = "wikitext2_valid.txt", "wikitext2_test.txt"
QAT_RUN = "LOWBIT_STUDY_QAT_RUN"
"""The environment variable with a finished run of quantization-aware training on the same model."""

FLOORS = ("16bit@server", "gguf_q4_0@llama_cpp")
"""Cells that measure the original against itself, by our server and by llama.cpp: the same for all formats."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    model: str = "smollm2_135m"
    rows: int = 24
    """Rows of calibration."""
    row_len: int = 512
    windows: int = 8
    window_len: int = 512
    prompts: int = 16
    """Questions of pydocs that are answered greedily."""
    answer_len: int = 32
    rate: float = 0.5
    """Requests a second that each format is served at; then as many come at once."""
    requests: int = 16
    input_len: int = 96
    output_len: int = 32
    price_per_hour: float = 0.05
    """Of a machine of this size, in a currency of one's own."""
    group_size: int = 32
    block_size: int = 64
    foreign: bool = True
    """Codes in the layouts of other engines; else in our own, which holds the tiny model's odd sizes too."""
    gguf_programs: tuple[str, ...] = ("server", "llama_cpp")
    cells_per_process: int = 1
    """1 gives each cell a process of its own."""


FULL = Sizes()
QUICK = Sizes(
    model="tiny",
    rows=4,
    row_len=64,
    windows=4,
    window_len=32,
    prompts=4,
    answer_len=4,
    rate=4.0,
    requests=4,
    input_len=16,
    output_len=4,
    block_size=32,
    foreign=False,
    gguf_programs=("llama_cpp",),  # transformers does not read its tokenizer from a .gguf file
    cells_per_process=64,
)
_QUALITY = ("model", "rows", "row_len", "windows", "window_len", "prompts", "answer_len")
_LOAD = ("model", "rows", "row_len", "rate", "requests", "input_len", "output_len", "price_per_hour")


def formats(sizes: Sizes) -> dict[str, tuple[str, ...]]:
    """Name -> settings of quantize.py; empty for the model as it is, and for a run that was trained before."""
    int4 = ("codebook=int4", f"group_size={sizes.group_size}")
    int8 = ("scale_dtype=bfloat16", "formats=[compressed_tensors]")  # scales are stored as the rest is
    layouts = {name: f"formats=[{name if sizes.foreign else 'quantized'}]" for name in ("bnb", "awq", "gptq")}
    nf4 = ("codebook=nf4", f"block_size={sizes.block_size}", layouts["bnb"])
    return {
        "16bit": (),
        "nf4_rtn": ("method=rtn", *nf4),
        "gguf_q4_0": ("method=gguf", "gguf_type=Q4_0", "imatrix=false"),
        "gguf_q4_k_m": ("method=gguf", "gguf_type=Q4_K_M", "imatrix=false"),
        "awq_int4": ("method=awq", *int4, "symmetric=false", layouts["awq"]),
        "gptq_int4": ("method=gptq", *int4, "symmetric=true", layouts["gptq"]),
        "int8_dynamic": ("method=int8_dynamic", *int8),
        "int8_static": ("method=smoothquant", *int8),
        "nf4_gptq": ("method=gptq", *nf4),
        "qat": (),
    }


def study_cells(sizes: Sizes) -> list[Cell]:
    """All cells, in the order in which they are measured; a name's end says by what program."""
    quality = []
    for name, settings in formats(sizes).items():
        programs = sizes.gguf_programs if name.startswith("gguf") else ("server",)
        quality += [_cell(sizes, f"{name}@{program}", "quality", settings, _QUALITY) for program in programs]
    load = [
        _cell(sizes, f"{name}@load", "load", settings, _LOAD)
        for name, settings in formats(sizes).items()
        if not name.startswith("gguf") or "server" in sizes.gguf_programs
    ]
    return [*quality, *load]


def _cell(sizes: Sizes, name: str, kind: str, settings: tuple[str, ...], keys: tuple[str, ...]) -> Cell:
    return Cell(name, kind, 0, settings, {key: getattr(sizes, key) for key in keys})


def chosen_cells(sizes: Sizes, only: str) -> list[Cell]:
    """The cells whose names, or beginnings of them, `only` lists; all for an empty text. A run that is not there is
    left out, and said.

    raises  ValueError naming the names that exist
    """
    cells = study_cells(sizes)
    chosen = choose(cells, only) if only else cells
    left_out = [cell.name for cell in chosen if cell.name.startswith("qat@") and not os.environ.get(QAT_RUN)]
    if left_out:
        print(f"{', '.join(left_out)}: left out, {QAT_RUN} is not set to a finished run")
    return [cell for cell in chosen if cell.name not in left_out]
