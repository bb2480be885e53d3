"""Updates of many adapters in one batch: values, roundings, rows whose bits do not depend on their batch, Triton."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape
from trainer.kernels import lora_rows as module
from trainer.kernels.lora_rows import LoraTable, lora_rows_

DTYPES = [torch.float32, torch.bfloat16]
RANKS = [1, 3, 16, 8, 65, 256]  # by slot: odd, below and above a tile, the largest
# columns of y by part, in_features: a fused q, k, v; odd sizes; one element; more columns than one piece of work
SHAPES = [([96, 32, 32], 160), ([33, 7], 65), ([1], 1), ([1100], 40)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill(table: LoraTable) -> None:
    for slot, rank in enumerate(RANKS):
        for part, columns in enumerate(table.part_out_features):
            if (slot, part) != (3, 1):  # an adapter that does not touch this part
                A, B = random(rank, table.in_features, seed=slot), random(columns, rank, seed=part)
                table.set(slot, part, A * 0.1, B * 0.1, 0.5 + slot)


def inputs(table: LoraTable, num_tokens: int = 77) -> tuple[Tensor, Tensor, Tensor]:
    """y, x, adapter_ids: a long run of one slot among single rows, rows without an adapter, and an empty slot."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, table.num_slots, (num_tokens,), generator=generator, dtype=torch.int32)
    ids[20:65] = 2
    y = random(num_tokens, table.out_features, seed=1).to(table.dtype)
    return y, random(num_tokens, table.in_features, seed=2).to(table.dtype), ids


def expected(y: Tensor, x: Tensor, ids: Tensor, table: LoraTable) -> Tensor:
    """As kernels/lora_linear.py rounds: A and s B to the dtype of x, x A^T once, y plus the update once."""
    result, begin = y.clone(), 0
    for part, columns in enumerate(table.part_out_features):
        for row, slot in enumerate(ids.tolist()):
            if 0 <= slot < len(RANKS) and (slot, part) != (3, 1):
                A = (random(RANKS[slot], table.in_features, seed=slot) * 0.1).to(y.dtype).double()
                B = random(columns, RANKS[slot], seed=part) * 0.1
                B = ((0.5 + slot) * B).to(y.dtype).double()
                x_A = (A @ x[row].double()).to(y.dtype).double()
                update = B @ x_A
                result[row, begin : begin + columns] = (y[row, begin : begin + columns].double() + update).to(y.dtype)
        begin += columns
    return result


def assert_equal_but_for_order(got: Tensor, want: Tensor) -> None:
    """float32 sums of up to 256 terms in another order: 2^-20 of the largest value. bfloat16: where that straddles a
    rounding of x A^T, the update moves by a part of an ulp, y by one ulp, 2^-7 of its value; such places are rare."""
    scale = want.abs().max().item()
    if got.dtype == torch.bfloat16:
        torch.testing.assert_close(got, want, rtol=2**-7, atol=scale * 2**-9)
        assert (got != want).double().mean() < 0.02
    else:
        torch.testing.assert_close(got, want, rtol=0, atol=scale * 2**-20)


def apply(y: Tensor, x: Tensor, ids: Tensor, table: LoraTable) -> Tensor:
    result = y.clone()
    lora_rows_(result, x, ids, table)
    return result


