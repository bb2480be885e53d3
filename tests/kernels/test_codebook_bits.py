"""NF3 and NF2: values against their construction, bytes by hand, every path against the reference."""

import itertools
import os
import platform
import subprocess
import sys
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape, codebook4, codebook_bits
from trainer.kernels.codebook_bits import BitsWeight, bits_dequantize, bits_dequantize_into, bits_quantize
from trainer.kernels.double_quant import quantize_absmax

# Rows that end on a block, inside a block, inside a byte; one element; several nested blocks of scales.
SHAPES = [(1, 64), (2, 96), (3, 80), (7, 33), (33, 65), (1, 1), (1, 1023), (40, 512), (200, 640)]  # the last: threads
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODEBOOKS = list(codebook_bits.FORMATS)
FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ libraries, compiled for one processor: AVX512 or what is here, AVX2, plain C++."""
    if _cpp.load("codebook_bits") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    kernel, flags = _tape.kernel, request.param
    monkeypatch.setattr(_tape, "kernel", lambda file, name: kernel(file, name, *flags))


def make_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 10_000 + shape[1])
    return torch.randn(shape, generator=generator).to(dtype)


def pack(weight: Tensor, *, codebook: str, block_size: int = 64, double_quant: bool = False) -> BitsWeight:
    packed, absmax = codebook_bits.bits_quantize_reference(weight, codebook=codebook, block_size=block_size)
    scales = quantize_absmax(absmax) if double_quant else (absmax, None, None)
    return BitsWeight(packed, *scales, *weight.shape, block_size, codebook)


def normal_float(bits: int, offset: float = 0.9677083) -> Tensor:
    """The construction of the module's docstring; probabilities in float32, as torch.linspace gives them."""
    quantile, half = NormalDist().inv_cdf, 2 ** (bits - 1)
    upper = [quantile(p) for p in torch.linspace(offset, 0.5, half + 1)[:-1].tolist()]
    lower = [-quantile(p) for p in torch.linspace(offset, 0.5, half)[:-1].tolist()]
    values = torch.tensor([*lower, 0.0, *upper]).sort().values
    return values / values.max()


class TestFormat:
    def test_values_are_quantiles(self) -> None:
        """Golden values, and the same construction gives the published NF4: equal, for both round the same floats."""
        assert torch.equal(normal_float(4), torch.tensor(codebook4.NF4_CODEBOOK))
        assert torch.equal(normal_float(3), torch.tensor(codebook_bits.NF3_CODEBOOK))
        assert torch.equal(normal_float(2), torch.tensor(codebook_bits.NF2_CODEBOOK))

    def test_golden_bytes(self) -> None:
        """By hand. NF2, absmax 2: 2 -> 3, -2 -> 0, 0 -> 1, 1 -> 0.5 below the threshold 0.669 -> 2; then zeros."""
        weight = torch.zeros(1, 32)
        weight[0, :4] = torch.tensor([2.0, -2.0, 0.0, 1.0])
        packed, absmax = bits_quantize(weight, codebook="nf2", block_size=32)
        assert absmax.tolist() == [2.0]
        assert packed.tolist() == [3 | 0 << 2 | 1 << 4 | 2 << 6, *[0b01010101] * 7]
        # NF3: 2 -> 7, -2 -> 0, 0 -> 3, 1 -> 0.5 above 0.4503 -> 6; 8 codes in 3 bytes, the first in the lowest bits
        packed, absmax = bits_quantize(weight, codebook="nf3", block_size=32)
        word = 7 | 0 << 3 | 3 << 6 | 6 << 9 | 3 << 12 | 3 << 15 | 3 << 18 | 3 << 21
        zeros = sum(3 << 3 * i for i in range(8))
        assert packed.tolist() == [*word.to_bytes(3, "little"), *zeros.to_bytes(3, "little") * 3]

    @pytest.mark.parametrize(("codebook", "numel", "num_bytes"), [("nf2", 5, 2), ("nf3", 5, 2), ("nf3", 1023, 384)])
    def test_no_gaps(self, codebook: str, numel: int, num_bytes: int) -> None:
        packed, _ = bits_quantize(torch.ones(1, numel), codebook=codebook, block_size=32)
        assert packed.numel() == num_bytes
        used = numel * codebook_bits.FORMATS[codebook].bits % 8
        assert used == 0 or packed[-1].item() >> used == 0  # padding bits are 0

    @pytest.mark.parametrize("bits", [2, 3])
    def test_bits_round_trip(self, bits: int) -> None:
        for numel in (0, 1, 7, 8, 9, 31, 100):
            codes = torch.randint(0, 2**bits, (numel,), dtype=torch.uint8)
            assert torch.equal(codebook_bits.unpack_bits(codebook_bits.pack_bits(codes, bits), numel, bits), codes)

    @pytest.mark.parametrize(("codebook", "error"), [("nf4", 0.0919), ("nf3", 0.2015), ("nf2", 0.561)])
    def test_error_on_normal_weights(self, codebook: str, error: float) -> None:
        """What normal weights in blocks of 64 lose, relative to their norm: 10 seeds lie within 0.5 % of it."""
        weight = make_weight((256, 1024))
        if codebook == "nf4":
            packed, absmax = codebook4.codebook_quantize(weight, codebook=codebook, block_size=64)
            packed_weight = codebook4.CodebookWeight(packed, absmax, None, None, 256, 1024, 64)
            dense = codebook4.codebook_dequantize(packed_weight, dtype=torch.float32)
        else:
            dense = bits_dequantize(pack(weight, codebook=codebook), dtype=torch.float32)
        assert ((dense - weight).norm() / weight.norm()).item() == pytest.approx(error, rel=0.01)


