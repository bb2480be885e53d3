"""W + s B A: one order of one kind of sum, the same bits from every implementation, chunk and thread."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape, merged_weight
from trainer.kernels.merged_weight import merge_rows, merge_rows_cpu, merge_rows_reference

# One element; inside a tile, one column after a tile, one after a panel; enough work for two threads; no adapter.
SHAPES = [(1, 1, 1), (7, 33, 3), (5, 65, 16), (3, 257, 2), (40, 576, 16), (9, 96, 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]


def case(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows, size, rank = shape
    generator = torch.Generator().manual_seed(size + rank)
    draw = lambda *sizes: torch.randn(*sizes, generator=generator)  # noqa: E731
    return draw(rows, size).to(dtype), draw(rank, size), 0.01 * draw(rows, rank)


def merged(weight: Tensor, lora_A: Tensor, scaled_B: Tensor, merge=merge_rows) -> Tensor:
    out = torch.full(weight.shape, torch.nan)
    merge(weight, lora_A, scaled_B, out)
    return out


def test_golden() -> None:
    """2 + (3 * 5 + 4 * 7) = 45; and 1 + (1e8 - 1e8): the update is summed before the weight is added."""
    assert merged(torch.tensor([[2.0]]), torch.tensor([[5.0], [7.0]]), torch.tensor([[3.0, 4.0]])).item() == 45
    assert merged(torch.tensor([[1.0]]), torch.tensor([[1e8], [-1e8]]), torch.ones(1, 2)).item() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_close_to_the_exact_sum(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    weight, lora_A, scaled_B = case(shape, dtype)
    exact = weight.double() + scaled_B.double() @ lora_A.double()
    # rank + 1 roundings of 2^-24 each, of terms that are below 1
    torch.testing.assert_close(merged(weight, lora_A, scaled_B).double(), exact, rtol=1e-6, atol=2e-6)


@pytest.mark.skipif(_cpp.load("merged_weight") is None, reason="no C++ compiler here")
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_cpp_is_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if flags == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    monkeypatch.setattr(merged_weight, "kernel", lambda file, name: _tape.kernel(file, name, *flags))
    arguments = case(shape, dtype)
    assert torch.equal(merged(*arguments, merge_rows_cpu), merged(*arguments, merge_rows_reference))


INTERPRETED = """
import torch
from trainer.kernels.merged_weight import merge_rows, merge_rows_reference

torch.manual_seed(0)
for rows, size, rank in [(1, 1, 1), (17, 130, 3), (9, 96, 0), (0, 8, 2)]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight, lora_A, scaled_B = torch.randn(rows, size).to(dtype), torch.randn(rank, size), torch.randn(rows, rank)
        got, want = torch.empty(rows, size), torch.empty(rows, size)
        merge_rows(weight, lora_A, scaled_B, got)
        merge_rows_reference(weight, lora_A, scaled_B, want)
        assert torch.equal(got, want), (rows, size, rank, dtype)
print("interpreted")
"""


def test_triton_interpreted_is_the_reference() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_triton_compiles_without_spills(dtype: str) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    pointers = {"weight_ptr": f"*{dtype}", "lora_A_ptr": "*fp32", "scaled_B_ptr": "*fp32", "out_ptr": "*fp32"}
    types = pointers | dict.fromkeys(["num_rows", "in_features", "rank"], "i32")
    for target in aot.TARGETS:
        compiled = aot.compile_kernel(merged_weight._merge_rows_kernel, types, merged_weight.TILE, target)
        assert aot.spilled_registers(compiled, target) == 0, target


def test_neither_rows_nor_threads_change_a_bit() -> None:
    weight, lora_A, scaled_B = case((40, 576, 16), torch.bfloat16)
    whole, threads = merged(weight, lora_A, scaled_B), torch.get_num_threads()
    for rows in (1, 7, 39):
        parts = [merged(w, lora_A, b) for w, b in zip(weight.split(rows), scaled_B.split(rows), strict=True)]
        assert torch.equal(torch.cat(parts), whole)
    try:
        torch.set_num_threads(3)
        assert torch.equal(merged(weight, lora_A, scaled_B), whole)
    finally:
        torch.set_num_threads(threads)


def test_inf_and_nan_stay() -> None:
    weight, lora_A, scaled_B = case((7, 33, 3), torch.float32)
    weight[0, 0], weight[1, 1] = torch.inf, torch.nan
    out = merged(weight, lora_A, scaled_B)
    assert out[0, 0] == torch.inf and out[1, 1].isnan() and torch.isfinite(out[2:]).all()


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(7, 33, dtype=torch.int32), r"weight is torch.int32 \[7, 33\]"),
        (1, torch.zeros(3, 32), r"lora_A is torch.float32 \[3, 32\] on cpu; .* rank 3 needs float32 \[3, 33\]"),
        (1, torch.zeros(3, 33, dtype=torch.bfloat16), "lora_A is torch.bfloat16"),
        (2, torch.zeros(6, 3), r"scaled_B is torch.float32 \[6, 3\]"),
        (3, torch.zeros(33, 7).T, "out has strides"),
    ],
)
def test_what_does_not_fit_is_named(position: int, value: Tensor, message: str) -> None:
    arguments = [*case((7, 33, 3), torch.float32), torch.empty(7, 33)]
    arguments[position] = value
    with pytest.raises(ValueError, match=message):
        merge_rows(*arguments)
