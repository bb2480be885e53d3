"""The paged KV cache: writing, attention in mixtures of prompts and decode steps, and equal bits for equal rows."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape, kv_cache
from trainer.kernels import paged_attention as pa
from trainer.kernels.paged_attention import AttentionBatch, KVCache, paged_attention, write_kv

# (dtype of qkv, dtype of the cache, tolerance). The reference sums in another order: float32 rounds 2^-24 of values up
# to 4 some dozens of times. bfloat16 outputs are rounded once, so that a value beside a rounding boundary moves by one
# step, 2^-6 for values of 2 to 4.
KINDS = [
    (torch.float32, torch.float32, 1e-5),
    (torch.bfloat16, torch.bfloat16, 2**-6),
    (torch.float32, torch.int8, 1e-5),
    (torch.bfloat16, torch.int8, 2**-6),
]
kinds = pytest.mark.parametrize(
    ("dtype", "cache_dtype", "tolerance"), KINDS, ids=lambda x: str(x).removeprefix("torch.")
)
# num_heads, num_kv_heads, head_dim, block_size: SmolLM2, a tiny model, one KV head, two strips and a vector and a half,
# heads that end inside a vector
SIZES = [(9, 3, 64, 16), (4, 4, 8, 32), (8, 1, 16, 64), (14, 2, 80, 16), (2, 2, 10, 48)]
# (rows in this call, tokens in the cache): decode, prompt, first token, no rows, chunk, end of a chunk, no tokens
MIXED = [(1, 70), (33, 33), (1, 1), (0, 5), (20, 200), (1, 64), (3, 130), (0, 0)]
FLAGS = [None]
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS += [("-march=haswell",), ("-march=x86-64",)]  # AVX2, and plain vectors of 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A second thread makes small calls wait for each other where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=FLAGS, ids=lambda flags: "native" if flags is None else flags[0].removeprefix("-march="))
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library, compiled for one processor."""
    monkeypatch.delenv("LOWBIT_KERNELS", raising=False)
    library = _cpp.load("paged_attention", request.param)
    if library is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")

    def kernel(file: str, name: str) -> object:
        function = getattr(library, name)
        function.argtypes, function.restype = [_tape.ctypes.c_void_p], None
        return function

    monkeypatch.setattr(_tape, "kernel", kernel)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWBIT_KERNELS", raising=False)
    if _cpp.load("paged_attention") is None:
        pytest.skip("no C++ compiler here")


@dataclass(slots=True)
class Case:
    """Sequences in a cache full of nan, their blocks in random order, and the step that is to be computed."""

    cache: KVCache
    qkv: Tensor
    batch: AttentionBatch
    num_heads: int

    def write(self) -> None:
        write_kv(self.qkv, self.cache, 1, self.batch.slot_mapping, num_heads=self.num_heads)

    def attend(self, sliding_window: int | None = None) -> Tensor:
        options = {"num_heads": self.num_heads, "scale": self.cache.head_dim**-0.5, "sliding_window": sliding_window}
        return paged_attention(self.qkv, self.cache, 1, self.batch, **options)

    def reference(self, sliding_window: int | None = None) -> Tensor:
        options = {"num_heads": self.num_heads, "scale": self.cache.head_dim**-0.5, "sliding_window": sliding_window}
        return pa.paged_attention_reference(self.qkv, self.cache.layers[1], self.batch, **options)


def make_cache(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype, num_blocks: int
) -> KVCache:
    _, num_kv_heads, head_dim, block_size = sizes
    options = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    cache = KVCache.allocate(2, num_blocks, **options, dtype=cache_dtype, compute_dtype=dtype, device="cpu")
    for tensor in cache._tensors():
        tensor.view(torch.uint8).fill_(255)  # nan in all float formats: memory that a freed sequence may have left
    return cache


