"""Small floats against torchao's tensors, by hand, and against a search over all codes."""

import math

import pytest
import torch
from torch import Tensor

from trainer.kernels.float_grids import E2M1, E4M3_MAX, FloatGrid, round_to_e2m1

FORMATS = ("fp8", "mxfp4", "nvfp4")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_weight(rows: int = 7, columns: int = 96, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different size, one of zeros."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    weight *= torch.logspace(-2, 1, rows)[:, None]
    weight[1] = 0
    return weight.to(dtype)


def test_e2m1_ties_go_to_the_even_code() -> None:
    halves = [(a + b) / 2 for a, b in zip(E2M1, E2M1[1:], strict=False)]
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert round_to_e2m1(torch.tensor(halves)).tolist() == want
    assert round_to_e2m1(-torch.tensor(halves)).tolist() == [-value for value in want]
    assert round_to_e2m1(torch.tensor([100.0, -7.5, 0.1])).tolist() == [6.0, -6.0, 0.0]


def test_e2m1_is_the_nearest_of_all_codes() -> None:
    x = torch.linspace(-8, 8, 4001)
    codes = torch.tensor([*E2M1, *(-value for value in E2M1)])
    nearest = (x[:, None] - codes).abs().amin(1)
    assert torch.equal((round_to_e2m1(x) - x).abs(), nearest)


def test_golden_fp8() -> None:
    """By hand: scale 2; 17 lies between 16 and 18, the steps of e4m3 there, and the tie goes to the even mantissa."""
    weight = FloatGrid("fp8").quantize(torch.tensor([[896.0, -34.0, 3.0, 0.0]]))
    assert weight.tensors["scales"].tolist() == [[2.0]]
    assert weight.dequantize(torch.float32).tolist() == [[896.0, -32.0, 3.0, 0.0]]
    assert weight.packed.dtype == torch.float8_e4m3fn


def test_golden_mxfp4() -> None:
    """By hand: 12 / 6 = 2 fits exactly, 12.5 / 6 needs 4; a block of zeros has scale 1."""
    weight = torch.zeros(1, 96)
    weight[0, 0], weight[0, 1], weight[0, 32], weight[0, 33] = 12.0, -3.2, 12.5, 3.0
    quantized = FloatGrid("mxfp4").quantize(weight)
    assert quantized.tensors["scales"].tolist() == [[128, 129, 127]]
    dense = quantized.dequantize(torch.float32)
    assert dense[0, [0, 1, 32, 33]].tolist() == [12.0, -3.0, 12.0, 4.0] and dense.count_nonzero() == 4
    assert quantized.packed[0, 0] == 7 | (8 | 3) << 4  # the even feature in the low nibble, the sign on top


def test_golden_nvfp4() -> None:
    """By hand: the largest block has the largest e4m3 scale; one of a quarter of it has 112."""
    weight = torch.zeros(1, 48)
    weight[0, 0], weight[0, 16], weight[0, 17] = 2688.0, 672.0, 224.0
    quantized = FloatGrid("nvfp4").quantize(weight)
    assert quantized.tensors["tensor_scale"] == 1 and quantized.tensors["scales"].float().tolist()[0][:2] == [448, 112]
    assert quantized.dequantize(torch.float32)[0, [0, 16, 17]].tolist() == [2688.0, 672.0, 224.0]


@pytest.mark.parametrize("shape", [(7, 96), (33, 64), (1, 32), (16, 256)])
def test_mxfp4_bytes_are_torchaos(shape: tuple[int, int]) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    weight = make_weight(*shape) if shape[0] > 1 else torch.linspace(-3, 5, 32).view(1, 32)
    weight[weight.abs().view(shape[0], -1, 32).amax(2).repeat_interleave(32, 1) == 0] = 0.5  # zeros: another scale
    theirs = mx.MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32, mx.ScaleCalculationMode.RCEIL)
    ours = FloatGrid("mxfp4").quantize(weight)
    assert torch.equal(ours.tensors["scales"], theirs.scale.view(torch.uint8).view(shape[0], -1))
    assert torch.equal(ours.packed, theirs.qdata.view(torch.uint8))
    assert torch.equal(ours.dequantize(torch.float32), theirs.dequantize(torch.float32))


