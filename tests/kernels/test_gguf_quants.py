"""GGUF's blocks: bytes against ggml's own quantizer, the gguf package and stored hashes; C++ against the reference."""

import ctypes
import functools
import hashlib
import platform
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape, gguf_quants
from trainer.kernels.gguf_quants import GGUF_TYPES, fitting_type, gguf_dequantize, gguf_quantize

TYPES = list(GGUF_TYPES)
COLS = 512  # two blocks of 256 a row
FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library with vectors of 16, 8 and 4 lanes, where this processor has them."""
    if _cpp.load("gguf_quants") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    kernel, flags = _tape.kernel, request.param
    monkeypatch.setattr(_tape, "kernel", lambda file, name: kernel(file, name, *flags))


@pytest.fixture(params=["reference", "cpu"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Forces one implementation of the public functions."""
    if request.param == "cpu" and _cpp.load("gguf_quants") is None:
        pytest.skip("no C++ compiler here")
    monkeypatch.setenv("LOWBIT_KERNELS", request.param)
    return request.param


@functools.cache
def ggml() -> Callable[[Tensor, str, Tensor | None], Tensor]:
    """ggml_quantize_chunk of the library inside llama-cpp-python."""
    package = pytest.importorskip("llama_cpp", reason="compares with llama.cpp's own quantizer")
    (path,) = (Path(package.__file__).parent / "lib").glob("libggml-base.so")
    function = ctypes.CDLL(str(path)).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [ctypes.c_int, pointer, pointer, integer, integer, integer, pointer]

    def quantize(weight: Tensor, type_name: str, importance: Tensor | None) -> Tensor:
        block, block_bytes, number = GGUF_TYPES[type_name]
        weight = weight.contiguous()
        out = torch.zeros(weight.shape[0], weight.shape[1] // block * block_bytes, dtype=torch.uint8)
        counts = None if importance is None else importance.data_ptr()
        assert function(number, weight.data_ptr(), out.data_ptr(), 0, *weight.shape, counts) == out.numel()
        return out

    return quantize


@functools.cache
def value_sets() -> dict[str, np.ndarray]:
    """Weights [rows, COLS] that leave the usual path of some quantizer, and usual ones."""
    rng = np.random.default_rng(0)
    shape = (8, COLS)
    normal = rng.standard_normal(shape)
    one_hot = np.zeros((64, COLS))
    one_hot[np.arange(64), np.arange(64) * 8 + np.arange(64) % 8] = rng.standard_normal(64)
    sets = {
        "normal": rng.standard_normal((32, COLS)),
        **{f"times {scale:g}": normal * scale for scale in (0.02, 10, 1e3, 1e-5, 1e-8, 1e-14, 1e-15, 1e-20)},
        # the inverse of a scale is infinite below 2.9e-39; with float16's subnormals scales become 0 before that
        **{f"subnormal {scale:g}": normal * scale for scale in (1e-36, 1e-37, 3e-38, 1e-39, 1e-44)},
        "long tails": np.clip(rng.standard_normal(shape) / np.abs(rng.standard_normal(shape)), -5e4, 5e4),
        "zeros": np.zeros((2, COLS)),
        "negative zeros": -np.zeros((2, COLS)),
        "zeros of both signs": np.where(rng.random(shape) < 0.5, 0.0, -0.0),
        "constant": np.full((1, COLS), 0.3),
        "negative constant": np.full((1, COLS), -0.3),
        "nearly constant": 1 + normal * 1e-6,
        "one-hot": one_hot,
        "sparse": normal * (rng.random(shape) < 0.05),
        "groups of zeros": normal * (rng.random((8, COLS // 16)) < 0.5).repeat(16, 1),
        "negative": -np.abs(normal),
        "negative, far from 0": -5 - normal * 1e-3,
        "positive, far from 0": 5 + np.abs(normal),
        "both extremes": np.where(rng.random(shape) < 0.1, np.sign(normal), normal / 8),
        "ties": rng.integers(-8, 9, shape) / 2.0,
        "ties of 8 bits": rng.integers(-254, 255, shape) / 2.0,
        "three values": rng.choice([-0.02, 0, 0.02], shape),
        "many sizes": normal * np.exp2(rng.integers(-40, 10, shape)),
    }
    return {name: values.astype(np.float32) for name, values in sets.items()}


def all_weights() -> tuple[Tensor, list[str]]:
    """The value sets as one weight, and the name of each row."""
    sets = value_sets()
    names = [name for name, values in sets.items() for _ in values]
    return torch.from_numpy(np.concatenate(list(sets.values()))), names


def importances() -> dict[str, Tensor | None]:
    rng = np.random.default_rng(1)
    sets = {
        "uniform": rng.random(COLS),
        "outliers": np.exp(rng.standard_normal(COLS) * 3),
        "one": np.ones(COLS),
        "some zeros": rng.random(COLS) * (rng.random(COLS) < 0.7),
        "zeros": np.zeros(COLS),
        "tiny": rng.random(COLS) * 1e-30,
        "large": rng.random(COLS) * 1e12,
    }
    return {"none": None} | {name: torch.from_numpy(values.astype(np.float32)) for name, values in sets.items()}


IMPORTANCES = importances()


def differing_rows(got: Tensor, want: Tensor, names: list[str]) -> set[str]:
    return {name for name, equal in zip(names, (got == want).all(1).tolist(), strict=True) if not equal}


def raw_floats(key: int, *shape: int) -> np.ndarray:
    """Sums of four 16-bit numbers, nearly normal and about 0, of raw draws, which numpy promises not to change."""
    raw = np.random.Philox(key).random_raw(int(np.prod(shape)))
    parts = sum((raw >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4))
    return ((parts - 131070) / 2.0**18).astype(np.float32).reshape(shape)  # 18 bits: exact


def golden_input() -> tuple[Tensor, Tensor]:
    """weight [64, 512], rows of sizes 2^-12 to 2^3, and importance [512]"""
    sizes = np.float32(2.0) ** (np.arange(64, dtype=np.float32)[:, None] % 16 - 12)
    return torch.from_numpy(raw_floats(1, 64, COLS) * sizes), torch.from_numpy(raw_floats(2, COLS) ** 2)


# First 16 hex digits of the SHA-256 of what ggml_quantize_chunk of llama-cpp-python 0.3.36 (ggml 0.25.3) makes of
# golden_input(), without and with importance
GOLDEN = {
    "Q4_0": ("c6cfa7bf039fa645", "edc2485351f2daa7"),
    "Q4_1": ("aa56a0488dc0fab4", "4a70024fde12ba90"),
    "Q5_0": ("06eb55e705502f1b", "7f2b414f57fd6fcc"),
    "Q5_1": ("925063e010f86b92", "43aeb491b472c621"),
    "Q8_0": ("9b4b61a88f7af216", "9b4b61a88f7af216"),
    "Q4_K": ("85b1dcd89534298a", "8a4c057d9d6a50bb"),
    "Q5_K": ("3470b1fef9dc6798", "a42981f92a9c5edd"),
    "Q6_K": ("c3708715554cb582", "3e827ad3655230a1"),
}


class TestBytes:
    @pytest.mark.parametrize("importance", IMPORTANCES)
    @pytest.mark.parametrize("type_name", TYPES)
    def test_equals_llama_cpp(self, type_name: str, importance: str) -> None:
        weight, names = all_weights()
        want = ggml()(weight, type_name, IMPORTANCES[importance])
        got = gguf_quantize(weight, type_name, importance=IMPORTANCES[importance])
        assert not differing_rows(got, want, names)

    @pytest.mark.parametrize("importance", ["none", "outliers", "some zeros"])
    @pytest.mark.parametrize("type_name", TYPES)
    def test_cpp_equals_reference(self, type_name: str, importance: str, cpp: None) -> None:
        weight, names = all_weights()
        counts = IMPORTANCES[importance]
        want = gguf_quants.gguf_quantize_reference(weight, type_name, counts)
        assert not differing_rows(gguf_quants.gguf_quantize_cpu(weight, type_name, counts), want, names)

    @pytest.mark.parametrize("type_name", TYPES)
    def test_golden(self, type_name: str, implementation: str) -> None:
        weight, importance = golden_input()
        plain, weighted = (gguf_quantize(weight, type_name, importance=counts) for counts in (None, importance))
        hashes = tuple(hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16] for data in (plain, weighted))
        assert hashes == GOLDEN[type_name]

    @pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
    def test_equals_the_gguf_package(self, type_name: str, implementation: str) -> None:
        """Its quantizers have no K types and no importance."""
        weight, _ = golden_input()
        want = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[type_name])
        assert np.array_equal(gguf_quantize(weight, type_name).numpy(), want)

    def test_by_hand(self, implementation: str) -> None:
        """Q4_0: the largest, -4, becomes code 0 of d = 0.5; 0 is 8, 1 is 10, 3.5 is 15 and 4, a code too far, too."""
        weight = torch.zeros(1, 32)
        weight[0, :4] = torch.tensor([-4.0, 1.0, 3.5, 4.0])
        half = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8).tolist()
        assert gguf_quantize(weight, "Q4_0")[0].tolist() == [*half, 0x80, 0x8A, 0x8F, 0x8F, *[0x88] * 12]

    @pytest.mark.parametrize("type_name", TYPES)
    def test_table_is_the_gguf_packages(self, type_name: str) -> None:
        number = gguf.GGMLQuantizationType[type_name]
        assert GGUF_TYPES[type_name] == (*gguf.GGML_QUANT_SIZES[number], number.value)


class TestInputs:
    @pytest.mark.parametrize("type_name", ["Q5_1", "Q4_K"])
    def test_strides_and_dtypes(self, type_name: str, implementation: str) -> None:
        base = torch.from_numpy(raw_floats(3, COLS, 40))
        importance = torch.from_numpy(raw_floats(4, 2 * COLS) ** 2)
        for weight in (base.T, base.T[::2], base.T.bfloat16(), base.T.half(), base.T.double()):
            plain = weight.float().contiguous()
            got = gguf_quantize(weight, type_name, importance=importance[::2])
            assert torch.equal(got, gguf_quantize(plain, type_name, importance=importance[::2].clone()))

    @pytest.mark.parametrize("rows", [0, 1, 33])
    @pytest.mark.parametrize("type_name", TYPES)
    def test_any_number_of_rows(self, type_name: str, rows: int, implementation: str) -> None:
        """Lanes at the end stand empty; a row's bytes do not depend on the others."""
        weight, importance = golden_input()
        whole = gguf_quantize(weight, type_name, importance=importance)
        part = gguf_quantize(weight[:rows], type_name, importance=importance)
        assert torch.equal(part, whole[:rows])
        assert gguf_dequantize(part, type_name, cols=COLS).shape == (rows, COLS)

    @pytest.mark.parametrize("type_name", TYPES)
    def test_parts_and_threads_change_nothing(self, type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        weight, importance = golden_input()
        want = gguf_quantize(weight, type_name, importance=importance)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            assert torch.equal(gguf_quantize(weight, type_name, importance=importance), want)
        finally:
            torch.set_num_threads(threads)
        monkeypatch.setattr(gguf_quants, "_CALL_WEIGHTS", 5 * COLS)
        monkeypatch.setattr(gguf_quants, "_REFERENCE_WEIGHTS", 5 * COLS)
        assert torch.equal(gguf_quantize(weight, type_name, importance=importance), want)

    def test_q8_0_ignores_importance(self) -> None:
        weight, importance = golden_input()
        assert torch.equal(gguf_quantize(weight, "Q8_0", importance=importance), gguf_quantize(weight, "Q8_0"))

    @pytest.mark.parametrize("type_name", [name for name in TYPES if name != "Q8_0"])
    def test_importance_lowers_what_it_weighs(self, type_name: str) -> None:
        weight = torch.from_numpy(raw_floats(6, 16, COLS))
        importance = IMPORTANCES["outliers"]

        def error(data: Tensor) -> float:
            return (importance * (gguf_dequantize(data, type_name, cols=COLS) - weight) ** 2).sum().item()

        assert error(gguf_quantize(weight, type_name, importance=importance)) < error(gguf_quantize(weight, type_name))

    def test_without_a_gradient_and_with_triton_forced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weight, _ = golden_input()
        want = gguf_quantize(weight, "Q4_K")
        monkeypatch.setenv("LOWBIT_KERNELS", "triton")
        assert torch.equal(gguf_quantize(weight.requires_grad_(), "Q4_K"), want)


class TestDequantize:
    @pytest.mark.parametrize("type_name", TYPES)
    def test_equals_the_gguf_package(self, type_name: str, implementation: str) -> None:
        """Bytes at random, so every code and scale; the exponents of d and m stay below those of inf and nan."""
        block, block_bytes, _ = GGUF_TYPES[type_name]
        raw = np.random.Philox(5).random_raw(40 * 2 * block_bytes)
        data = (raw & np.uint64(0xFF)).astype(np.uint8).reshape(-1, block_bytes)
        for place in gguf_quants._HALVES[type_name]:
            data[:, place + 1] &= 0xBF
        data = data.reshape(40, -1)
        want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name])
        got = gguf_dequantize(torch.from_numpy(data), type_name, cols=2 * block)
        assert np.array_equal(got.numpy().view(np.int32), want.view(np.int32))  # the signs of zeros too

    @pytest.mark.parametrize("type_name", TYPES)
    def test_a_step_at_most(self, type_name: str) -> None:
        """Codes are nearest, so an error is half a step; K types round the step too, so a whole one.

        Weights of usual size: of those below 1e-4 Q6_K makes zeros, since float16's d does.
        """
        weight = torch.from_numpy(raw_floats(6, 16, COLS))
        values = gguf_dequantize(gguf_quantize(weight, type_name), type_name, cols=COLS)
        step = 2 * weight.abs().amax(1, keepdim=True) / (2 ** int(type_name[1]) - 1)
        assert ((values - weight).abs() <= step).all()

    def test_odd_strides(self, implementation: str) -> None:
        data = gguf_quantize(golden_input()[0], "Q6_K")
        want = gguf_dequantize(data, "Q6_K", cols=COLS)
        assert torch.equal(gguf_dequantize(data.T.contiguous().T, "Q6_K", cols=COLS), want)
        assert torch.equal(gguf_dequantize(data[1::3], "Q6_K", cols=COLS), want[1::3])


