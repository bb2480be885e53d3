"""Compile Triton kernels for GPUs that are not here. Import this after `pytest.importorskip("triton")`.

With LOWBIT_AOT_REPORT=<file> each compiled kernel appends a line of JSON: what it is, and what it takes of its target.
"""

import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = [
    GPUTarget("cuda", 80, 32),
    GPUTarget("cuda", 90, 32),
    GPUTarget("cuda", 100, 32),
    GPUTarget("hip", "gfx942", 64),
]


class Resources(NamedTuple):
    """What a compiled kernel takes.

    registers       32-bit registers of a thread; on AMD vector registers, those that accumulate among them
    spilled         bytes of a thread that went to memory on NVIDIA; vector registers that did on AMD
    scalar_spilled  AMD's scalar registers that went to lanes of a vector register: no memory, but a move
    """

    registers: int
    spilled: int
    scalar_spilled: int = 0


def compile_kernel(
    kernel: Callable,
    types: dict[str, str],
    constants: dict[str, object],
    target: GPUTarget,
    *,
    num_warps: int = 4,
    num_stages: int | None = None,
    aligned: Iterable[str] = (),
) -> object:
    """The kernel for a target; arguments that `types` does not name are constants.

    types       name -> Triton's type, "*bf16" or "i32"
    aligned     names of integers that divide by 16, as a launch finds them; pointers then do too: loads are wide
    num_stages  of the software pipeline; None: Triton's choice for the target
    """
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    divisible = {*aligned, *(name for name, kind in types.items() if kind[0] == "*")} if aligned else set()
    hints = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible & types.keys()}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, hints)
    options = {"enable_fp_fusion": False, "num_warps": num_warps}
    options |= {} if num_stages is None else {"num_stages": num_stages}
    compiled = triton.compile(source, target=target, options=options)
    if os.environ.get("LOWBIT_AOT_REPORT"):
        _report(Path(os.environ["LOWBIT_AOT_REPORT"]), kernel, types, constants, target, compiled)
    return compiled


def _report(
    path: Path,
    kernel: Callable,
    types: dict[str, str],
    constants: dict[str, object],
    target: GPUTarget,
    compiled: object,
) -> None:
    used = resources(compiled, target)
    line = {
        "file": Path(kernel.fn.__code__.co_filename).name,
        "kernel": kernel.fn.__name__,
        "target": target_name(target),
        "types": sorted({kind.removeprefix("*") for kind in types.values() if kind.startswith("*")}),
        "constants": {name: _plain(value) for name, value in constants.items()},
        "num_warps": compiled.metadata.num_warps,
        "num_stages": compiled.metadata.num_stages,
        "shared": compiled.metadata.shared,
        "registers": used.registers,
        "spills": used.spilled,
        "scalar_spills": used.scalar_spilled,
    }
    with path.open("a") as file:  # one short write, so that parallel test processes do not mix
        file.write(json.dumps(line) + "\n")


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str) else str(value)


def target_name(target: GPUTarget) -> str:
    """As tuned.json names it: sm_90, gfx942."""
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def spilled_registers(compiled: object, target: GPUTarget) -> int:
    """0 if every value stays in the register that is its own; see `Resources`."""
    used = resources(compiled, target)
    return used.spilled + used.scalar_spilled


def resources(compiled: object, target: GPUTarget) -> Resources:
    """What a compiled kernel takes, from the assembler's own words."""
    if target.backend == "hip":
        fields = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        found = (re.findall(rf"\.{name}:\s*(\d+)", compiled.asm["amdgcn"]) for name in fields)
        return Resources(*(sum(map(int, counts)) for counts in found))
    return _assemble(compiled.asm["ptx"])


@functools.cache
def _assemble(ptx: str) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        processor = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
        command = [ptxas(), "-v", f"--gpu-name={processor}", str(path), "-o", f"{folder}/kernel.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(map(int, re.findall(r"Used (\d+) registers", log)), default=0)
    return Resources(registers, sum(map(int, re.findall(r"(\d+) bytes spill", log))))


def ptxas() -> str:
    """The newest assembler in triton's wheel: it reads the PTX of every target here."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return str(max(folder.glob("ptxas*"), key=lambda path: len(path.name)))  # ptxas-blackwell where there are two
