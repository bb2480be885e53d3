"""NF4 ops against the paper's numbers, bitsandbytes, and the reference."""

import platform
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, nf4

# Rows that end on a block, inside a block, inside a byte; odd numel; one element; several nested blocks of scales.
SHAPES = [(1, 64), (2, 96), (3, 80), (5, 48), (7, 33), (2, 16), (64, 48), (33, 65), (1, 1), (1, 1023), (40, 512)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLAGS = [None]
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS += [("-march=haswell",), ("-march=x86-64",)]  # AVX2, and the plain C++ paths


@pytest.fixture(params=FLAGS, ids=lambda flags: "native" if flags is None else flags[0].removeprefix("-march="))
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library, compiled for one processor."""
    library = _cpp.load("nf4", request.param)
    if library is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    nf4._declare(library)
    monkeypatch.setattr(nf4, "_library", lambda: library)


def make_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 10_000 + shape[1])
    return torch.randn(shape, generator=generator).to(dtype)


def pack(weight: Tensor, *, block_size: int = 64, double_quant: bool = False) -> nf4.NF4Weight:
    packed, absmax = nf4.nf4_quantize_reference(weight, block_size=block_size)
    scales = nf4.quantize_absmax(absmax) if double_quant else (absmax, None, None)
    return nf4.NF4Weight(packed, *scales, *weight.shape, block_size)


def op_arguments(weight: nf4.NF4Weight) -> tuple[Tensor | None, ...]:
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
        assert torch.equal(nf4.DYNAMIC_MAP, functional.create_dynamic_map())


class TestCpuEqualsReference:
    @pytest.mark.parametrize("block_size", [32, 64, 4096])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_quantize(self, cpp: None, shape: tuple[int, int], block_size: int) -> None:
        weight = make_weight(shape)
        weight.view(-1)[:32] = 0
        packed, absmax = nf4.nf4_quantize_cpu(weight, block_size=block_size)
        want_packed, want_absmax = nf4.nf4_quantize_reference(weight, block_size=block_size)
        assert torch.equal(packed, want_packed) and torch.equal(absmax, want_absmax)

    @pytest.mark.parametrize("scale", [1e-39, 1e-30, 7e4, 1e38])  # subnormal absmax; float16's range; near overflow
    def test_quantize_extreme_scales(self, cpp: None, scale: float) -> None:
        weight = make_weight((4, 64)).clamp(-3, 3) * scale
        packed, absmax = nf4.nf4_quantize_cpu(weight, block_size=64)
        want_packed, want_absmax = nf4.nf4_quantize_reference(weight, block_size=64)
        assert torch.equal(packed, want_packed) and torch.equal(absmax, want_absmax)

    @pytest.mark.parametrize("double_quant", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_dequantize(self, cpp: None, shape: tuple[int, int], dtype: torch.dtype, double_quant: bool) -> None:
        for block_size in (32, 64, 4096):
            packed = pack(make_weight(shape), block_size=block_size, double_quant=double_quant)
            want = nf4.nf4_dequantize_reference(packed, dtype=dtype)
            assert torch.equal(nf4.nf4_dequantize_cpu(packed, dtype=dtype), want)

    @pytest.mark.parametrize("scale", [1e-39, 3e-6, 6e4])  # subnormals of bfloat16 and of float16; float16's top
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_dequantize_extreme_scales(self, cpp: None, dtype: torch.dtype, scale: float) -> None:
        packed = pack(make_weight((4, 64)).clamp(-1, 1) * scale)
        want = nf4.nf4_dequantize_reference(packed, dtype=dtype)
        assert torch.equal(nf4.nf4_dequantize_cpu(packed, dtype=dtype), want)

    # float32: sums in another order, 1023 terms of eps 6e-8. bfloat16: one rounding of the output, 2^-9, and sums.
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_linear(self, cpp: None, shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
        for block_size, double_quant in ((32, False), (64, True), (128, False)):
            packed = pack(make_weight(shape), block_size=block_size, double_quant=double_quant)
            for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9):  # each has its own code; 9 multiplies a dense weight
                x = make_weight((rows, shape[1]), dtype)
                want = x.double() @ nf4.nf4_dequantize_reference(packed, dtype=dtype).double().T
                error = (nf4.nf4_linear_cpu(x, packed).double() - want).abs().max() / want.abs().max()
                assert error <= tolerance

    def test_threads_do_not_change_results(self, cpp: None) -> None:
        packed = pack(make_weight((301, 512)), double_quant=True)
        x, threads = make_weight((2, 512)), torch.get_num_threads()
        want = nf4.nf4_linear_cpu(x, packed), nf4.nf4_dequantize_cpu(packed, dtype=torch.bfloat16)
        try:
            torch.set_num_threads(3)
            assert torch.equal(nf4.nf4_linear_cpu(x, packed), want[0])
            assert torch.equal(nf4.nf4_dequantize_cpu(packed, dtype=torch.bfloat16), want[1])
        finally:
            torch.set_num_threads(threads)


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
        torch.library.opcheck(torch.ops.lowbit.nf4_quantize.default, (weight, 64))
        torch.library.opcheck(torch.ops.lowbit.nf4_dequantize.default, (*arguments, 6, 96, 64, torch.bfloat16))
        torch.library.opcheck(torch.ops.lowbit.nf4_linear.default, (x, *arguments, 6, 64))

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
        x = make_weight((4, 128))[:, ::2]
        arguments = (*op_arguments(packed), 8, 64)
        assert torch.equal(
            torch.ops.lowbit.nf4_linear(x, *arguments), torch.ops.lowbit.nf4_linear(x.clone(), *arguments)
        )


class TestErrors:
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
        arguments = {name: getattr(packed, name) for name in nf4.NF4Weight.__slots__}
        with pytest.raises(ValueError, match=message):
            nf4.nf4_dequantize(**{**arguments, field: value}, dtype=torch.float32)
