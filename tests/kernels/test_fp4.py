"""FP4 against bitsandbytes and by hand. What all codebooks share is tested in test_nf4.py, for both."""

import pytest
import torch
from torch import Tensor

from trainer.kernels import codebook4
from trainer.kernels.codebook4 import CodebookWeight, codebook_dequantize, codebook_quantize
from trainer.kernels.codebook4_linear import codebook_linear
from trainer.kernels.double_quant import dequantize_absmax, quantize_absmax

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 10_000 + shape[1])
    return torch.randn(shape, generator=generator).to(dtype)


def fp4_weight(
    packed: Tensor, scales: tuple[Tensor, ...], shape: tuple[int, int], block_size: int = 64
) -> CodebookWeight:
    """scales: absmax, and with double quantization nested_absmax and nested_offset"""
    return CodebookWeight(packed, *scales, *[None] * (3 - len(scales)), *shape, block_size, "fp4")


def test_codebook_is_a_sign_and_eight_magnitudes() -> None:
    """Codes 0..7 are 0, 1/16, 8, 12, 4, 6, 2, 3 twelfths; bit 3 is the sign; zero has no minus."""
    twelfths = [0, 1 / 16, 8, 12, 4, 6, 2, 3]
    assert list(codebook4.FP4_CODEBOOK) == [value / 12 for value in twelfths + [-value for value in twelfths]]
    assert not torch.tensor(codebook4.FP4_CODEBOOK)[8].signbit()


def test_golden_bytes() -> None:
    """By hand: absmax 12, so the twelfths are the weights; 5 ties down to 4; 7.1 is nearer to 8, 0.04 to 1/16."""
    weight = torch.zeros(1, 32)
    weight[0, :10] = torch.tensor([12.0, -12.0, 8, 6, 5, 7.1, -3, 2, 0.04, -0.0])
    packed, absmax = codebook_quantize(weight, codebook="fp4", block_size=32)
    codes = torch.stack([packed >> 4, packed & 15], 1).view(-1).tolist()
    assert absmax.tolist() == [12.0]
    assert codes == [3, 11, 2, 5, 4, 2, 15, 6, 1, *[0] * 23]
    dense = codebook_dequantize(fp4_weight(packed, (absmax,), (1, 32), 32), dtype=torch.float32)
    # 8 / 12 is no float32, so 8 comes back to within a rounding
    torch.testing.assert_close(dense[0, :8], torch.tensor([12.0, -12, 8, 6, 4, 8, -3, 2]), rtol=2**-23, atol=0)


class TestBitsandbytes:
    """Equal bytes and values, on the shapes where bitsandbytes is right on CPUs: rows that end on a block."""

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
        weight[1, ::3] *= 1e-3  # what rounds to 0 has code 0 or 8, by its side
        packed, absmax = codebook_quantize(weight, codebook="fp4", block_size=block_size)
        want, state = functional.quantize_4bit(
            weight, blocksize=block_size, quant_type="fp4", compress_statistics=False
        )
        assert {0, 8} <= set((packed & 15).tolist())
        assert torch.equal(packed, want.view(-1)) and torch.equal(absmax, state.absmax)
        dense = codebook_dequantize(fp4_weight(packed, (absmax,), shape, block_size), dtype=dtype)
        assert torch.equal(dense, functional.dequantize_4bit(want, state))

    @pytest.mark.parametrize("num_blocks", [1, 257, 5000])
    def test_double_quant(self, functional: object, num_blocks: int) -> None:
        weight = make_weight((num_blocks, 64))
        packed, absmax = codebook_quantize(weight, codebook="fp4", block_size=64)
        scales = quantize_absmax(absmax)
        want, state = functional.quantize_4bit(weight, blocksize=64, quant_type="fp4", compress_statistics=True)
        assert torch.equal(packed, want.view(-1)) and torch.equal(scales[0], state.absmax)
        assert torch.equal(scales[1], state.state2.absmax) and torch.equal(scales[2], state.offset)
        dense = codebook_dequantize(fp4_weight(packed, scales, (num_blocks, 64)), dtype=torch.float32)
        assert torch.equal(dense, functional.dequantize_4bit(want, state))
        # and its scales are those that we decode apart
        weights = codebook4.codebook_dequantize_reference(
            fp4_weight(packed, (dequantize_absmax(*scales),), (num_blocks, 64)), dtype=torch.float32
        )
        assert torch.equal(dense, weights)


@pytest.mark.parametrize("rows", [1, 20])  # fused, and through a dense weight
def test_linear_and_its_gradient(rows: int) -> None:
    weight = make_weight((12, 96))
    packed, absmax = codebook_quantize(weight, codebook="fp4", block_size=64)
    scales = quantize_absmax(absmax)
    x = make_weight((rows, 96)).requires_grad_()
    quantized = fp4_weight(packed, scales, (12, 96))
    y = codebook_linear(x, quantized)
    dense = codebook_dequantize(quantized, dtype=torch.float32)
    want = x.detach().double() @ dense.double().T
    assert (y.double() - want).abs().max() <= 1e-5 * want.abs().max()  # float32 sums of 96 terms
    grad = make_weight((rows, 12))
    y.backward(grad)
    assert torch.equal(x.grad, grad @ dense)  # the same product of the same numbers


def test_dequantize_into_reads_the_codebook_from_the_weight() -> None:
    weight = make_weight((3, 64))
    packed, absmax = codebook_quantize(weight, codebook="fp4", block_size=64)
    out = torch.empty(5, 64)
    codebook4.codebook_dequantize_into(fp4_weight(packed, (absmax,), (3, 64)), out[1:4])
    # FP4's widest gap is 8..12 twelfths of absmax: no weight is further than 2 twelfths from an entry
    assert ((out[1:4] - weight).abs().amax(1) <= 2 / 12 * absmax * (1 + 1e-6)).all()
