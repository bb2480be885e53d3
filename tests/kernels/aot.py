"""Compile Triton kernels for GPUs that are not here. Import this after `pytest.importorskip("triton")`."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = [
    GPUTarget("cuda", 80, 32),
    GPUTarget("cuda", 90, 32),
    GPUTarget("cuda", 100, 32),
    GPUTarget("hip", "gfx942", 64),
]


def compile_kernel(
    kernel: Callable, types: dict[str, str], constants: dict[str, object], target: GPUTarget, *, num_warps: int = 4
) -> object:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=target, options={"enable_fp_fusion": False, "num_warps": num_warps})


def spilled_registers(compiled: object, target: GPUTarget) -> int:
    if target.backend == "hip":
        return sum(map(int, re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])))
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        processor = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)[1]
        command = [ptxas(), "-v", f"--gpu-name={processor}", str(ptx), "-o", f"{folder}/kernel.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", log)))


def ptxas() -> str:
    """The newest assembler in triton's wheel: it reads the PTX of every target here."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return str(max(folder.glob("ptxas*"), key=lambda path: len(path.name)))  # ptxas-blackwell where there are two
