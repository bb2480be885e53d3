"""4-bit codebooks: NF4 against the paper and bitsandbytes; every codebook against the reference and float64."""

import platform
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape, codebook4, codebook4_linear, nf4
from trainer.kernels.double_quant import DYNAMIC_MAP

# Rows that end on a block, inside a block, inside a byte; odd numel; one element; several nested blocks of scales.
SHAPES = [
    *[(1, 64), (2, 96), (3, 80), (5, 48), (7, 33), (2, 16), (64, 48), (96, 64), (33, 65)],
    *[(1, 1), (1, 1023), (40, 512), (200, 640)],  # the last is shared between threads
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODEBOOKS = list(codebook4.CODEBOOKS)
FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]
# Weights of [5, 96] in blocks of 64 that rounding, scales and signs may get wrong.
VALUES = {
    "zeros": lambda w: torch.zeros_like(w),
    "one-hot": lambda w: torch.zeros_like(w).index_fill_(1, torch.tensor([70]), 1.0),
    "constant": lambda w: torch.full_like(w, 0.3),
    "all-negative": lambda w: -w.abs() - 0.1,
    "1e-39": lambda w: w.clamp(-3, 3) * 1e-39,  # a subnormal absmax
    "7e4": lambda w: w.clamp(-1, 1) * 7e4,  # beyond float16
    "1e38": lambda w: w.clamp(-3, 3) * 1e38,
    "minus zero": lambda w: torch.where(w > 0, w, -0.0),
    "both zeros": lambda w: w * torch.tensor([1.0, 1e-3, -1e-3]).repeat(32),  # rounds to 0 from above and from below
}


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ libraries, compiled for one processor: AVX512 or what is here, AVX2, plain C++."""
    if _cpp.load("codebook4") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    kernel, flags = _tape.kernel, request.param
    monkeypatch.setattr(_tape, "kernel", lambda file, name: kernel(file, name, *flags))


def make_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 10_000 + shape[1])
    return torch.randn(shape, generator=generator).to(dtype)


def pack(
    weight: Tensor, *, block_size: int = 64, double_quant: bool = False, codebook: str = "nf4"
) -> codebook4.CodebookWeight:
    packed, absmax = codebook4.codebook_quantize_reference(weight, codebook=codebook, block_size=block_size)
    scales = nf4.quantize_absmax(absmax) if double_quant else (absmax, None, None)
    return codebook4.CodebookWeight(packed, *scales, *weight.shape, block_size, codebook)


def op_arguments(weight: codebook4.CodebookWeight) -> tuple[Tensor | None, ...]:
    return weight.packed, weight.absmax, weight.nested_absmax, weight.nested_offset


class TestFormat:
    def test_golden_bytes(self) -> None:
        """By hand: absmax 2, so 2 -> 15, -2 -> 0, 0 -> 7; 1 / 2 = 0.5 lies below the threshold 0.5017 -> 12."""
        weight = torch.zeros(1, 32)
        weight[0, :4] = torch.tensor([2.0, -2.0, 0.0, 1.0])
        packed, absmax = nf4.nf4_quantize(weight, block_size=32)
        assert absmax.tolist() == [2.0]
        assert packed.tolist() == [15 << 4 | 0, 7 << 4 | 12, *[7 << 4 | 7] * 14]
        dense = nf4.nf4_dequantize(packed, absmax, out_features=1, in_features=32, block_size=32, dtype=torch.float32)
        assert dense[0, :5].tolist() == [2.0, -2.0, 0.0, 2 * nf4.NF4_CODEBOOK[12], 0.0]

    def test_codebook_values_keep_their_codes_and_ties_go_down(self) -> None:
        codebook = torch.tensor(nf4.NF4_CODEBOOK)
        ties = (codebook[:-1] + codebook[1:]) / 2
        packed, _ = nf4.nf4_quantize(torch.cat([codebook, ties, torch.ones(1)])[None], block_size=32)
        codes = torch.stack([packed >> 4, packed & 15], 1).view(-1).tolist()
        assert codes == [*range(16), *range(15), 15]

    def test_codebook_is_the_papers(self) -> None:
        """arXiv:2305.14314, appendix E: 16 values from -1 to 1, exactly one of them 0."""
        assert len(nf4.NF4_CODEBOOK) == 16 and list(nf4.NF4_CODEBOOK) == sorted(nf4.NF4_CODEBOOK)
        assert nf4.NF4_CODEBOOK[0] == -1 and nf4.NF4_CODEBOOK[7] == 0 and nf4.NF4_CODEBOOK[15] == 1

    def test_odd_numel_pads_with_the_code_of_zero(self) -> None:
        packed, absmax = nf4.nf4_quantize(torch.ones(1, 1), block_size=64)
        assert packed.tolist() == [15 << 4 | 7] and absmax.tolist() == [1.0]

    def test_zeros(self) -> None:
        packed, absmax = nf4.nf4_quantize(torch.zeros(2, 64), block_size=64)
        assert absmax.tolist() == [0.0, 0.0] and packed.unique().tolist() == [7 << 4 | 7]

    @pytest.mark.parametrize("block_size", [32, 64, 4096])
    def test_error_is_within_half_the_widest_gap(self, block_size: int) -> None:
        """The codebook's widest gap is its lowest, 1 - 0.6962: no weight is further than 0.152 absmax from an entry."""
        weight = make_weight((40, 512))
        packed = pack(weight, block_size=block_size)
        error = (
            (nf4.nf4_dequantize_reference(packed, dtype=torch.float32) - weight).abs().view(-1, min(block_size, 512))
        )
        scales = packed.absmax.repeat_interleave(max(1, block_size // 512))
        assert (error.amax(1) <= 0.152 * scales).all()


class TestBitsandbytes:
    """Equal bytes, on the shapes where bitsandbytes is right on CPUs: rows that end on a block."""

    @pytest.fixture(scope="class")
    def functional(self) -> object:
        return pytest.importorskip("bitsandbytes.functional")

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("shape", "block_size"), [((7, 64), 64), ((33, 192), 32), ((128, 256), 128), ((4, 4096), 4096)]
    )
    def test_codes_scales_and_weights(
        self, functional: object, shape: tuple[int, int], block_size: int, dtype: torch.dtype
    ) -> None:
        weight = make_weight(shape, dtype)
        weight[0, :block_size] = 0
        packed, absmax = nf4.nf4_quantize(weight, block_size=block_size)
        want, state = functional.quantize_4bit(
            weight, blocksize=block_size, quant_type="nf4", compress_statistics=False
        )
        assert torch.equal(packed, want.view(-1)) and torch.equal(absmax, state.absmax)
        sizes = {"out_features": shape[0], "in_features": shape[1], "block_size": block_size}
        dense = nf4.nf4_dequantize(packed, absmax, **sizes, dtype=dtype)
        assert torch.equal(dense, functional.dequantize_4bit(want, state))

    @pytest.mark.parametrize("num_blocks", [1, 255, 256, 257, 5000])  # around one nested block of 256, and several
    def test_double_quant(self, functional: object, num_blocks: int) -> None:
        weight = make_weight((num_blocks, 64))
        _, absmax = nf4.nf4_quantize(weight, block_size=64)
        codes, nested_absmax, nested_offset = nf4.quantize_absmax(absmax)
        _, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
        assert torch.equal(codes, state.absmax)
        assert torch.equal(nested_absmax, state.state2.absmax) and torch.equal(nested_offset, state.offset)
        want = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
        assert torch.equal(nf4.dequantize_absmax(codes, nested_absmax, nested_offset), want)

    def test_dynamic_map(self, functional: object) -> None:
        assert torch.equal(DYNAMIC_MAP, functional.create_dynamic_map())


def assert_dequantizes_as_the_reference(packed: codebook4.CodebookWeight, dtype: torch.dtype) -> None:
    want = codebook4.codebook_dequantize_reference(packed, dtype=dtype)
    assert torch.equal(codebook4.codebook_dequantize_cpu(packed, dtype=dtype), want)


def assert_quantizes_as_the_reference(weight: Tensor, codebook: str, block_size: int) -> None:
    got = codebook4.codebook_quantize_cpu(weight, codebook=codebook, block_size=block_size)
    want = codebook4.codebook_quantize_reference(weight, codebook=codebook, block_size=block_size)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("codebook", CODEBOOKS)
class TestCpuEqualsReference:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_quantize(self, cpp: None, shape: tuple[int, int], codebook: str) -> None:
        for block_size in (32, 64, 4096):
            for dtype in DTYPES:
                weight = make_weight(shape, dtype)
                weight.view(-1)[:32] = 0
                assert_quantizes_as_the_reference(weight, codebook, block_size)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_dequantize(self, cpp: None, shape: tuple[int, int], codebook: str) -> None:
        for block_size in (32, 64, 4096):
            for double_quant in (False, True):
                options = {"block_size": block_size, "double_quant": double_quant, "codebook": codebook}
                packed = pack(make_weight(shape), **options)
                for dtype in DTYPES:
                    assert_dequantizes_as_the_reference(packed, dtype)

    @pytest.mark.parametrize("values", VALUES)
    def test_values(self, cpp: None, values: str, codebook: str) -> None:
        weight = VALUES[values](make_weight((5, 96)))
        for dtype in (torch.float32, torch.bfloat16):
            assert_quantizes_as_the_reference(weight.to(dtype), codebook, 64)
        for dtype in DTYPES:  # float16 overflows to inf, here as in the reference: the public function refuses
            assert_dequantizes_as_the_reference(pack(weight, codebook=codebook), dtype)

    @pytest.mark.parametrize("scale", [3e-6, 6e4])  # subnormals of float16, and its top
    def test_dequantize_extremes_of_float16(self, cpp: None, scale: float, codebook: str) -> None:
        packed = pack(make_weight((4, 64)).clamp(-1, 1) * scale, codebook=codebook)
        assert_dequantizes_as_the_reference(packed, torch.float16)

    # float32: sums in another order, 1023 terms of eps 6e-8. bfloat16: one rounding of the output, 2^-9, and sums.
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_linear(
        self, cpp: None, shape: tuple[int, int], dtype: torch.dtype, tolerance: float, codebook: str
    ) -> None:
        for block_size, double_quant in ((32, False), (64, True), (128, False)):
            options = {"block_size": block_size, "double_quant": double_quant, "codebook": codebook}
            packed = pack(make_weight(shape), **options)
            dense = codebook4.codebook_dequantize_reference(packed, dtype=dtype).double()
            for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9):  # each has its own code; 9 multiplies a dense weight
                x = make_weight((rows, shape[1]), dtype)
                want = x.double() @ dense.T
                error = (codebook4_linear.codebook_linear_cpu(x, packed).double() - want).abs().max()
                assert error <= tolerance * want.abs().max()

    @pytest.mark.parametrize("values", VALUES)
    def test_linear_of_values(self, cpp: None, values: str, codebook: str) -> None:
        packed = pack(VALUES[values](make_weight((5, 96))), codebook=codebook)
        # bfloat16 rounds the output once, 2^-9 of it, and the float32 sum of 96 terms less.
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
            dense = codebook4.codebook_dequantize_reference(packed, dtype=dtype).double()
            for rows in (1, 2, 16, 17):
                x = make_weight((rows, 96), dtype).clamp(-0.01, 0.01)  # 96 terms of 3e38 stay finite
                want = x.double() @ dense.T
                terms = x.double().abs() @ dense.abs().T
                # AVX512-BF16 takes subnormal weights, inputs and products for zeros: 2^-126 of error a term at most.
                bound = tolerance * terms + 96 * 2.0**-126
                got = codebook4_linear.codebook_linear_cpu(x, packed).double()
                assert ((got - want).abs() <= bound).all()

    def test_threads_do_not_change_results(self, cpp: None, codebook: str) -> None:
        weight = make_weight((301, 512))
        packed = pack(weight, double_quant=True, codebook=codebook)
        x, threads = make_weight((2, 512)), torch.get_num_threads()

        def run() -> tuple[Tensor, ...]:
            dense = codebook4.codebook_dequantize_cpu(packed, dtype=torch.bfloat16)
            codes = codebook4.codebook_quantize_cpu(weight, codebook=codebook, block_size=64)
            return codebook4_linear.codebook_linear_cpu(x, packed), dense, *codes

        try:
            torch.set_num_threads(1)
            alone = run()
            torch.set_num_threads(3)
            assert all(map(torch.equal, run(), alone))
        finally:
            torch.set_num_threads(threads)

    def test_large_outputs_are_written_past_the_caches(self, cpp: None, codebook: str) -> None:
        """64 MiB, beyond most last caches, and from an odd address too, where plain stores must serve."""
        packed = pack(make_weight((1, 4096)), double_quant=True, codebook=codebook)
        rows = 4096
        weight = codebook4.CodebookWeight(
            packed.packed.repeat(rows), packed.plain_absmax().repeat(rows), None, None, rows, 4096, 64, codebook
        )
        want = codebook4.codebook_dequantize_reference(packed, dtype=torch.float32).expand(rows, -1)
        memory = torch.full((rows * 4096 + 16,), -1.0)
        for offset in (0, 1):
            out = memory[offset : offset + rows * 4096].view(rows, 4096)
            codebook4.codebook_dequantize_into(weight, out)
            assert torch.equal(out, want) and (memory[offset + rows * 4096 :] == -1).all()


