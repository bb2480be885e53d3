"""PtqConfig: a key that nothing reads is refused, whatever the method."""

import pytest

from trainer import UserError
from trainer.config.ptq import EXPORTS, Fold, PtqConfig, PtqMethod

WITHOUT_EFFECT = [
    ("rtn", {"damping": 0.5}, "method=gptq"),
    ("awq", {"act_order": "none"}, "method=gptq"),
    ("hqq", {"search_scales": False}, "method=gptq"),
    ("rtn", {"refit_scales": False}, "method=gptq"),
    ("awq", {"match": "original"}, "method=gptq"),
    ("gptq", {"min_signal": 3.0}, "method=smoothquant"),
    ("int8_dynamic", {"fold": "none", "min_signal": 3.0}, "method=smoothquant"),
    ("gptq", {"alpha": 0.5}, "fold=smooth"),
    ("gptq", {"gguf_type": "Q4_0"}, "method=gguf"),
    ("gptq", {"imatrix": False}, "method=gguf"),
    ("rtn", {"high_codebook": "nf4"}, "bits_budget"),
    ("rtn", {"columns": ["prompt=q"]}, "a .jsonl file"),
    ("rtn", {"block_size": 32}, "codebook=nf4"),
    ("rtn", {"double_quant": True}, "codebook=nf4"),
    ("rtn", {"codebook": "nf4", "group_size": 32}, "codebook=int4 or int8"),
    ("rtn", {"codebook": "nf4", "scale_dtype": "bfloat16"}, "codebook=int4 or int8"),
    ("rtn", {"codebook": "int8", "symmetric": True}, "codebook=int4"),
    ("rtn", {"dtype": "float16"}, "leave it out"),
    *[
        ("gguf", settings, "another method")
        for settings in (
            {"codebook": "int4"},
            {"exclude": ["down_proj"]},
            {"bits_budget": 5.0},
            {"fold": "awq"},
            {"group_size": 64},
            {"scale_dtype": "float32"},
        )
    ],
]


@pytest.mark.parametrize(("method", "settings", "use"), WITHOUT_EFFECT)
def test_keys_without_effect_are_refused(method, settings, use):
    (name, *_) = set(settings) - {"codebook", *({"fold"} if "min_signal" in settings else ())} or settings
    with pytest.raises(UserError, match=f"^{name}=.*has no effect") as error:
        PtqConfig(method=method, **settings)
    assert use in str(error.value)


def test_keys_that_only_sensitive_layers_read_are_taken():
    assert PtqConfig(codebook="nf4", bits_budget=5.0, group_size=32).group_size == 32
    assert PtqConfig(codebook="int8", high_codebook="int4", bits_budget=5.0).symmetric is True


def test_what_cannot_be():
    for method, codebook in (("smoothquant", "int4"), ("int8_dynamic", "nf4"), ("hqq", "int8"), ("rtn", "int5")):
        with pytest.raises(UserError, match=f"codebook={codebook}"):
            PtqConfig(method=method, codebook=codebook)
    with pytest.raises(UserError, match="whose inputs are not rounded"):
        PtqConfig(fold="smooth")
    for name, value in {"seed": -1, "max_pass_tokens": 0, "rows": 0}.items():
        with pytest.raises(UserError, match=f"{name}={value}; give at least"):
            PtqConfig(**{name: value})


@pytest.mark.parametrize("method", PtqMethod)
def test_defaults_are_taken_and_taken_again(method):
    """A config that was read back from what it resolved to is the same."""
    config = PtqConfig(method=method)
    assert PtqConfig(**vars(config)) == config
    assert set(config.formats) <= set(EXPORTS) and config.fold in Fold