@pytest.mark.usefixtures("cpp")
class TestCpp:
    @pytest.mark.parametrize("codebook", CODEBOOKS)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_is_the_reference(self, shape: tuple[int, int], dtype: torch.dtype, codebook: str) -> None:
        """Codes and weights bit for bit: only these make a base that hashes equal on every machine."""
        weight = make_weight(shape, dtype)
        for block_size in (32, 64, 4096):
            want = codebook_bits.bits_quantize_reference(weight, codebook=codebook, block_size=block_size)
            got = codebook_bits.bits_quantize_cpu(weight, codebook=codebook, block_size=block_size)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
            for double_quant in (False, True):
                packed = pack(weight, codebook=codebook, block_size=block_size, double_quant=double_quant)
                for out in DTYPES:
                    dense = codebook_bits.bits_dequantize_cpu(packed, dtype=out)
                    assert torch.equal(dense, codebook_bits.bits_dequantize_reference(packed, dtype=out))

    @pytest.mark.parametrize("codebook", CODEBOOKS)
    @pytest.mark.parametrize("scale", [0.0, 1e-39, 1e38])  # a block of zeros, a subnormal absmax, nearly infinite
    def test_extreme_scales(self, scale: float, codebook: str) -> None:
        weight = make_weight((5, 96)).clamp(-3, 3) * scale
        packed = pack(weight, codebook=codebook)
        got = codebook_bits.bits_quantize_cpu(weight, codebook=codebook, block_size=64)
        assert torch.equal(got[0], packed.packed) and torch.equal(got[1], packed.absmax)
        for dtype in (torch.float32, torch.bfloat16):
            dense = codebook_bits.bits_dequantize_cpu(packed, dtype=dtype)
            assert torch.equal(dense, codebook_bits.bits_dequantize_reference(packed, dtype=dtype))
            assert torch.isfinite(dense).all()

    @pytest.mark.parametrize("codebook", CODEBOOKS)
    def test_reads_and_writes_nothing_beside(self, codebook: str) -> None:
        """The vector path works on 32 weights: at the end of a tensor it must not touch what lies behind."""
        packed = pack(make_weight((1, 95)), codebook=codebook)
        memory = torch.full((97,), 7.0)
        codebook_bits.bits_dequantize_cpu(packed, dtype=torch.float32, out=memory[1:96])
        assert memory[0] == 7 and memory[96] == 7


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_into_is_dequantize(codebook: str) -> None:
    packed = pack(make_weight((6, 96)), codebook=codebook, double_quant=True)
    for dtype in DTYPES:
        stack = torch.full((10, 96), 7, dtype=dtype)
        bits_dequantize_into(packed, stack[2:8])
        assert torch.equal(stack[2:8], bits_dequantize(packed, dtype=dtype))
        assert (stack[:2] == 7).all() and (stack[8:] == 7).all()


def test_nearest_value_is_chosen() -> None:
    for codebook, (_, tables) in codebook_bits.FORMATS.items():
        weight = make_weight((4, 64))
        dense = bits_dequantize(pack(weight, codebook=codebook), dtype=torch.float32)
        absmax = weight.abs().amax(1, keepdim=True)
        # Rows are blocks. Distances in float64; a tie within float32's rounding may go either way.
        distances = (weight.double()[..., None] - (tables.values * absmax[..., None]).double()).abs()
        assert ((weight - dense).double().abs() <= distances.amin(-1) + 1e-6).all()


@pytest.mark.parametrize(("codebook", "double_quant"), itertools.product(CODEBOOKS, [False, True]))
def test_ops(codebook: str, double_quant: bool) -> None:
    weight = make_weight((5, 48))
    torch.library.opcheck(torch.ops.lowbit.bits_quantize, (weight, codebook, 32))
    w = pack(weight, codebook=codebook, block_size=32, double_quant=double_quant)
    tensors = w.packed, w.absmax, w.nested_absmax, w.nested_offset
    torch.library.opcheck(torch.ops.lowbit.bits_dequantize, (*tensors, 5, 48, 32, codebook, torch.bfloat16))


