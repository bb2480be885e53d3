"""Triton kernels without a GPU: run by Triton's interpreter, and compiled ahead of time for real GPUs."""

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from triton.backends.compiler import GPUTarget  # noqa: E402

from tests.kernels.aot import TARGETS, compile_kernel, spilled_registers  # noqa: E402
from trainer.kernels import codebook4, codebook4_linear, split_k  # noqa: E402
from trainer.kernels.double_quant import quantize_absmax  # noqa: E402

WEIGHT = "packed_ptr absmax_ptr nested_absmax_ptr nested_offset_ptr map_ptr codebook_ptr".split()
WEIGHT_TYPES = dict(zip(WEIGHT, ["*u8", "*u8", "*fp32", "*fp32", "*fp32", "*fp32"], strict=True))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.backend}-{target.arch}")
class TestAheadOfTime:
    """Kernels compile for GPUs that are not here, and keep their values in registers: a spill is a design fault."""

    @pytest.mark.parametrize("block_size", [32, 4096])  # the smallest and the largest: fewest and most values a thread
    def test_quantize(self, target: GPUTarget, block_size: int) -> None:
        types = {
            "weight_ptr": "*bf16",
            "thresholds_ptr": "*fp32",
            "order_ptr": "*u8",
            "packed_ptr": "*u8",
            "absmax_ptr": "*fp32",
            "numel": "i64",
        }
        constants = {"BLOCK_SIZE": block_size, "NUM_BLOCKS": max(1, codebook4.QUANTIZE_ELEMENTS // block_size)}
        compiled = compile_kernel(codebook4._quantize_kernel, types, constants, target)
        assert spilled_registers(compiled, target) == 0

    @pytest.mark.parametrize("block_size", [32, 64, 4096])
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_dequantize(self, target: GPUTarget, dtype: str, block_size: int) -> None:
        types = {**WEIGHT_TYPES, "out_ptr": f"*{dtype}", "numel": "i64"}
        num_blocks = max(1, 2 * codebook4.DEQUANTIZE_BYTES // block_size)
        constants = {"BLOCK_SIZE": block_size, "DOUBLE_QUANT": True, "NUM_BLOCKS": num_blocks}
        compiled = compile_kernel(codebook4._dequantize_kernel, types, constants, target)
        assert spilled_registers(compiled, target) == 0

    @pytest.mark.parametrize(("dtype", "dot"), [("bf16", tl.bfloat16), ("fp16", tl.float16), ("fp32", tl.float32)])
    def test_linear(self, target: GPUTarget, dtype: str, dot: object) -> None:
        sizes = "in_features out_features row_bytes features_per_split stride_x_row".split()
        types = {**WEIGHT_TYPES, "x_ptr": f"*{dtype}", "num_rows": "i32", **dict.fromkeys(sizes, "i32")}
        tile = {**codebook4_linear.LINEAR_TILES[4 if dtype == "fp32" else 2]}
        num_warps = tile.pop("num_warps")
        del tile["PROGRAMS"]
        for span in (split_k.MIN_SPAN, 64):  # a block of 64 weights, or rows that end inside of one
            constants = {"BLOCK_SIZE": 64, "SPAN": min(span, tile["BLOCK_K"]), "DOUBLE_QUANT": True, "DOT": dot, **tile}
            options = {"num_warps": num_warps, "aligned": sizes}
            compiled = compile_kernel(
                codebook4_linear._linear_kernel, types | {"y_ptr": "*fp32"}, constants, target, **options
            )
            assert spilled_registers(compiled, target) == 0, span

    @pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
    def test_sum_of_splits(self, target: GPUTarget, dtype: str) -> None:
        types = {"parts_ptr": "*fp32", "y_ptr": f"*{dtype}", "numel": "i32"}
        constants = {"SPLITS": split_k.MAX_SPLITS, "ELEMENTS": split_k.SUM_ELEMENTS}
        compiled = compile_kernel(split_k._sum_kernel, types, constants, target)
        assert spilled_registers(compiled, target) == 0


INTERPRETED = """
import torch
from trainer.kernels import codebook4, codebook4_linear, nf4, split_k

torch.manual_seed(0)
# rows that end inside a block (96, 48), inside a byte (33, 65), one element, a 64-aligned one; the linear layer runs in
# Triton where they divide by 16
for shape, codebook in zip([(2, 96), (5, 48), (7, 33), (1, 65), (1, 1), (33, 64)], 3 * ["nf4", "fp4"]):
    for block_size in (32, 64):
        weight = torch.randn(shape)
        weight.view(-1)[:32] = 0  # a block of zeros
        options = {"codebook": codebook, "block_size": block_size}
        packed, absmax = codebook4.codebook_quantize_reference(weight, **options)
        got = codebook4.codebook_quantize_triton(weight, **options)
        assert torch.equal(got[0], packed) and torch.equal(got[1], absmax), ("quantize", shape, options)
        for scales in ((absmax, None, None), nf4.quantize_absmax(absmax)):
            packed_weight = codebook4.CodebookWeight(packed, *scales, *shape, block_size, codebook)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                want = codebook4.codebook_dequantize_reference(packed_weight, dtype=dtype)
                got = codebook4.codebook_dequantize_triton(packed_weight, dtype=dtype)
                # the interpreter truncates float32 to bfloat16 where GPUs round: up to one ulp, 2^-7 of the value
                rtol = 2**-7 if dtype == torch.bfloat16 else 0
                torch.testing.assert_close(got, want, atol=0, rtol=rtol, msg=f"{shape} {options} {dtype}")
            # 1, 16 rows: fused; 17: dense. Of the sum of |terms|: float32, sums in another order; float16, rounded
            # once, 2^-11; bfloat16, weight and output are truncated by the interpreter, 2^-7 each
            for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2**-10), (torch.bfloat16, 2**-6)):
                for rows in (1, 16, 17):
                    x = torch.randn(rows, shape[1]).to(dtype)
                    dense = codebook4.codebook_dequantize_reference(packed_weight, dtype=dtype)
                    want = x.double() @ dense.double().T
                    got = codebook4_linear.codebook_linear_triton(x, packed_weight).double()
                    terms = x.double().abs() @ dense.double().abs().T
                    error = (got - want).abs() - tolerance * terms
                    assert (error <= 0).all(), ("linear", shape, options, dtype, rows, error.max())

# Sums in 1 to 16 parts, the last one shorter: the same product; and a row has its bits whatever is beside it.
weight = torch.randn(40, 1040)
packed, absmax = codebook4.codebook_quantize_reference(weight, codebook="nf4", block_size=64)
packed_weight = codebook4.CodebookWeight(packed, *nf4.quantize_absmax(absmax), 40, 1040, 64, "nf4")
x, found = torch.randn(16, 1040), set()
dense = codebook4.codebook_dequantize_reference(packed_weight, dtype=torch.float32).double()
for programs in (1, 8, 1024):
    codebook4_linear.LINEAR_TILES[4]["PROGRAMS"] = programs
    found.add(split_k.splits(1040, 40, codebook4_linear.LINEAR_TILES[4])[0])
    got = codebook4_linear.codebook_linear_triton(x, packed_weight)
    # float32 sums in another order: 2^-24 of each of up to 1040 / 2 terms at worst, far less on average
    assert ((got - x.double() @ dense.T).abs() <= 1e-5 * (x.double().abs() @ dense.abs().T)).all(), programs
    assert torch.equal(codebook4_linear.codebook_linear_triton(x[5:6], packed_weight), got[5:6]), programs
assert len(found) == 3 and found >= {1}, found

for bad in (float("inf"), float("nan")):
    weight = torch.zeros(2, 64)
    weight[1, 3] = bad
    try:
        codebook4.codebook_quantize_triton(weight, codebook="nf4", block_size=64)
    except ValueError as error:
        assert "weight[1, 3]" in str(error), error
    else:
        raise AssertionError(f"{bad} was accepted")

# The registered op takes the Triton path when it is forced, with gradients; and so does dequantize_into.
x = torch.randn(2, 64, requires_grad=True)
packed, absmax = nf4.nf4_quantize(torch.randn(8, 64), block_size=64)
nf4.nf4_linear(x, packed, absmax, out_features=8, block_size=64).sum().backward()
dense = nf4.nf4_dequantize(packed, absmax, out_features=8, in_features=64, block_size=64, dtype=torch.float32)
assert torch.allclose(x.grad, dense.sum(0).expand(2, -1), atol=1e-5)  # float32 sums of 8 terms
out = torch.zeros(10, 64)
nf4.nf4_dequantize_into(nf4.NF4Weight(packed, absmax, None, None, 8, 64, 64), out[1:9])
assert torch.equal(out[1:9], dense) and not out[0].any() and not out[9].any()
print("interpreted")
"""


def test_interpreter_equals_reference() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


def test_kernel_files_import_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None  # the import fails, as where triton is not installed
import torch
from trainer.kernels import codebook4, nf4
packed, absmax = nf4.nf4_quantize(torch.ones(1, 64), block_size=64)
assert packed.tolist() == [255] * 32
try:
    codebook4.codebook_dequantize_triton(nf4.NF4Weight(packed, absmax, None, None, 1, 64, 64), dtype=torch.float32)
except ImportError as error:
    assert "pip install triton" in str(error)
    print("refused")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "refused\n", result.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_equals_reference(dtype: torch.dtype) -> None:
    weight = torch.randn(130, 192, device="cuda")
    for codebook in codebook4.CODEBOOKS:
        options = {"codebook": codebook, "block_size": 64}
        packed, absmax = codebook4.codebook_quantize_triton(weight, **options)
        want_packed, want_absmax = codebook4.codebook_quantize_reference(weight, **options)
        assert torch.equal(packed, want_packed) and torch.equal(absmax, want_absmax)
        packed_weight = codebook4.CodebookWeight(packed, *quantize_absmax(absmax), 130, 192, 64, codebook)
        dense = codebook4.codebook_dequantize_reference(packed_weight, dtype=dtype)
        assert torch.equal(codebook4.codebook_dequantize_triton(packed_weight, dtype=dtype), dense)
        x = torch.randn(3, 192, device="cuda", dtype=dtype)
        got = codebook4_linear.codebook_linear_triton(x, packed_weight)
        torch.testing.assert_close(got, x @ dense.T, atol=0.05, rtol=0.02)
