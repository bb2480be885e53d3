"""What the study of post-training quantization measures: formats, methods, peers, and llama.cpp's types in llama.cpp.

The order makes a study that is stopped halfway useful: rounding to nearest, every method once, what settings matter.
A peer's quantizer runs in a Python of its own, which an environment variable names; without it its cells are left out.
"""

import os
from dataclasses import dataclass

from study.cell import Cell, choose

CALIBRATION_FILE, TEST_FILE = "wikitext2_valid.txt", "wikitext2_test.txt"


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    model: str = "smollm2_135m"
    rows: int = 64
    """Rows of calibration."""
    row_len: int = 512
    windows: int = 24
    """Pieces from the start of the test text, whose first token is no target."""
    window_len: int = 1024
    prompts: int = 32
    """Questions of pydocs that are answered greedily."""
    answer_len: int = 32
    groups: tuple[int, int] = (32, 64)
    block_size: int = 64
    gguf: tuple[str, ...] = ("Q4_0", "Q4_K_M", "Q8_0")
    cells_per_process: int = 1
    """1 gives each cell a process of its own: its peak memory is its own."""


FULL = Sizes()
QUICK = Sizes(
    model="tiny",
    rows=8,
    row_len=64,
    windows=2,
    window_len=64,
    prompts=2,
    answer_len=4,
    groups=(32, -1),  # the tiny model has rows of 96 and 160 features
    block_size=32,
    gguf=("Q4_0",),
    cells_per_process=64,
)
_COMMON = ("model", "windows", "window_len", "prompts", "answer_len")
_CALIBRATED = (*_COMMON, "rows", "row_len")
_SIZES_OF = {"16bit": _COMMON, "ptq": _CALIBRATED, "peer": _CALIBRATED, "llama": _CALIBRATED}
PYTHONS = {"gptqmodel": "LOWBIT_STUDY_GPTQMODEL", "llmcompressor": "LOWBIT_STUDY_LLMCOMPRESSOR"}
"""Peer, as its distribution is called -> the environment variable with the path of a Python that has it."""


def formats(sizes: Sizes) -> dict[str, tuple[str, ...]]:
    """Name -> the settings of every grid of weights."""
    first, second = sizes.groups
    return {
        "int4_g32": ("codebook=int4", f"group_size={first}", "symmetric=true"),
        "int4_g64": ("codebook=int4", f"group_size={second}", "symmetric=true"),
        "int4_g32_asymmetric": ("codebook=int4", f"group_size={first}", "symmetric=false"),
        "nf4": ("codebook=nf4", f"block_size={sizes.block_size}"),
        "int8": ("codebook=int8",),
    }


def methods(sizes: Sizes) -> dict[str, tuple[str, ...]]:
    """Name -> settings of quantize.py, in the order of the table; the end of the name is the format, see `formats`."""
    found = {f"rtn_{name}": ("method=rtn", *grid) for name, grid in formats(sizes).items()}
    grids = formats(sizes)
    found["gptq_int4_g32"] = ("method=gptq", *grids["int4_g32"])
    found["awq_int4_g32_asymmetric"] = ("method=awq", *grids["int4_g32_asymmetric"])
    found["smoothquant"] = ("method=smoothquant",)
    found["int8_dynamic"] = ("method=int8_dynamic",)
    found["int8_dynamic-plain"] = ("method=int8_dynamic", "fold=none")
    found["gptq_nf4"] = ("method=gptq", *grids["nf4"])
    found["gptq_int4_g64"] = ("method=gptq", *grids["int4_g64"])
    found["gptq_int4_g32_asymmetric"] = ("method=gptq", *grids["int4_g32_asymmetric"])
    found["hqq_int4_g32_asymmetric"] = ("method=hqq", *grids["int4_g32_asymmetric"])
    found["awq_int4_g32"] = ("method=awq", *grids["int4_g32"])
    found["gptq-original_int4_g32"] = ("method=gptq", "match=original", *grids["int4_g32"])
    found["gptq-awq_int4_g32"] = ("method=gptq", "fold=awq", *grids["int4_g32"])
    found["gptq-plain_int4_g32"] = ("method=gptq", "search_scales=false", "refit_scales=false", *grids["int4_g32"])
    found["gptq-groups_int4_g32"] = ("method=gptq", "act_order=groups", *grids["int4_g32"])
    found["gptq-pydocs_int4_g32"] = ("method=gptq", "data=pydocs", *grids["int4_g32"])
    found["gptq-5bits_int4_g32"] = ("method=gptq", "bits_budget=4.5", *grids["int4_g32"])
    found["hqq_int4_g32"] = ("method=hqq", *grids["int4_g32"])
    return found


def peers(sizes: Sizes) -> dict[str, tuple[str, ...]]:
    """Name -> peer, method and the settings that are not its defaults; the end of the name is the format."""
    group_size = f"group_size={sizes.groups[0]}"
    gptqmodel = ("gptqmodel", "gptq", "bits=4", group_size)
    return {
        "gptqmodel_int4_g32": gptqmodel,
        "llmcompressor-gptq_int4_g32": ("llmcompressor", "gptq", "num_bits=4", group_size, "symmetric=true"),
        "llmcompressor-awq_int4_g32_asymmetric": ("llmcompressor", "awq", "num_bits=4", group_size, "symmetric=false"),
        "gptqmodel-mse_int4_g32": (*gptqmodel, "mse=2.4"),
        "gptqmodel-order_int4_g32": (*gptqmodel, "mse=2.4", "desc_act=true"),
    }


def gguf_files(sizes: Sizes) -> dict[str, tuple[str, ...]]:
    """Name -> what makes a GGUF file: type, and by whom: ours, ours with an importance matrix, llama.cpp's own."""
    found = {"gguf_F16": ("F16", "ours")}
    for kind in sizes.gguf:
        found[f"gguf_{kind}"] = (kind, "ours")
        found[f"gguf-imatrix_{kind}"] = (kind, "imatrix")
        found[f"gguf-llama.cpp_{kind}"] = (kind, "llama.cpp")
    return {name: entry for name, entry in found.items() if not (entry[0] == "Q8_0" and entry[1] == "imatrix")}


def study_cells(sizes: Sizes) -> list[Cell]:
    """All cells, in the order in which they are measured."""
    return [
        _cell(sizes, "16bit", "16bit", ()),
        *(_cell(sizes, name, "ptq", settings) for name, settings in methods(sizes).items()),
        *(_cell(sizes, name, "peer", settings) for name, settings in peers(sizes).items()),
        *(_cell(sizes, name, "llama", settings) for name, settings in gguf_files(sizes).items()),
    ]


def _cell(sizes: Sizes, name: str, kind: str, settings: tuple[str, ...]) -> Cell:
    return Cell(name, kind, 0, settings, {key: getattr(sizes, key) for key in _SIZES_OF[kind]})


def chosen_cells(sizes: Sizes, only: str) -> list[Cell]:
    """The cells whose names, or beginnings of them, `only` lists; all for an empty text. Peers that are not there are
    left out, and said.

    raises  ValueError naming the names that exist
    """
    cells = study_cells(sizes)
    chosen = choose(cells, only) if only else cells
    for cell in chosen:
        if not _can_run(cell):
            print(f"{cell.name} is left out: {PYTHONS[cell.overrides[0]]} is not set to a Python with this peer")
    return [cell for cell in chosen if _can_run(cell)]


def _can_run(cell: Cell) -> bool:
    return cell.kind != "peer" or bool(os.environ.get(PYTHONS[cell.overrides[0]]))