def test_errors() -> None:
    weight = make_weight((2, 64))
    with pytest.raises(ValueError, match="codebook='nf4' has no 2- or 3-bit codes; use one of nf3, nf2"):
        bits_quantize(weight, codebook="nf4", block_size=64)
    with pytest.raises(ValueError, match="block_size=48 is not a power of two"):
        bits_quantize(weight, codebook="nf3", block_size=48)
    weight[1, 2] = torch.inf
    with pytest.raises(ValueError, match=r"weight\[1, 2\] \(flat index 66\) is inf"):
        bits_quantize(weight, codebook="nf3", block_size=64)
    packed = pack(make_weight((2, 64)), codebook="nf3")
    with pytest.raises(ValueError, match=r"packed is .* \[2, 72\] weight .* of 54"):
        BitsWeight(packed.packed, packed.absmax, None, None, 2, 72, 64, "nf3")
    with pytest.raises(ValueError, match=r"absmax \(with nested_absmax\)"):
        BitsWeight(packed.packed, packed.absmax, packed.absmax[:1], packed.absmax[0], 2, 64, 64, "nf3")
    with pytest.raises(ValueError, match="give rows of one matrix"):
        bits_dequantize_into(packed, torch.empty(64, 2).T)
    with pytest.raises(TypeError, match="float64"):
        bits_dequantize(packed, dtype=torch.float64)
    with pytest.raises(ValueError, match="exceeds float16"):
        bits_dequantize(pack(make_weight((2, 64)) * 1e5, codebook="nf2"), dtype=torch.float16)


INTERPRETED = """
import torch
from trainer.kernels import codebook_bits
from trainer.kernels.double_quant import quantize_absmax

torch.manual_seed(0)
for shape, block_size in [((7, 33), 32), ((1, 1), 64), ((3, 1000), 2048)]:  # the last: blocks in two parts
    for codebook in codebook_bits.FORMATS:
        options = {"codebook": codebook, "block_size": block_size}
        packed, absmax = codebook_bits.bits_quantize(torch.randn(shape), **options)
        for scales in ((absmax, None, None), quantize_absmax(absmax)):
            weight = codebook_bits.BitsWeight(packed, *scales, *shape, block_size, codebook)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                want = codebook_bits.bits_dequantize_reference(weight, dtype=dtype)
                got = torch.full((shape[0] + 2, shape[1]), 7, dtype=dtype)
                codebook_bits.bits_dequantize_into(weight, got[1:-1])
                # the interpreter truncates float32 to bfloat16 where GPUs round: up to one ulp, 2^-7 of the value
                rtol = 2**-7 if dtype == torch.bfloat16 else 0
                torch.testing.assert_close(got[1:-1], want, atol=0, rtol=rtol, msg=f"{shape} {options} {dtype}")
                assert (got[0] == 7).all() and (got[-1] == 7).all()
print("interpreted")
"""


def test_interpreter_equals_reference() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "LOWBIT_KERNELS": "triton"}
    result = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert result.stdout == "interpreted\n", result.stderr


@pytest.mark.parametrize("block_size", [32, 4096])  # the smallest and the largest: fewest and most values a thread
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_compiles_ahead_of_time(codebook: str, block_size: int) -> None:
    """For GPUs that are not here, without spills."""
    pytest.importorskip("triton")
    from tests.kernels.aot import TARGETS, compile_kernel, spilled_registers

    names = "packed_ptr absmax_ptr nested_absmax_ptr nested_offset_ptr map_ptr codebook_ptr out_ptr numel num_bytes"
    kinds = ["*u8", "*u8", "*fp32", "*fp32", "*fp32", "*fp32", "*bf16", "i64", "i64"]
    constants = {
        "BITS": codebook_bits.FORMATS[codebook].bits,
        "BLOCK_SIZE": block_size,
        "DOUBLE_QUANT": True,
        **codebook_bits.tile_of(block_size),
    }
    for target in TARGETS:
        types = dict(zip(names.split(), kinds, strict=True))
        compiled = compile_kernel(codebook_bits._dequantize_kernel, types, constants, target)
        assert spilled_registers(compiled, target) == 0, target


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_gpu_equals_reference(codebook: str) -> None:
    weight = make_weight((130, 192))
    want = pack(weight, codebook=codebook, double_quant=True)
    packed, absmax = bits_quantize(weight.cuda(), codebook=codebook, block_size=64)
    assert torch.equal(packed.cpu(), want.packed)
    here = BitsWeight(packed, *quantize_absmax(absmax), 130, 192, 64, codebook)
    for dtype in DTYPES:
        dense = codebook_bits.bits_dequantize_reference(here, dtype=dtype)
        assert torch.equal(bits_dequantize(here, dtype=dtype), dense)