def test_nvfp4_values_are_torchaos() -> None:
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    weight = make_weight(16, 256)
    weight[1] = 0.01  # a block of zeros has another scale there
    scale = nv.per_tensor_amax_to_scale(weight.abs().amax())
    theirs = nv.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale)
    ours = FloatGrid("nvfp4").quantize(weight)
    assert ours.tensors["tensor_scale"] == scale
    # torchao divides by the product of the scales in another order: a value on a tie may take the other code.
    different = ours.dequantize(torch.float32) != theirs.dequantize(torch.float32)
    assert different.sum() <= 0.002 * weight.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_fake_quantize_is_quantize_then_dequantize(format: str, dtype: torch.dtype) -> None:
    grid, weight = FloatGrid(format), make_weight(dtype=dtype)
    quantized = grid.quantize(weight)
    assert torch.equal(grid.fake_quantize(weight), quantized.dequantize(dtype))
    assert torch.equal(
        grid.fake_quantize(weight.view(7, 3, 32).contiguous()[:, 1]), grid.fake_quantize(weight[:, 32:64])
    )
    assert list(quantized.tensors) == list(grid.tensor_names) and quantized.quantizer is grid
    assert (quantized.dequantize(torch.float32)[1] == 0).all()  # zeros stay zeros


@pytest.mark.parametrize(("format", "bound"), [("fp8", 2**-4), ("mxfp4", 1 / 3), ("nvfp4", 0.21)])
def test_errors_are_half_a_step(format: str, bound: float) -> None:
    """Of the largest of its span: e4m3 has 3 bits behind the point; e2m1's widest step is 2 of 6, twice that when a
    power of two must hold it, and NVFP4's scale is off by up to 1/16 itself."""
    grid, weight = FloatGrid(format), make_weight()
    error = (grid.fake_quantize(weight) - weight).view(7, -1, 32 if format != "nvfp4" else 16)
    largest = weight.abs().view(error.shape).amax(2)
    if format == "fp8":
        assert (error.abs() <= bound * weight.abs().view(error.shape) + largest[..., None] * 2**-9).all()
    else:
        assert (error.abs().amax(2) <= bound * largest).all()
    assert error.abs().max() > 0


def test_bytes_count() -> None:
    for format, bits in (("fp8", 8 + 32 / 256), ("mxfp4", 4.25), ("nvfp4", 4.5 + 32 / (16 * 256))):
        quantized = FloatGrid(format).quantize(make_weight(16, 256))
        assert quantized.nbytes * 8 / (16 * 256) == bits
        assert math.floor(bits * 4) / 4 == quantized.quantizer.bits_per_weight


def test_gradient_is_cut_where_a_code_was_clamped() -> None:
    """A block far below the largest wants a scale of 1.49 * 2^-9 and gets 2^-9, the smallest there is: 8.94 is cut."""
    grid, weight = FloatGrid("nvfp4"), torch.zeros(1, 32)
    weight[0, 0], weight[0, 16], weight[0, 17] = E4M3_MAX * 6, 1.49 * 6 * 2.0**-9, 6 * 2.0**-9
    assert grid.gradient(torch.ones(1, 32), weight).tolist()[0] == [1.0] * 16 + [0.0] + [1.0] * 15
    for format in ("fp8", "mxfp4"):
        grad = torch.randn(7, 96)
        assert FloatGrid(format).gradient(grad, make_weight()) is grad
    # Scales of e4m3 are rounded to 3 bits: where one went down by 6 %, codes go up to 6.4, and none is clamped.
    weight[0, 16:] = torch.linspace(1, 1.06, 16) * 6 * 17
    assert torch.equal(grid.gradient(torch.ones(1, 32), weight), torch.ones(1, 32))


def test_inf_and_nan() -> None:
    weight = make_weight()
    weight[3, 5] = float("nan")
    for format in FORMATS:
        with pytest.raises(ValueError, match=r"weight\[3, 5\] is nan"):
            FloatGrid(format).quantize(weight)
        assert FloatGrid(format).fake_quantize(weight)[3, :32].isnan().any()
    for format in ("fp8", "mxfp4"):
        assert FloatGrid(format).fake_quantize(weight)[4].isfinite().all()


def test_errors_name_what_fits() -> None:
    with pytest.raises(ValueError, match="format=fp6; use one of fp8, mxfp4, nvfp4"):
        FloatGrid("fp6")
    with pytest.raises(ValueError, match="mxfp4 has blocks of 32 weights, which do not divide in_features=48"):
        FloatGrid("mxfp4").quantize(torch.ones(2, 48))
    with pytest.raises(ValueError, match="weight has shape"):
        FloatGrid("fp8").quantize(torch.ones(4))
    with pytest.raises(TypeError, match="weight"):
        FloatGrid("fp8").quantize(torch.ones(4, 4, dtype=torch.float64))
