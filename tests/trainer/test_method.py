"""How a run trained, in words: every recipe, with and without a teacher."""

from pathlib import Path

import pytest

from trainer import load_config
from trainer.export.method import describe_method

RECIPES = sorted(path.stem for path in (Path(__file__).parent.parent.parent / "conf").glob("*.yaml"))
TEACHER = ", taught by the 16-bit model (forward KL of weight 0.5 at temperature 2, its 64 likeliest tokens)"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_names_its_scheme(recipe: str) -> None:
    text = describe_method(load_config(f"conf={recipe}", "model=tiny"))
    assert (", through INT4 in groups of 32" in text) is recipe.startswith("qat") and "taught" not in text


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ("dpo", "kto", "orpo")])
def test_every_recipe_names_its_teacher(recipe: str) -> None:
    plain = describe_method(load_config(f"conf={recipe}", "model=tiny"))
    taught = load_config(f"conf={recipe}", "model=tiny", "distill.weight=0.5", "distill.temperature=2")
    assert describe_method(taught) == plain + TEACHER


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ("conf=qat", "qat.learn_scales=true", "qat.schemes=[down_proj:int8,'layers.0.*:none']", "qat.start=0.25"),
            "All weights, through INT4 in groups of 32, learned scales; down_proj: INT8 with a scale a row, inputs in "
            "INT8 with a scale a token, learned scales; layers.0.*: 16 bits, after 25 % of the steps",
        ),
        (
            ("conf=qat", "qat.scheme=int8_static", "qat.rounding=soft", "qat.observer=mse", "qat.kv_cache=true"),
            "All weights, through INT8 with a scale a row, inputs in INT8 with a scale a layer (mse), soft rounding, "
            "keys and values in INT8",
        ),
        (
            ("conf=qat", "qat.scheme=none", "qat.schemes=[o_proj:nf4]", "qat.start=3"),
            "All weights, through o_proj: NF4 in blocks of 64 with double quantisation, from step 3 on",
        ),
        (
            ("conf=qat_lora", "distill.weight=1", "distill.top_k=0", "distill.tokens=all", "distill.loss=reverse_kl"),
            "LoRA of rank 16, alpha 32, on all linear layers of a 16-bit base, merge-aware, through INT4 in groups of "
            "32, taught by the 16-bit model (reverse KL of weight 1 at temperature 1, its whole distribution, at the "
            "prompts too)",
        ),
        (
            ("conf=qat_blocks", "blockwise.epochs=2"),
            "All weights block by block (epochs: 2) and then all scales, through INT4 in groups of 32, learned scales",
        ),
        (
            ("conf=qat_blocks", "train.max_steps=0"),
            "All weights block by block (epochs: 1), through INT4 in groups of 32, learned scales",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_words(overrides: tuple[str, ...], text: str) -> None:
    assert describe_method(load_config("model=tiny", *overrides)) == text