class TestErrors:
    @pytest.mark.parametrize(
        ("type_name", "cols", "message"),
        [
            ("Q4_K", 576, "cols=576 is not a multiple of 256, the block of Q4_K; use Q5_0"),
            ("Q6_K", 48, "cols=48 is not a multiple of 256, the block of Q6_K; use F16"),
            ("Q8_0", 0, "cols=0 is not a multiple of 32"),
            ("IQ4_XS", 256, "type_name='IQ4_XS' is unknown; use one of Q4_0, Q4_1, Q5_0"),
        ],
    )
    def test_type_and_size(self, type_name: str, cols: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            gguf_quantize(torch.ones(2, cols), type_name)
        with pytest.raises(ValueError, match=message):
            gguf_dequantize(torch.ones(2, 32, dtype=torch.uint8), type_name, cols=cols)

    @pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
    @pytest.mark.parametrize("type_name", TYPES)
    def test_weights_that_are_not_finite(self, type_name: str, value: float, implementation: str) -> None:
        weight = torch.ones(3, 256)
        weight[1, 7] = value
        with pytest.raises(ValueError, match=rf"weight\[1, 7\] is {value}; quantization needs finite weights"):
            gguf_quantize(weight, type_name)

    def test_weights_beyond_float32(self) -> None:
        with pytest.raises(ValueError, match=r"weight\[0, 0\] is inf"):
            gguf_quantize(torch.full((1, 32), 1e300, dtype=torch.float64), "Q8_0")

    @pytest.mark.parametrize(
        ("type_name", "fits"), [("Q4_0", 5.2e5), ("Q5_0", 1e6), ("Q8_0", 8.3e6), ("Q4_1", 6.5e4), ("Q6_K", 8.3e6)]
    )
    def test_scales_beyond_float16(self, type_name: str, fits: float, implementation: str) -> None:
        """65504 is float16's largest: d of Q4_0 is max / 8, of Q8_0 max / 127, m of Q4_1 the smallest weight."""
        weight = torch.zeros(2, 512)
        weight[1, 300] = -fits
        assert torch.isfinite(gguf_dequantize(gguf_quantize(weight, type_name), type_name, cols=512)).all()
        weight[1, 300] *= 40
        columns = "256:512" if type_name == "Q6_K" else "288:320"
        message = rf"weight\[1, {columns}\] needs a scale beyond float16's 65504 in {type_name}; look for weights"
        with pytest.raises(ValueError, match=message):
            gguf_quantize(weight, type_name)

    @pytest.mark.parametrize(
        ("importance", "message"),
        [
            (torch.ones(31), r"importance is torch.float32 \(31,\); the weight has cols=32: use float \(32,\)"),
            (torch.ones(1, 32), r"importance is torch.float32 \(1, 32\)"),
            (torch.ones(32, dtype=torch.int64), r"importance is torch.int64 \(32,\)"),
            (torch.arange(32.0) - 1, r"importance\[0\] is -1.0; a mean of squares is finite and not negative"),
            (torch.full((32,), torch.nan), r"importance\[0\] is nan"),
            (torch.full((32,), torch.inf), r"importance\[0\] is inf"),
        ],
    )
    def test_importance(self, importance: Tensor, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            gguf_quantize(torch.ones(2, 32), "Q4_0", importance=importance)

    def test_weight_of_another_shape(self) -> None:
        for weight in (torch.ones(32), torch.ones(1, 32, dtype=torch.int8)):
            with pytest.raises(ValueError, match=r"quantization takes floats \[out_features, in_features\]"):
                gguf_quantize(weight, "Q8_0")

    def test_data_that_does_not_fit(self) -> None:
        data = gguf_quantize(torch.ones(2, 64), "Q4_0")
        for wrong, cols in ((data, 32), (data.float(), 64), (data[0], 64)):
            with pytest.raises(
                ValueError, match=rf"data is .*; cols={cols} of Q4_0 takes uint8 \[rows, {cols * 9 // 16}\]"
            ):
                gguf_dequantize(wrong, "Q4_0", cols=cols)


@pytest.mark.parametrize(
    ("wanted", "cols", "fitting"),
    [
        *[(name, 512, name) for name in TYPES],
        *[(name, 576, name) for name in TYPES if not name.endswith("K")],
        ("Q4_K", 576, "Q5_0"),
        ("Q5_K", 576, "Q5_1"),
        ("Q6_K", 576, "Q8_0"),
        *[(name, 48, "F16") for name in TYPES],
    ],
)
def test_fitting_type(wanted: str, cols: int, fitting: str) -> None:
    assert fitting_type(wanted, cols) == fitting