class TestDequantizeInto:
    @pytest.mark.parametrize("implementation", ["reference", "auto"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_of_a_larger_matrix(
        self, dtype: torch.dtype, implementation: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOWBIT_KERNELS", implementation)
        packed = pack(make_weight((7, 33)), double_quant=True)
        out = torch.full((12, 33), -1.0, dtype=dtype)
        nf4.nf4_dequantize_into(packed, out[3:10])
        assert torch.equal(out[3:10], codebook4.codebook_dequantize_reference(packed, dtype=dtype))
        assert (out[:3] == -1).all() and (out[10:] == -1).all()

    def test_what_does_not_fit_is_refused(self) -> None:
        packed = pack(make_weight((7, 32)))
        for out in (torch.empty(7, 64)[:, :32], torch.empty(8, 32), torch.empty(32, 7).T):
            with pytest.raises(ValueError, match=r"needs contiguous \(7, 32\) on cpu; give rows of one matrix"):
                nf4.nf4_dequantize_into(packed, out)
        with pytest.raises(TypeError, match="out is torch.float64"):
            nf4.nf4_dequantize_into(packed, torch.empty(7, 32).double())
        with pytest.raises(ValueError, match="absmax=70000 exceeds float16's 65504"):
            nf4.nf4_dequantize_into(pack(torch.full((1, 64), 7e4)), torch.empty(1, 64).half())


class TestLinear:
    @pytest.mark.parametrize("rows", [1, 20])  # fused, and through a dense weight
    def test_gradient_equals_the_dense_one(self, rows: int) -> None:
        packed = pack(make_weight((12, 96)), double_quant=True)
        x, dense_x = (make_weight((rows, 96)).view(rows, 1, 96).requires_grad_() for _ in range(2))
        y = nf4.nf4_linear(x, *op_arguments(packed), out_features=12, block_size=64)
        dense = dense_x @ nf4.nf4_dequantize_reference(packed, dtype=torch.float32).T
        grad = make_weight((rows, 12)).view(rows, 1, 12)
        y.backward(grad)
        dense.backward(grad)
        assert torch.equal(x.grad, dense_x.grad)  # the same product of the same numbers

    def test_nothing_dense_is_saved_for_backward(self) -> None:
        packed = pack(make_weight((64, 128)))
        x = make_weight((16, 128)).requires_grad_()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            nf4.nf4_linear(x, *op_arguments(packed), out_features=64, block_size=64)
        # the packed weight has an eighth of the float32 one's bytes; nothing saved may be larger than it
        assert saved and max(t.nbytes for t in saved if t is not None) == packed.packed.nbytes

    @pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
    def test_no_rows(self, shape: tuple[int, ...]) -> None:
        packed = pack(make_weight((5, 64)))
        y = nf4.nf4_linear(torch.empty(shape), *op_arguments(packed), out_features=5, block_size=64)
        assert y.shape == (*shape[:-1], 5)

    def test_weight_is_never_changed(self) -> None:
        """A forward must not repack its buffers: a checkpoint taken after it would be corrupt."""
        packed = pack(make_weight((128, 96)), double_quant=True)
        before = [t.clone() for t in op_arguments(packed)]
        for rows in (1, 20):
            nf4.nf4_linear(make_weight((rows, 96)), *op_arguments(packed), out_features=128, block_size=64)
        assert all(map(torch.equal, before, op_arguments(packed)))


class TestOps:
    @pytest.mark.parametrize("double_quant", [False, True])
    def test_opcheck(self, double_quant: bool) -> None:
        weight = make_weight((6, 96))
        packed = pack(weight, double_quant=double_quant)
        arguments = op_arguments(packed)
        x = make_weight((2, 96)).requires_grad_()
        torch.library.opcheck(torch.ops.lowbit.codebook_quantize.default, (weight, "nf4", 64))
        sizes = 6, 96, 64, "nf4", torch.bfloat16
        torch.library.opcheck(torch.ops.lowbit.codebook_dequantize.default, (*arguments, *sizes))
        torch.library.opcheck(torch.ops.lowbit.codebook_linear.default, (x, *arguments, 6, 64, "nf4"))

    def test_compiles_without_a_graph_break(self) -> None:
        packed = pack(make_weight((12, 96)), double_quant=True)

        def loss(x: Tensor) -> Tensor:
            y = nf4.nf4_linear(x, *op_arguments(packed), out_features=12, block_size=64)
            dense = nf4.nf4_dequantize(
                *op_arguments(packed), out_features=12, in_features=96, block_size=64, dtype=x.dtype
            )
            return (y - 2 * (x @ dense.T)).square().sum()

        x, compiled_x = (make_weight((2, 96)).requires_grad_() for _ in range(2))
        loss(x).backward()
        torch.compile(loss, backend="aot_eager", fullgraph=True)(compiled_x).backward()
        assert torch.equal(x.grad, compiled_x.grad)  # the same ops in the same order

    @pytest.mark.parametrize(
        "view",
        [lambda w: w.T, lambda w: w[:, ::2], lambda w: w.view(-1)[64:].view(-1, 64), lambda w: w.expand(2, 128, 64)],
    )
    def test_any_strides_equal_contiguous(self, view: Callable[[Tensor], Tensor]) -> None:
        weight = view(make_weight((128, 64)))
        got, want = (nf4.nf4_quantize(w, block_size=64) for w in (weight, weight.contiguous()))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])

    def test_strided_input_of_linear(self) -> None:
        packed = pack(make_weight((8, 64)))
        for x in (make_weight((4, 128))[:, ::2], make_weight((64, 4)).T, make_weight((5, 64))[1:]):
            got, want = (codebook4_linear.codebook_linear(rows, packed) for rows in (x, x.contiguous().clone()))
            assert torch.equal(got, want)


class TestErrors:
    def test_codebook(self) -> None:
        with pytest.raises(ValueError, match="codebook='nf3' is unknown; use one of nf4, fp4"):
            codebook4.codebook_quantize(torch.ones(1, 64), codebook="nf3", block_size=64)

    @pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
    @pytest.mark.parametrize("implementation", ["reference", "auto"])
    def test_not_finite(self, bad: float, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOWBIT_KERNELS", implementation)
        weight = torch.zeros(4, 80)
        weight[2, 5] = bad
        with pytest.raises(ValueError, match=rf"weight\[2, 5\] \(flat index 165\) is {bad}"):  # 2 * 80 + 5
            nf4.nf4_quantize(weight, block_size=64)

    @pytest.mark.parametrize("block_size", [0, 16, 48, 8192])
    def test_block_size(self, block_size: int) -> None:
        with pytest.raises(ValueError, match=f"block_size={block_size} is not a power of two in 32..4096; use one of"):
            nf4.nf4_quantize(torch.ones(1, 64), block_size=block_size)

    def test_float16_range(self) -> None:
        packed = pack(torch.full((1, 64), 70000.0))
        sizes = {"out_features": 1, "in_features": 64, "block_size": 64}
        with pytest.raises(ValueError, match="absmax=70000 exceeds float16's 65504.*use bfloat16 or float32"):
            nf4.nf4_dequantize(*op_arguments(packed), **sizes, dtype=torch.float16)
        with pytest.raises(ValueError, match="absmax=70000 exceeds float16's 65504"):
            nf4.nf4_linear(torch.ones(1, 64).half(), *op_arguments(packed), out_features=1, block_size=64)
        assert (
            nf4.nf4_dequantize(*op_arguments(packed), **sizes, dtype=torch.bfloat16)[0, 0] == 70144
        )  # nearest bfloat16

    def test_dtype(self) -> None:
        packed = pack(torch.ones(1, 64))
        with pytest.raises(TypeError, match="x is torch.float64; use one of torch.float32"):
            nf4.nf4_linear(torch.ones(1, 64).double(), *op_arguments(packed), out_features=1, block_size=64)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("out_features", 3, r"packed is torch.uint8 \(64,\); a \[3, 64\] weight in blocks of 64 needs .* of 96"),
            ("absmax", torch.ones(1), r"absmax is torch.float32 \(1,\); .* needs contiguous torch.float32 of 2"),
            ("nested_absmax", torch.ones(1), r"absmax \(with nested_absmax\) is torch.float32"),
        ],
    )
    def test_sizes_are_checked_before_memory_is_read(self, field: str, value: object, message: str) -> None:
        packed = pack(torch.ones(2, 64))
        arguments = {name: getattr(packed, name) for name in nf4.NF4Weight.__slots__ if name != "codebook"}
        with pytest.raises(ValueError, match=message):
            nf4.nf4_dequantize(**{**arguments, field: value}, dtype=torch.float32)