def make_batch(seqs: list[tuple[int, int]], block_tables: list[list[int]], block_size: int) -> AttentionBatch:
    rows, slots, width = [0], [], max(1, *map(len, block_tables))
    for (num_rows, length), table in zip(seqs, block_tables, strict=True):
        rows.append(rows[-1] + num_rows)
        slots += [table[n // block_size] * block_size + n % block_size for n in range(length - num_rows, length)]
    tables = torch.tensor([table + [-1] * (width - len(table)) for table in block_tables], dtype=torch.int32)
    lengths = torch.tensor([length for _, length in seqs], dtype=torch.int32)
    return AttentionBatch(
        torch.tensor(rows, dtype=torch.int32), lengths, tables, torch.tensor(slots, dtype=torch.int64)
    )


def make_case(
    seqs: list[tuple[int, int]], sizes: tuple[int, int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype
) -> Case:
    """The tokens before the step are in the cache already."""
    num_heads, num_kv_heads, head_dim, block_size = sizes
    generator = torch.Generator().manual_seed(len(seqs))
    counts = [-(-length // block_size) for _, length in seqs]
    free = torch.randperm(sum(counts) + 1, generator=generator).tolist()
    block_tables = [[free.pop() for _ in range(count)] for count in counts]
    cache = make_cache(sizes, dtype, cache_dtype, sum(counts) + 1)
    columns = (num_heads + 2 * num_kv_heads) * head_dim
    before = make_batch([(length - rows, length - rows) for rows, length in seqs], block_tables, block_size)
    past = torch.randn(before.num_tokens, columns, generator=generator).to(dtype)
    write_kv(past, cache, 1, before.slot_mapping, num_heads=num_heads)
    batch = make_batch(seqs, block_tables, block_size)
    return Case(cache, torch.randn(batch.num_tokens, columns, generator=generator).to(dtype), batch, num_heads)


class TestCpp:
    @kinds
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_equals_reference(
        self, cpp: None, sizes: tuple[int, ...], dtype: torch.dtype, cache_dtype: torch.dtype, tolerance: float
    ) -> None:
        case = make_case(MIXED, sizes, dtype, cache_dtype)
        assert case.cache.packed
        case.write()
        for window in (None, 1, 50):
            torch.testing.assert_close(case.attend(window), case.reference(window), atol=tolerance, rtol=0)

    @kinds
    def test_written_values_equal_the_reference_bit_for_bit(
        self, cpp: None, dtype: torch.dtype, cache_dtype: torch.dtype, tolerance: float
    ) -> None:
        case = make_case([(40, 40)], SIZES[0], dtype, cache_dtype)
        case.qkv[3] = 0  # scale 0
        case.qkv[5] *= 1e-40  # subnormal scale
        case.write()
        layer = case.cache.layers[0]
        pa.write_kv_reference(case.qkv, layer, case.batch.slot_mapping, num_heads=9)
        table = case.batch.block_tables[0].tolist()
        for got, want in zip(case.cache.gather(1, table, 40), case.cache.gather(0, table, 40), strict=True):
            assert torch.equal(got, want)
        if cache_dtype != torch.int8:
            k = case.qkv[:, 9 * 64 : 12 * 64].float().view(40, 3, 64)
            assert torch.equal(case.cache.gather(1, table, 40)[0], k)

    @pytest.mark.parametrize("window", [None, 37])
    @kinds
    def test_bits_of_a_row_depend_on_its_own_sequence_alone(
        self, cpp: None, dtype: torch.dtype, cache_dtype: torch.dtype, tolerance: float, window: int | None
    ) -> None:
        """One prompt of 200 tokens: in chunks, alone and among others, by 1 and 2 threads, in other blocks."""
        num_heads, num_kv_heads, head_dim, length = 9, 3, 64, 200
        generator = torch.Generator().manual_seed(0)
        qkv = torch.randn(length, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)

        def run(chunk: int, *, others: bool, threads: int, block_size: int) -> Tensor:
            torch.set_num_threads(threads)
            sizes = num_heads, num_kv_heads, head_dim, block_size
            free = torch.randperm(1024 // block_size, generator=generator).tolist()
            cache, outputs = make_cache(sizes, dtype, cache_dtype, len(free)), []
            tables = [[free.pop() for _ in range(-(-length // block_size))], [free.pop()], [free.pop()]]
            for begin in range(0, length, chunk):
                end = min(length, begin + chunk)
                seqs, rows = [(end - begin, end)], qkv[begin:end]
                if others:
                    seqs = [(5, 5), (1, 1), *seqs]
                    rows = torch.cat([torch.randn(6, qkv.shape[1], generator=generator).to(dtype), rows])
                batch = make_batch(seqs, tables[3 - len(seqs) :][::-1] if others else tables[:1], block_size)
                write_kv(rows, cache, 0, batch.slot_mapping, num_heads=num_heads)
                options = {"num_heads": num_heads, "scale": 0.125, "sliding_window": window}
                outputs.append(paged_attention(rows, cache, 0, batch, **options)[len(rows) - (end - begin) :])
            return torch.cat(outputs)

        want = run(length, others=False, threads=1, block_size=16)
        assert want.isfinite().all()
        for chunk in (1, 7, 16, 64, length):
            for others in (False, True):
                got = run(chunk, others=others, threads=2 if chunk == length else 1, block_size=48 if others else 16)
                assert torch.equal(got, want), (chunk, others)
        assert torch.equal(run(64, others=True, threads=2, block_size=256), want)

    def test_later_tokens_that_are_not_finite_change_nothing(self, cpp: None) -> None:
        case = make_case([(64, 64)], SIZES[0], torch.bfloat16, torch.bfloat16)
        case.write()
        want = case.attend()
        case.qkv[40:] = torch.inf
        case.write()
        assert torch.equal(case.attend()[:40], want[:40])
        assert case.attend()[40:].isnan().all()

    def test_weights_span_the_whole_range_of_exp(self, cpp: None) -> None:
        """Scores fall from 0 to -200 or rise to it: sums are rescaled to nothing, or weights vanish."""
        for sign in (1, -1):
            case = make_case([(130, 130)], (1, 1, 16, 16), torch.float32, torch.float32)
            case.qkv[:, :16], case.qkv[:, 16:32] = 4, 0
            case.qkv[:, 16] = torch.linspace(0, sign * 200, 130)  # scale 1 / 4
            case.write()
            # weights differ by 2 ulp of exp and the rounding of scores up to 200: 2^-24 * 200 and some
            torch.testing.assert_close(case.attend(), case.reference(), atol=5e-5, rtol=0)

    def test_is_as_near_to_the_truth_as_torch(self, cpp: None) -> None:
        """Against float64: the error is at most that of torch's bfloat16 SDPA, which rounds weights as well."""
        case = make_case([(300, 300)], SIZES[0], torch.bfloat16, torch.bfloat16)
        case.write()
        q, k, v = case.qkv.view(1, 300, 15, 64).transpose(1, 2).split((9, 3, 3), dim=1)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        options = {"is_causal": True, "enable_gqa": True}
        truth = sdpa(q.double(), k.double(), v.double(), **options).transpose(1, 2).flatten(2)[0]
        torchs = sdpa(q, k, v, **options).transpose(1, 2).flatten(2)[0]
        assert (case.attend().double() - truth).abs().mean() <= (torchs.double() - truth).abs().mean()

    def test_rows_without_a_sequence_or_keys_are_zero_and_slot_minus_one_is_skipped(self, cpp: None) -> None:
        case = make_case([(2, 40), (1, 33)], SIZES[0], torch.bfloat16, torch.bfloat16)
        before = case.cache.k.view(torch.int16).clone()
        case.batch.slot_mapping.fill_(-1)
        case.write()
        assert torch.equal(case.cache.k.view(torch.int16), before)
        case.batch.cu_seqlens.copy_(torch.tensor([0, 1, 2]))
        case.batch.seq_lens.copy_(torch.tensor([38, 0]))  # the keys before the step are there
        got = case.attend()
        assert got[0].abs().sum() > 0 and (got[1:] == 0).all()

    def test_a_tape_reads_sizes_when_it_replays(self, compiler: None) -> None:
        case = make_case([(1, 20), (1, 90)], SIZES[0], torch.bfloat16, torch.bfloat16)
        tape = _tape.Tape()
        with tape.record():
            case.write()
            out = case.attend()
        tables = case.batch.block_tables.clone()
        for lengths in ((20, 90), (21, 1), (5, 88)):
            case.qkv.copy_(torch.randn(case.qkv.shape))
            case.batch.block_tables.copy_(tables if lengths[1] > 1 else torch.roll(tables, 1, 0))
            case.batch.seq_lens.copy_(torch.tensor(lengths))
            table = case.batch.block_tables
            slots = [int(table[b, (n - 1) // 16]) * 16 + (n - 1) % 16 for b, n in enumerate(lengths)]
            case.batch.slot_mapping.copy_(torch.tensor(slots))
            tape.replay()
            torch.testing.assert_close(out, case.reference(), atol=2**-6, rtol=0)  # as in KINDS


class TestInt8:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_error_of_a_small_head_beside_a_large_one(self, dtype: torch.dtype) -> None:
        """Each head of each token has a scale: an error is at most half a step, absmax / 254, of its own head."""
        case = make_case([(50, 50)], SIZES[0], dtype, torch.int8)
        case.qkv[:, 9 * 64 : 10 * 64] *= 1000
        case.qkv[::2, 13 * 64 :] *= 1000
        case.write()
        got = case.cache.gather(1, case.batch.block_tables[0].tolist(), 50)
        for dense, want in zip(got, case.qkv[:, 9 * 64 :].float().view(50, 2, 3, 64).unbind(1), strict=True):
            limit = want.abs().amax(-1, keepdim=True) / 254 * (1 + 1e-5)  # and the roundings of scale and product
            assert ((dense - want).abs() <= limit).all()

    def test_attention_error(self) -> None:
        """Values of 1 step err by half a step, keys too: scores move by |q| |k| / 254 / sqrt(3) or so; 3 % in all."""
        exact = make_case([(1, 200)], SIZES[0], torch.float32, torch.float32)
        codes = make_case([(1, 200)], SIZES[0], torch.float32, torch.int8)
        exact.write(), codes.write()
        assert (exact.attend() - codes.attend()).abs().max() < 0.03 * exact.attend().abs().max()


class TestCache:
    @kinds
    def test_block_bytes(self, dtype: torch.dtype, cache_dtype: torch.dtype, tolerance: float) -> None:
        for sizes in SIZES:
            cache = make_cache(sizes, dtype, cache_dtype, 3)
            options = {"num_kv_heads": sizes[1], "head_dim": sizes[2], "block_size": sizes[3]}
            one = KVCache.block_bytes(2, **options, dtype=cache_dtype, compute_dtype=dtype, device="cpu")
            assert cache.nbytes == 3 * one

    @kinds
    @pytest.mark.parametrize("layouts", ["cpu cpu", "cpu reference", "reference cpu", "reference reference"])
    def test_copies(
        self,
        compiler: None,
        monkeypatch: pytest.MonkeyPatch,
        layouts: str,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        tolerance: float,
    ) -> None:
        """Swap out, copy on write, in the layouts of CPUs and GPUs."""
        source, destination = layouts.split()
        monkeypatch.setenv("LOWBIT_KERNELS", source)
        case = make_case([(40, 40)], SIZES[4], dtype, cache_dtype)
        case.write()
        table = case.batch.block_tables[0].tolist()
        want = case.cache.gather(1, table, 40)
        monkeypatch.setenv("LOWBIT_KERNELS", destination)
        other = make_cache(SIZES[4], dtype, cache_dtype, 5)
        assert other.packed == (destination == "cpu")
        case.cache.copy_to(other, [(table[0], 4)])
        other.copy_blocks([(4, 0), (4, 2)])
        for block in (4, 0, 2):
            for got, expected in zip(other.gather(1, [block], 40), want, strict=True):
                assert torch.equal(got, expected)
        untouched = other.k_scale if cache_dtype == torch.int8 else other.v
        assert untouched[:, 1].isnan().all()

    def test_copies_refuse(self) -> None:
        cache = make_cache(SIZES[0], torch.float32, torch.float32, 3)
        with pytest.raises(ValueError, match=r"destination blocks \[3\] are not all in 0..2"):
            cache.copy_blocks([(0, 3)])
        with pytest.raises(ValueError, match="cannot be copied to KVCache.*dtype=torch.int8"):
            cache.copy_to(make_cache(SIZES[0], torch.float32, torch.int8, 3), [(0, 0)])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"block_size": 8}, "block_size=8 is not a multiple of 16 up to 256"),
            ({"block_size": 512}, "block_size=512 is not a multiple of 16 up to 256"),
            ({"head_dim": 65}, "head_dim=65 is not an even number up to 256"),
            ({"dtype": torch.bfloat16}, "dtype=torch.bfloat16 of a KV cache is neither compute_dtype=torch.float32"),
            ({"compute_dtype": torch.float64}, "compute_dtype=torch.float64 is unknown"),
            ({"num_kv_heads": 0}, "num_kv_heads=0: each must be at least 1"),
        ],
    )
    def test_allocate_refuses(self, change: dict[str, object], message: str) -> None:
        sizes = {"num_kv_heads": 1, "head_dim": 16, "block_size": 16, "dtype": torch.float32}
        options = {**sizes, "compute_dtype": torch.float32, "device": "cpu", **change}
        with pytest.raises(ValueError, match=message):
            KVCache.allocate(1, 1, **options)

    def test_calls_refuse(self) -> None:
        case = make_case([(1, 20)], SIZES[0], torch.float32, torch.float32)
        spread = torch.zeros(1, 2 * 960)[:, ::2]  # columns are not contiguous
        for qkv in (case.qkv[:, :-1], case.qkv.bfloat16(), case.qkv.expand(2, -1), spread):
            with pytest.raises(ValueError, match=r"qkv is torch.* need row-contiguous \[1, 960\] of the cache's"):
                write_kv(qkv, case.cache, 1, case.batch.slot_mapping, num_heads=9)
        codes = make_case([(1, 20)], SIZES[0], torch.float32, torch.int8)
        if codes.cache.packed:
            with pytest.raises(ValueError, match="qkv is torch.float16"):
                write_kv(codes.qkv.half(), codes.cache, 1, codes.batch.slot_mapping, num_heads=9)
        with pytest.raises(ValueError, match="num_heads=10 "):
            write_kv(case.qkv, case.cache, 1, case.batch.slot_mapping, num_heads=10)
        with pytest.raises(ValueError, match="cu_seqlens is torch.int64"):
            AttentionBatch(*(getattr(case.batch, name).long() for name in case.batch.__slots__[:4]))


class TestOps:
    @pytest.mark.parametrize("implementation", ["auto", "reference"])
    @pytest.mark.parametrize("cache_dtype", [torch.float32, torch.int8])
    def test_opcheck(self, monkeypatch: pytest.MonkeyPatch, implementation: str, cache_dtype: torch.dtype) -> None:
        monkeypatch.setenv("LOWBIT_KERNELS", implementation)
        case = make_case([(3, 20), (1, 5)], SIZES[0], torch.float32, cache_dtype)
        case.write()
        layer, batch = case.cache.layers[1], case.batch
        tensors = layer.k, layer.v, layer.k_scale, layer.v_scale
        rows = batch.cu_seqlens, batch.seq_lens, batch.block_tables, batch.slot_mapping
        torch.library.opcheck(torch.ops.lowbit.paged_attention, (case.qkv, *tensors, *rows, 9, 0.125, None))
        assert torch.equal(torch.ops.lowbit.paged_attention(case.qkv, *tensors, *rows, 9, 0.125, 7), case.attend(7))
        for tensor in tensors:
            if tensor is not None:
                tensor.zero_()  # opcheck compares tensors, and nan is not nan
        torch.library.opcheck(torch.ops.lowbit.write_kv, (case.qkv, batch.slot_mapping, *tensors, 9))

    @pytest.mark.parametrize("cache_dtype", [torch.float16, torch.int8])
    def test_float16_on_a_cpu_is_the_references(self, cache_dtype: torch.dtype) -> None:
        case = make_case(MIXED, SIZES[0], torch.float16, cache_dtype)
        case.write()
        assert not case.cache.packed and torch.equal(case.attend(), case.reference())

    def test_reference_equals_sdpa(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOWBIT_KERNELS", "reference")
        case = make_case([(40, 40)], SIZES[0], torch.float32, torch.float32)
        case.write()
        q, k, v = case.qkv.view(1, 40, 15, 64).transpose(1, 2).split((9, 3, 3), dim=1)
        distance = torch.arange(40)[:, None] - torch.arange(40)
        for window in (None, 1, 9):
            mask = (distance >= 0) & (distance < (window or 40))
            want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            # two float32 softmaxes in different orders: some roundings of 2^-24 of values below 4
            torch.testing.assert_close(case.attend(window), want.transpose(1, 2).flatten(2)[0], atol=1e-5, rtol=0)


INTERPRETED = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("cases", sys.argv[1])
cases = importlib.util.module_from_spec(spec)
sys.modules["cases"] = cases
spec.loader.exec_module(cases)

# float32: sums in another order. float16: weights and outputs rounded, 2^-11 of values below 4, each.
kinds = [(torch.float32, torch.float32, 1e-5), (torch.float32, torch.int8, 1e-5),
         (torch.float16, torch.float16, 2**-8), (torch.float16, torch.int8, 2**-8)]
torch.set_num_threads(1)
sizes_of_kinds = [(9, 3, 64, 16), (2, 2, 10, 48), (20, 1, 16, 32), (9, 3, 64, 16)]  # 20 heads: over 16 rows a token
for sizes, kind in [*zip(sizes_of_kinds, kinds), *zip(sizes_of_kinds[1:], kinds)]:
    for dtype, cache_dtype, tolerance in [kind]:
        case = cases.make_case([(1, 50), (9, 20), (0, 3), (1, 1), (7, 33)], sizes, dtype, cache_dtype)
        assert not case.cache.packed
        case.batch.slot_mapping[3] = -1
        case.write()
        layer = case.cache.layers[0]
        cases.pa.write_kv_reference(case.qkv, layer, case.batch.slot_mapping, num_heads=sizes[0])
        for b, rows in ((1, 20), (4, 33)):
            table = case.batch.block_tables[b].tolist()
            got, want = case.cache.gather(1, table, rows), case.cache.gather(0, table, rows)
            for x, y in zip(got, want):
                x, y = x[-6:], y[-6:]  # what the step wrote behind the skipped row
                assert torch.equal(x, y), (sizes, dtype, cache_dtype)
        case.batch.slot_mapping[3] = case.batch.slot_mapping[2] + 1
        case.write()
        for window in (None, 9):
            got, want = case.attend(window), case.reference(window)
            torch.testing.assert_close(got, want, atol=tolerance, rtol=0, msg=f"{sizes} {dtype} {cache_dtype} {window}")

# Chunks of 32 keys: lengths around their ends, no rows, no tokens. Split, in one piece, alone: equal bits.
cases.pa.CHUNK, cases.pa.MERGED_CHUNKS = 32, 2
lengths = [1, 31, 32, 33, 64, 100]
for sizes, kind in zip([(6, 2, 16, 16), (4, 2, 8, 32), (10, 1, 16, 32), (2, 1, 10, 48)], kinds):
    dtype, cache_dtype, tolerance = kind
    step = cases.make_case([(1, n) for n in lengths] + [(0, 0), (0, 70)], sizes, dtype, cache_dtype)
    step.write()
    for window in (None, 40) if dtype == torch.float32 else (40,):
        got = step.attend(window)
        torch.testing.assert_close(got, step.reference(window), atol=tolerance, rtol=0, msg=f"{sizes} {kind} {window}")
        limit, cases.pa.SPLIT_BYTES = cases.pa.SPLIT_BYTES, 0
        assert torch.equal(step.attend(window), got), ("one piece", sizes, kind, window)
        cases.pa.SPLIT_BYTES = limit
        for i in (3, 5):
            rows = torch.tensor([0, 1], dtype=torch.int32)
            table, slots = step.batch.block_tables[i : i + 1], step.batch.slot_mapping[i : i + 1]
            batch = cases.AttentionBatch(rows, step.batch.seq_lens[i : i + 1], table.contiguous(), slots)
            alone = cases.Case(step.cache, step.qkv[i : i + 1], batch, step.num_heads)
            assert torch.equal(alone.attend(window), got[i : i + 1]), ("alone", sizes, kind, window, i)

# A captured step: rows of no sequence, a sequence of no tokens, more than one row of a sequence.
empty = [(0, 0)] * 5
step = cases.make_case([(3, 100), (1, 80), *empty], (6, 2, 16, 16), torch.float32, torch.int8)
step.write()
padded = torch.cat([step.qkv, step.qkv[:2]])
seq_lens = step.batch.seq_lens.clone()
cu_seqlens = torch.tensor([0, 3, 4, 5, 5, 5, 5, 5], dtype=torch.int32)  # row 4: a sequence of no tokens; row 5: of none
slots = torch.cat([step.batch.slot_mapping, torch.tensor([-1, -1])])
batch = cases.AttentionBatch(cu_seqlens, seq_lens, step.batch.block_tables, slots)
got = cases.Case(step.cache, padded, batch, 6).attend()
torch.testing.assert_close(got[:4], step.reference(), atol=1e-5, rtol=0)
assert not got[4:].any() and got.shape[0] == 6
print("interpreted")
"""


def test_interpreter_equals_reference() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    command = [sys.executable, "-c", INTERPRETED, __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


POINTERS = {"k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32", "slot_mapping_ptr": "*i64", "stats_ptr": "*fp32"}
POINTERS |= {"acc_ptr": "*fp32", **dict.fromkeys(("cu_seqlens_ptr", "seq_lens_ptr", "block_tables_ptr"), "*i32")}
COUNTS = "num_seqs num_kv_heads num_heads block_size sliding_window stride_table_row splits".split()


def spilled(compiled: object, target: object) -> int:
    """Registers spilled to memory. AMD's scalar registers spill to lanes of a vector register, which is harmless."""
    from tests.kernels import aot

    return aot.resources(compiled, target).spilled


@pytest.mark.parametrize("cache", ["bf16", "fp16", "fp32", "i8"])
@pytest.mark.parametrize("target", range(4))
def test_ahead_of_time(target: int, cache: str) -> None:
    """For real GPUs, without spills: strides are constants, as where Triton knows that they divide by 16.

    On NVIDIA decode steps and tiles of prompts multiply with one instruction: what their equal bits rest on.
    """
    triton = pytest.importorskip("triton")
    from tests.kernels import aot

    gpu, dtype, tl = aot.TARGETS[target], "bf16" if cache == "i8" else cache, triton.language
    dot = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[dtype]
    types = {name: f"*{dtype}" for name in ("qkv_ptr", "out_ptr")} | POINTERS | dict.fromkeys(COUNTS, "i32")
    types |= {"k_ptr": f"*{cache}", "v_ptr": f"*{cache}", "scale": "fp32"}

    def check(kernel: object, constants: dict[str, object], **options: int) -> None:
        used = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        if constants.get("SPLIT"):
            used["out_ptr"] = "*fp32"
        compiled = aot.compile_kernel(kernel, used, constants, gpu, aligned=("block_size",), **options)
        assert spilled(compiled, gpu) == 0, (kernel, constants)
        instructions.update(re.findall(r"versionMajor = (\d).*?instrShape = (\[[\d, ]+\])", compiled.asm["ttgir"]))

    instructions: set[tuple[str, str]] = set()
    # (head_dim, decode, split)
    kinds = [(64, True, True), (128, True, True), (128, True, False), (128, False, False)]
    for head_dim, decode, split in kinds if cache in ("bf16", "i8") else [(64, True, True), (64, False, False)]:
        tile = pa._default_tile(3, head_dim, dot.primitive_bitwidth // 8, decode=decode, int8=cache == "i8")
        num_warps = tile.pop("num_warps")
        constants = {"HEAD_DIM": head_dim, "INT8": cache == "i8", "stride_qkv_row": 15 * head_dim, "GROUP": 3}
        constants |= {"stride_out_row": 9 * head_dim, "DOT": dot, "CHUNK": pa.CHUNK, "SPLIT": split, **tile}
        check(pa._paged_attention_kernel, constants, num_warps=num_warps)
    if gpu.backend == "cuda":
        assert instructions == (set() if dtype == "fp32" else {("2", "[16, 8]")}), instructions
    sizes = {"HEAD_DIM": head_dim, "BLOCK_K": head_dim}
    check(kv_cache._write_kv_kernel, {**sizes, "INT8": cache == "i8", "stride_qkv_row": 15 * head_dim})
    merging = {"stride_out_row": 9 * head_dim, "CHUNK": pa.CHUNK, "MERGED_CHUNKS": pa.MERGED_CHUNKS}
    check(pa._merge_kernel, sizes | merging, num_warps=1)
