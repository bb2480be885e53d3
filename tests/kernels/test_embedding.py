"""The gather of rows against torch's embedding."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from trainer.kernels import embedding

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def case(num_ids: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_ids)
    weight = torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, shape[0], (num_ids,), generator=generator), weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [embedding.embed_tokens, embedding.embed_tokens_reference])
@pytest.mark.parametrize(
    ("num_ids", "shape"), [(1, (5, 1)), (3, (2, 33)), (0, (4, 8)), (200, (301, 576)), (130, (7, 577))]
)
def test_equals_torch(implementation: object, num_ids: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    token_ids, weight = case(num_ids, shape, dtype)
    assert torch.equal(implementation(token_ids, weight), torch.nn.functional.embedding(token_ids, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [embedding.embed_tokens, embedding.embed_tokens_reference])
def test_an_id_that_is_no_row_gives_nan(implementation: object, dtype: torch.dtype) -> None:
    _, weight = case(4, (5, 33), dtype)
    got = implementation(torch.tensor([4, -1, 5, 2**62, -(2**63), 0]), weight)
    assert got.isnan().all(1).tolist() == [False, True, True, True, True, False]
    assert torch.equal(got[[0, 5]], weight[[4, 0]])


def test_opcheck() -> None:
    token_ids, weight = case(3, (5, 33), torch.float32)
    torch.library.opcheck(torch.ops.lowbit.embed_tokens, (token_ids, weight))
    assert torch.equal(torch.ops.lowbit.embed_tokens(token_ids, weight), weight[token_ids])


@pytest.mark.parametrize(
    ("token_ids", "weight", "message"),
    [
        (torch.zeros(2, 2).long(), torch.ones(4, 8), r"token_ids is torch.int64 \[2, 2\] .* int64 \[T\]"),
        (torch.zeros(2).int(), torch.ones(4, 8), r"token_ids is torch.int32 .* use .to\(torch.int64\)"),
        (torch.zeros(4).long()[::2], torch.ones(4, 8), r"token_ids .* with strides \[2\]; .* contiguous int64"),
        (torch.zeros(2).long(), torch.ones(8), r"weight is torch.float32 \[8\] .* contiguous rows \[V, H\]"),
        (torch.zeros(2).long(), torch.ones(8, 4).T, r"weight .* with strides \[1, 4\]; .* use .contiguous\(\)"),
        (torch.zeros(2).long(), torch.ones(4, 8).char(), "weight is torch.int8 .* float32, bfloat16 or float16"),
        (torch.zeros(2).long(), torch.ones(4, 8, device="meta"), "token_ids is on cpu and weight on meta"),
    ],
)
def test_errors(token_ids: Tensor, weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embedding.embed_tokens(token_ids, weight)


INTERPRETED = """
import torch
from trainer.kernels import embedding as op

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for num_ids, size in [(1, 1), (5, 33), (3, 1500), (0, 8)]:
        weight = torch.randn(7, size).to(dtype)
        token_ids = torch.randint(0, 7, (num_ids,))
        assert torch.equal(op.embed_tokens(token_ids, weight), weight[token_ids]), (dtype, num_ids, size)
    assert op.embed_tokens(torch.tensor([7, -1]), weight).isnan().all()
print("interpreted")
"""


def test_triton_interpreted_equals_reference() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_triton_compiles_without_spills(dtype: str) -> None:
    aot = pytest.importorskip("tests.kernels.aot")
    sizes = dict.fromkeys(["num_rows", "size", "stride_weight_row", "stride_out_row"], "i32")
    types = {"token_ids_ptr": "*i64", "weight_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", **sizes}
    for target in aot.TARGETS:
        compiled = aot.compile_kernel(embedding._embed_tokens_kernel, types, {"BLOCK_H": embedding.BLOCK_H}, target)
        assert aot.spilled_registers(compiled, target) == 0, target


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_equals_torch(dtype: torch.dtype) -> None:
    token_ids, weight = (tensor.cuda() for tensor in case(200, (301, 1537), dtype))
    assert torch.equal(embedding.embed_tokens(token_ids, weight), weight[token_ids])
    assert embedding.embed_tokens(token_ids + 301, weight).isnan().all()
