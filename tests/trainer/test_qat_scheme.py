"""Schemes: names, what cannot be combined, and what a folder says of them."""

import dataclasses

import pytest

from trainer.kernels.fake_quant import Grid
from trainer.kernels.float_grids import FloatGrid
from trainer.qat.observers import ObserverKind, ObserverSettings
from trainer.qat.scheme import NAMES, Activations, Rounding, Scheme, grid_of
from trainer.quantizer import Quantizer


def test_names_are_what_they_say() -> None:
    int8_tokens = Activations(Grid.int8())
    want = {
        "int4": Scheme(Quantizer("int4")),
        "int4_int8": Scheme(Quantizer("int4"), int8_tokens, integer=True),
        "int8": Scheme(Quantizer("int8"), int8_tokens, integer=True),
        "int8_static": Scheme(Quantizer("int8"), Activations(Grid.int8(), ObserverSettings()), integer=True),
        "int8_weight_only": Scheme(Quantizer("int8")),
        "nf4": Scheme(Quantizer("nf4")),
        "fp8": Scheme(FloatGrid("fp8"), Activations(FloatGrid("fp8"))),
        "mxfp4": Scheme(FloatGrid("mxfp4")),
        "nvfp4": Scheme(FloatGrid("nvfp4")),
    }
    assert {name: Scheme.named(name) for name in NAMES} == want
    assert Scheme.named("int8_static", observer="mse").activations.observer.kind is ObserverKind.mse
    assert Scheme.named("int4", rounding="soft").rounding is Rounding.soft


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_a_folder_give_the_function_back(name: str) -> None:
    scheme = Scheme.named(name)
    again = Scheme.from_settings(scheme.settings)
    assert again.function == scheme.function and again == scheme


def test_what_is_trained_is_no_part_of_the_function() -> None:
    plain = Scheme.named("int4")
    for trained in ({"learn_scales": True, "scale_init": "mse"}, {"rounding": "stochastic"}, {"rounding": "soft"}):
        scheme = Scheme.named("int4", **trained)
        assert scheme != plain and scheme.function == plain.function
        assert Scheme.from_settings(scheme.settings) == plain
    functions = {Scheme.named(name, **grid).function for name in ("int4", "int4_int8") for grid in ({}, {"divisor": 8})}
    assert len(functions) == 4


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 192, -1])
def test_grids_of_kernels_are_those_of_the_quantizer(group_size: int, symmetric: bool) -> None:
    grid = grid_of(Quantizer("int4", group_size=group_size, symmetric=symmetric, scale_dtype="bfloat16"))
    assert (grid.bits, grid.group_size, grid.symmetric) == (4, None if group_size == -1 else group_size, symmetric)
    assert grid_of(Quantizer("int8")) == Grid.int8()


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        (
            "int3",
            {},
            "scheme=int3; use one of int4, int4_int8, int8, int8_static, int8_weight_only, nf4, fp8, mxfp4, nvfp4",
        ),
        ("int4", {"group_size": 48}, "quant.group_size=48 is no multiple of 32"),
        ("int4", {"block_size": 64}, "quant.block_size=64 has no effect with quant.codebook=int4"),
        ("int8", {"symmetric": False}, "quant.symmetric=False has no effect with quant.codebook=int8"),
        ("mxfp4", {"group_size": 32}, "group_size=32 with scheme=mxfp4, whose format says it all"),
        ("int4", {"observer": "mse"}, "observer=mse has no effect with scheme=int4; use scheme=int8_static"),
        ("nf4", {"learn_scales": True}, "learn_scales=true with nf4, whose scales are functions of the weight"),
        ("fp8", {"learn_scales": True}, "learn_scales=true with fp8, whose scales are functions of the weight"),
        ("nf4", {"rounding": "soft"}, "rounding=soft with nf4; only steps of one size"),
        ("int4", {"rounding": "soft", "learn_scales": True}, "rounding=soft with learn_scales=true"),
        ("int4", {"rounding": "up"}, "up"),
        ("int4", {"scale_init": "mse"}, "scale_init=mse has no effect with learn_scales=false"),
        ("int4", {"integer": True}, "integer=true with weights int4 and activations None"),
        ("fp8", {"integer": True}, "integer=true with weights fp8"),
    ],
)
def test_what_has_no_meaning_is_refused(name: str, settings: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Scheme.named(name, **settings)


def test_inputs_are_int8_or_fp8() -> None:
    with pytest.raises(ValueError, match=r"activations are rounded to Grid\(.*use Grid.int8\(\)"):
        Activations(Grid.int8(group_size=32))
    with pytest.raises(ValueError, match="static scales with FloatGrid"):
        Activations(FloatGrid("fp8"), ObserverSettings())


def test_layers_that_do_not_fit_are_refused() -> None:
    Scheme.named("int4", group_size=192).check(576)
    with pytest.raises(ValueError, match="quant.group_size=192 does not divide in_features=160; use one of 32, -1"):
        Scheme.named("int4", group_size=192).check(160)
    with pytest.raises(ValueError, match="nvfp4 has blocks of 16 weights, which do not divide in_features=24"):
        Scheme.named("nvfp4").check(24)


def test_schemes_are_values() -> None:
    assert len({Scheme.named("int4"), Scheme.named("int4"), Scheme.named("int8")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        Scheme.named("int4").integer = True