@pytest.fixture
def cpp() -> None:
    if _cpp.load("lora_rows") is None:
        pytest.skip("no C++ compiler here")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values(
    shape: tuple[list[int], int], dtype: torch.dtype, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = LoraTable(*shape, len(RANKS) + 1, dtype)
    fill(table)
    monkeypatch.setenv("LOWBIT_KERNELS", implementation)  # the reference also reads the layout of the C++ kernel
    y, x, ids = inputs(table)
    got = apply(y, x, ids, table)
    assert_equal_but_for_order(got, expected(y, x, ids, table))
    without = (ids < 0) | (ids == len(RANKS))
    assert torch.equal(got[without], y[without])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_the_same_bits_in_every_batch(
    shape: tuple[list[int], int], dtype: torch.dtype, threads: Callable, cpp: None
) -> None:
    table = LoraTable(*shape, len(RANKS) + 1, dtype)
    fill(table)
    y, x, ids = inputs(table, 300)
    threads(1)
    full = apply(y, x, ids, table)
    for num_threads in (1, 2):
        threads(num_threads)
        assert torch.equal(apply(y, x, ids, table), full)
        for step in (1, 2, 7, 64):
            chunks = [slice(i, i + step) for i in range(0, 300, step)]
            got = torch.cat([apply(y[chunk], x[chunk], ids[chunk], table) for chunk in chunks])
            assert torch.equal(got, full), (num_threads, step)
        backwards = apply(y.flip(0), x.flip(0), ids.flip(0), table)
        assert torch.equal(backwards.flip(0), full)
    table.set(0, 0, random(256, shape[1]), random(shape[0][0], 256), 1.0)  # other adapters do not matter either
    others = ids != 0
    assert torch.equal(apply(y, x, ids, table)[others], full[others])


def test_an_adapter_alone_equals_the_trained_layer(cpp: None) -> None:
    """lora_linear rounds the sum of product and update once; so does this, over the same base product."""
    A, B = random(16, 576, seed=1) * 0.1, random(192, 16, seed=2) * 0.1
    y, x = random(40, 192, seed=3).bfloat16(), random(40, 576, seed=4).bfloat16()
    table = LoraTable([192], 576, 1, torch.bfloat16)
    table.set(0, 0, A, B, 1.7)
    want = y.clone().addmm_(x @ A.bfloat16().T, (1.7 * B).bfloat16().T)
    assert_equal_but_for_order(apply(y, x, torch.zeros(40, dtype=torch.int32), table), want)


def test_set_copies_and_clear_empties(cpp: None) -> None:
    table = LoraTable([8], 4, 2, torch.float32)
    A, B = random(2, 4), random(8, 2)
    table.set(1, 0, A, B, 1.0)
    y, x, ids = torch.zeros(1, 8), torch.ones(1, 4), torch.ones(1, dtype=torch.int32)
    before = apply(y, x, ids, table)
    A.zero_()
    assert before.abs().max() > 0 and torch.equal(apply(y, x, ids, table), before)
    address = table.pointers.data_ptr()
    table.clear(1)
    assert torch.equal(apply(y, x, ids, table), y)
    table.set(1, 0, random(3, 4), random(8, 3), 1.0)
    table.set(1, 0, None, None, 1.0)
    assert torch.equal(apply(y, x, ids, table), y)
    assert table.pointers.data_ptr() == address


def test_a_tape_sees_adapters_that_are_loaded_later(cpp: None) -> None:
    table = LoraTable([8, 8], 4, 2, torch.bfloat16)
    y, x = torch.zeros(2, 16).bfloat16(), random(2, 4).bfloat16()
    ids = torch.tensor([-1, 1], dtype=torch.int32)
    tape = _tape.Tape()
    with tape.record():
        lora_rows_(y, x, ids, table)
    assert not y.any()
    table.set(1, 1, random(3, 4), random(8, 3), 1.0)
    tape.replay()
    assert not y[0].any() and not y[1, :8].any() and y[1, 8:].any()
    y.zero_()
    ids.copy_(ids.flip(0))
    tape.replay()
    assert y[0, 8:].any() and not y[1].any()


def test_ids_outside_the_table_are_no_adapter(cpp: None) -> None:
    table = LoraTable([8], 4, 2, torch.float32)
    y, ids = random(3, 8), torch.tensor([2, -7, 2**31 - 1], dtype=torch.int32)
    assert torch.equal(apply(y, random(3, 4), ids, table), y)
    assert apply(y[:0], random(0, 4), ids[:0], table).shape == (0, 8)


def test_float16_runs_the_reference() -> None:
    table = LoraTable([96, 32, 32], 160, len(RANKS) + 1, torch.float16)
    fill(table)
    y, x, ids = inputs(table)
    want = expected(y, x, ids, table)
    # x A^T and y are rounded once each, 2^-11 of values up to the largest
    torch.testing.assert_close(apply(y, x, ids, table), want, rtol=0, atol=2**-10 * want.abs().max().item())


PROCESSORS = {"haswell": {"avx2", "fma"}, "x86-64": set(), "x86-64-v4": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_builds_for_other_processors(processor: str, monkeypatch: pytest.MonkeyPatch, cpp: None) -> None:
    if not PROCESSORS[processor] <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip(f"this machine cannot run {processor}")
    function = _cpp.load("lora_rows", (f"-march={processor}",)).lora_rows
    function.argtypes, function.restype = _tape.kernel("lora_rows", "lora_rows").argtypes, None
    monkeypatch.setattr(_tape, "kernel", lambda file, name: function)
    for dtype in DTYPES:
        for shape in SHAPES:
            table = LoraTable(*shape, len(RANKS) + 1, dtype)
            fill(table)
            y, x, ids = inputs(table)
            got = apply(y, x, ids, table)
            assert_equal_but_for_order(got, expected(y, x, ids, table))
            rows = [slice(i, i + 1) for i in range(len(y))]
            assert torch.equal(torch.cat([apply(y[row], x[row], ids[row], table) for row in rows]), got)


def test_opcheck(cpp: None) -> None:
    table = LoraTable([33, 7], 65, len(RANKS) + 1, torch.bfloat16)
    fill(table)
    y, x, ids = inputs(table)
    arguments = (y.clone(), x, ids, table.pointers, table.factors, table.offsets)
    torch.library.opcheck(torch.ops.lowbit.lora_rows_, arguments)
    torch.ops.lowbit.lora_rows_(*arguments)
    assert torch.equal(arguments[0], apply(y, x, ids, table))


def test_errors_name_the_argument() -> None:
    table = LoraTable([8, 4], 6, 2, torch.float32)
    ids = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"lora_A, lora_B are \(2, 5\), \(8, 2\); this layer takes \[rank, 6\]"):
        table.set(0, 0, random(2, 5), random(8, 2), 1.0)
    with pytest.raises(ValueError, match="with a rank of 1..256"):
        table.set(0, 0, random(257, 6), random(8, 257), 1.0)
    with pytest.raises(ValueError, match="give both or neither"):
        table.set(0, 0, random(2, 6), None, 1.0)
    with pytest.raises(IndexError, match="slot 2, part 0; this table has 2 slots of 2"):
        table.set(2, 0, None, None, 1.0)
    with pytest.raises(IndexError, match="slot -1"):
        table.clear(-1)
    with pytest.raises(ValueError, match=r"y is torch.float32 \(3, 11\); this table takes .* \[3, 12\]"):
        lora_rows_(random(3, 11), random(3, 6), ids, table)
    with pytest.raises(ValueError, match="x is torch.bfloat16"):
        lora_rows_(random(3, 12), random(3, 6).bfloat16(), ids, table)
    with pytest.raises(ValueError, match="adapter_ids is torch.int64"):
        lora_rows_(random(3, 12), random(3, 6), ids.long(), table)
    with pytest.raises(ValueError, match="num_slots=0; each must be at least 1"):
        LoraTable([8], 6, 0, torch.float32)
    with pytest.raises(TypeError, match="dtype is torch.int8; use one of torch.float32"):
        LoraTable([8], 6, 1, torch.int8)


INTERPRETED = """
import torch
from tests.kernels import test_lora_rows
from tests.kernels.test_lora_rows import LoraTable, apply, expected, fill, inputs
from trainer.kernels.lora_rows import lora_rows_triton

test_lora_rows.RANKS = RANKS = [1, 3, 16, 8, 20]  # a long loop over the rank takes the interpreter seconds
for parts, in_features in (([40, 9], 33), ([300], 130)):
    # float32: sums in another order. float16: x A^T and y are rounded once, 2^-11 each. bfloat16: the interpreter
    # truncates where GPUs round, 2^-7 each.
    for dtype, tolerance in ((torch.float32, 2**-20), (torch.float16, 2**-10), (torch.bfloat16, 2**-6)):
        table = LoraTable(parts, in_features, len(RANKS) + 1, dtype)
        assert not table.pairs
        fill(table)
        y, x, ids = inputs(table, 8)
        ids[:] = torch.tensor([-1, 0, 1, 2, 3, 4, 2, 5])
        want = expected(y, x, ids, table)
        before = y.clone()
        lora_rows_triton(y, x, ids, table.pointers, table.offsets)
        error = (y.double() - want.double()).abs().max() / want.double().abs().max()
        assert error < tolerance, (parts, dtype, error)
        assert torch.equal(y[[0, 7]], before[[0, 7]])  # no adapter, and an empty slot
        if dtype != torch.float16:  # on CPUs float16 goes to the reference
            assert torch.equal(apply(before, x, ids, table), y)
print("interpreted")
"""


def test_triton_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_triton_compiles_for_gpus(dtype: str) -> None:
    pytest.importorskip("triton")
    from tests.kernels.aot import TARGETS, compile_kernel, spilled_registers

    sizes = "in_features num_parts num_slots stride_x_row stride_x_A_row stride_y_row".split()
    types = {"adapter_ids_ptr": "*i32", "pointers_ptr": "*i64", "offsets_ptr": "*i64", **dict.fromkeys(sizes, "i32")}
    types |= dict.fromkeys(("x_ptr", "y_ptr", "x_A_ptr"), f"*{dtype}")
    block_n, block_k = module.SHRINK_TILE
    kernels = {
        module._lora_shrink_kernel: {"MAX_RANK": module.MAX_RANK, "BLOCK_N": block_n, "BLOCK_K": block_k},
        module._lora_expand_kernel: {"MAX_RANK": module.MAX_RANK, "BLOCK_N": module.EXPAND_COLUMNS},
    }
    for target in TARGETS:
        for kernel, constants in kernels.items():
            assert spilled_registers(compile_kernel(kernel, types, constants, target), target) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_gpu(dtype: torch.dtype) -> None:
    table = LoraTable([96, 32, 32], 160, len(RANKS) + 1, dtype, "cuda")
    fill(table)
    y, x, ids = inputs(table)
    want = expected(y, x, ids, table)
    got = apply(y.cuda(), x.cuda(), ids.cuda(), table).cpu()
    # x A^T and y are rounded once each, by half an ulp of values up to the largest
    tolerance = {torch.float32: 2**-20, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * want.abs().max().item())
