"""What is on disk, unpacked bit by bit as each format's documentation says, is the weight that we compute with."""

import json

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.formats.packed import (
    ASYM,
    SYM,
    config_of,
    dense_model,
    files_of,
    layers_of,
    pack,
    tokenizer,
    unpack_awq,
    unpack_bnb,
    unpack_compressed,
    unpack_gptq,
)
from trainer.config.errors import UserError
from trainer.formats.awq import write_awq
from trainer.formats.bnb import write_bnb
from trainer.formats.compressed_tensors import write_compressed_tensors
from trainer.formats.gptq import write_gptq
from trainer.quantizer import Quantizer

ROWS = Quantizer("int4", group_size=-1, scale_dtype="float16", symmetric=False)
PACKED = {
    "symmetric": (SYM, {}),
    "asymmetric": (ASYM, {}),
    "asymmetric rows": (ROWS, {}),
    "symmetric, act-order": (SYM, {"act_order": True}),
    "asymmetric, act-order": (ASYM, {"act_order": True}),
    "a dense layer": (SYM, {"dense": ("1.mlp.down_proj",)}),
}


def assert_equal_weights(model: PreTrainedModel, unpack) -> None:
    for name, layer in layers_of(model).items():
        np.testing.assert_array_equal(unpack(name), layer.quantized.dequantize(torch.float32).numpy(), err_msg=name)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", PACKED)
def test_gptq(case: str, version: int, kind: str, tmp_path) -> None:
    quantizer, options = PACKED[case]
    model = pack(dense_model(kind), quantizer, **options)
    if version == 1 and quantizer.symmetric is False:
        with pytest.raises(UserError, match=r"q_proj has zero points of 0.*use version=2"):
            write_gptq(model, tokenizer(), tmp_path / "out", version=1)
        assert not (tmp_path / "out").exists()
        return
    write_gptq(model, tokenizer(), tmp_path / "out", version=version, dtype=torch.float32)
    tensors, config = files_of(tmp_path / "out"), config_of(tmp_path / "out")
    assert_equal_weights(model, lambda name: unpack_gptq(tensors, name, version=version))
    assert config["checkpoint_format"] == {1: "gptq", 2: "gptq_v2"}[version]
    assert config["desc_act"] == ("act-order" in case) and config["sym"] == (quantizer.symmetric is True)
    assert config["group_size"] == quantizer.group_size and config["bits"] == 4
    assert json.loads((tmp_path / "out" / "quantize_config.json").read_text()) == config
    skipped = r"-:^model\.layers\.1\.mlp\.down_proj$"
    assert (skipped in config["dynamic"]) == (case == "a dense layer") and r"-:^lm_head$" in config["dynamic"]
    if kind == "qwen2":
        bias = layers_of(model)["model.layers.0.self_attn.q_proj"].bias.numpy()
        np.testing.assert_array_equal(tensors["model.layers.0.self_attn.q_proj.bias"], bias)


def test_zero_points_that_version_1_stores(tmp_path) -> None:
    """Every zero point but 0, the word of symmetric weights, and the version that None stands for."""
    model = dense_model()
    for layer in layers_of(pack(model, SYM)).values():
        zeros = torch.randint(1, 16, layer.quantized.tensors["scales"].shape, dtype=torch.uint8)
        layer.quantizer, layer.zeros = ASYM, zeros
    write_gptq(model, tokenizer(), tmp_path / "asym", version=1)
    tensors = files_of(tmp_path / "asym")
    assert_equal_weights(model, lambda name: unpack_gptq(tensors, name, version=1))
    write_gptq(model, tokenizer(), tmp_path / "auto")
    assert config_of(tmp_path / "auto")["checkpoint_format"] == "gptq_v2"
    write_gptq(pack(dense_model(), SYM), tokenizer(), tmp_path / "sym")
    assert config_of(tmp_path / "sym")["checkpoint_format"] == "gptq"
    # 7 in each nibble: the word that kernels for symmetric weights may take for granted
    assert (files_of(tmp_path / "sym")["model.layers.0.mlp.up_proj.qzeros"] == 0x77777777).all()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("case", [case for case in PACKED if "act-order" not in case])
def test_awq(case: str, kind: str, tmp_path) -> None:
    quantizer, options = PACKED[case]
    model = pack(dense_model(kind), quantizer, **options)
    write_awq(model, tokenizer(), tmp_path / "out", dtype=torch.float32)
    tensors, config = files_of(tmp_path / "out"), config_of(tmp_path / "out")
    assert_equal_weights(model, lambda name: unpack_awq(tensors, name))
    assert config["version"] == "gemm" and config["zero_point"] is True
    dense = ["model.layers.1.mlp.down_proj"] if case == "a dense layer" else []
    assert config["modules_to_not_convert"] == [*dense, "lm_head"]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("case", [*(case for case in PACKED if "act-order" not in case), "int8", "int8 groups"])
def test_compressed_tensors(case: str, kind: str, tmp_path) -> None:
    int8 = {"int8": Quantizer("int8"), "int8 groups": Quantizer("int8", group_size=32)}
    quantizer, options = PACKED.get(case) or (int8[case], {})
    model = pack(dense_model(kind), quantizer, **options)
    write_compressed_tensors(model, tokenizer(), tmp_path / "out", dtype=torch.float32)
    tensors, config = files_of(tmp_path / "out"), config_of(tmp_path / "out")
    bits = 8 if case in int8 else 4
    assert_equal_weights(model, lambda name: unpack_compressed(tensors, name, bits=bits))
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"] and config["ignore"][-1] == "lm_head"
    assert group["weights"]["num_bits"] == bits and config["format"] == "pack-quantized"
    assert group["weights"]["strategy"] == ("channel" if quantizer.group_size == -1 else "group")


@pytest.mark.parametrize("inputs", ["token", "tensor"])
def test_compressed_tensors_with_int8_inputs(inputs: str, tmp_path) -> None:
    model = pack(dense_model("qwen2"), Quantizer("int8"), inputs=inputs)
    write_compressed_tensors(model, tokenizer(), tmp_path / "out", dtype=torch.float32)
    tensors, config = files_of(tmp_path / "out"), config_of(tmp_path / "out")
    assert_equal_weights(
        model, lambda name: tensors[f"{name}.weight"].astype(np.float32) * tensors[f"{name}.weight_scale"]
    )
    (group,) = config["config_groups"].values()
    assert config["format"] == "int-quantized" and group["input_activations"]["strategy"] == inputs
    assert group["input_activations"]["dynamic"] == (inputs == "token")
    scales = {name: value for name, value in tensors.items() if name.endswith("input_scale")}
    assert len(scales) == (14 if inputs == "tensor" else 0)
    assert all(value.shape == (1,) and value[0] == 0.125 for value in scales.values())


def test_compressed_tensors_of_several_schemes(tmp_path) -> None:
    """A config group for each, its layers by name."""
    other = {"mlp.down_proj": Quantizer("int8"), "o_proj": ROWS}
    model = pack(dense_model(), SYM, other=other, dense=("0.mlp.up_proj",))
    write_compressed_tensors(model, tokenizer(), tmp_path / "out", dtype=torch.float32)
    tensors, config = files_of(tmp_path / "out"), config_of(tmp_path / "out")
    groups = list(config["config_groups"].values())
    assert [(g["weights"]["num_bits"], g["weights"]["strategy"]) for g in groups] == [
        (4, "group"),
        (4, "channel"),
        (8, "channel"),
    ]
    assert sorted(sum((g["targets"] for g in groups), [])) == sorted(layers_of(model))
    assert config["ignore"] == ["model.layers.0.mlp.up_proj", "lm_head"]
    bits = {name: group["weights"]["num_bits"] for group in groups for name in group["targets"]}
    assert_equal_weights(model, lambda name: unpack_compressed(tensors, name, bits=bits[name]))


@pytest.mark.parametrize("codebook", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [True, False])
def test_bitsandbytes(codebook: str, double_quant: bool, tmp_path) -> None:
    model = pack(dense_model("qwen2"), Quantizer(codebook, double_quant=double_quant), dense=("v_proj",))
    write_bnb(model, tokenizer(), tmp_path / "out", dtype=torch.float32)
    tensors, config = files_of(tmp_path / "out"), config_of(tmp_path / "out")
    assert_equal_weights(model, lambda name: unpack_bnb(tensors, name, codebook))
    assert config["bnb_4bit_quant_type"] == codebook and config["bnb_4bit_use_double_quant"] == double_quant
    assert config["llm_int8_skip_modules"][-1] == "lm_head" and len(config["llm_int8_skip_modules"]) == 3


def test_shards(tmp_path) -> None:
    model = pack(dense_model(), SYM)
    write_gptq(model, tokenizer(), tmp_path / "out", shard_bytes=40_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    tensors = files_of(tmp_path / "out")
    assert_equal_weights(model, lambda name: unpack_gptq(tensors, name, version=1))


def test_the_models_of_this_file_have_the_zero_points_that_matter() -> None:
    """0 where a group has no negative weight, 15 where it has no positive one."""
    for layer in layers_of(pack(dense_model(), ASYM)).values():
        zeros = layer.quantized.tensors["zeros"]
        assert (zeros[0] == 0).all() and (zeros[1] == 15).all()


# ---- scales that 16 bits do not hold


def test_scales_that_would_be_rounded_are_refused(tmp_path) -> None:
    model = pack(dense_model(), Quantizer("int4"))
    with pytest.raises(UserError, match=r"would round to float16.*up to 0.000\d+ of.*scale_dtype=float16, or allow"):
        write_gptq(model, tokenizer(), tmp_path / "out")
    with pytest.raises(UserError, match="would round to bfloat16.*scale_dtype=bfloat16"):
        write_compressed_tensors(model, tokenizer(), tmp_path / "out", dtype=torch.bfloat16)
    assert not (tmp_path / "out").exists()


def test_rounded_scales_are_measured(tmp_path) -> None:
    """The figures are those of the weights, which change as their scales do."""
    model = pack(dense_model(), Quantizer("int4"))
    scales = write_gptq(model, tokenizer(), tmp_path / "out", allow_rounded_scales=True, provenance={"base": "tiny"})
    tensors, changes = files_of(tmp_path / "out"), []
    for name, layer in layers_of(model).items():
        before = layer.quantized.dequantize(torch.float32).numpy().astype(np.float64)
        after = unpack_gptq(tensors, name, version=1).astype(np.float64)
        changes.append(np.abs(after - before)[before != 0] / np.abs(before)[before != 0])
    changes = np.concatenate(changes)
    # Products are rounded to float32 in both: 2^-24 of a weight, beside changes of up to 2^-11.
    assert scales.largest == pytest.approx(changes.max(), abs=2**-22)
    # Codes of 0 are not in `changes`, and groups differ in how many they have: the mean is that of the groups.
    assert scales.mean == pytest.approx(changes.mean(), rel=0.01)
    assert 2**-13 < scales.mean < scales.largest <= 2**-11
    identity = json.loads((tmp_path / "out" / "lowbit.json").read_text())["gptq"]
    assert identity["largest_change"] == scales.largest and identity["mean_change"] == scales.mean
    assert identity["base"] == "tiny" and identity["scales_rounded_to"] == "float16"


def test_float32_scales_whose_values_survive_are_exact(tmp_path) -> None:
    """Values count and not labels: a quantizer of float32 scales that are powers of two."""
    model = pack(dense_model(), Quantizer("int4"))
    for layer in layers_of(model).values():
        layer.scales = torch.exp2(torch.randint(-8, -2, layer.scales.shape).float())
    scales = write_gptq(model, tokenizer(), tmp_path / "out")
    assert scales.figures == {} and scales.largest == 0
    tensors = files_of(tmp_path / "out")
    assert_equal_weights(model, lambda name: unpack_gptq(tensors, name, version=1))


def test_a_scale_too_large_for_float16(tmp_path) -> None:
    model = pack(dense_model(), Quantizer("int4"))
    layers_of(model)["model.layers.1.mlp.up_proj"].scales[3, 1] = 7e4
    with pytest.raises(UserError, match="layers.1.mlp.up_proj has a scale of 7e.04, which float16 has no value for"):
        write_awq(model, tokenizer(), tmp_path / "out", allow_rounded_scales=True)


# ---- what a layout does not hold


@pytest.mark.parametrize(
    ("write", "quantizer", "options", "message"),
    [
        (write_gptq, Quantizer("nf4"), {}, "holds nf4 codes and gptq holds int4; write bitsandbytes"),
        (write_awq, Quantizer("int8"), {}, "holds int8 codes and awq holds int4; write compressed-tensors"),
        (write_bnb, SYM, {}, "holds int4 codes and bitsandbytes holds nf4, fp4; write gptq, awq, compressed-tensors"),
        (write_compressed_tensors, Quantizer("nf3"), {}, "nf3 codes.*only lowbit's own folders hold them"),
        (write_awq, SYM, {"act_order": True}, "in act-order.*write gptq, or quantize without"),
        (
            write_compressed_tensors,
            SYM,
            {"act_order": True},
            "act-order.*no longer open; write gptq",
        ),
        (write_gptq, SYM, {"other": {"o_proj": ROWS}}, "has groups of 32 and .*o_proj of -1; gptq has one group size"),
        (write_compressed_tensors, SYM, {"inputs": "token"}, "rounds its inputs beside int4 weights"),
        (write_gptq, SYM, {"dense": ("_proj",)}, "no layer of the model is packed"),
        (
            *(write_compressed_tensors, Quantizer("int8", group_size=32), {"inputs": "token"}),
            "groups of 32 beside INT8 inputs.*group_size=-1",
        ),
    ],
)
def test_what_a_layout_cannot_hold(write, quantizer: Quantizer, options: dict, message: str, tmp_path) -> None:
    model = pack(dense_model(), quantizer, **options)
    with pytest.raises(UserError, match=message):
        write(model, tokenizer(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [write_gptq, write_awq])
def test_sizes_that_loaders_do_not_take(write, tmp_path) -> None:
    from trainer.config.model import DType, ModelConfig, ModelSource
    from trainer.model import load_model

    model, tok = load_model(ModelConfig(ModelSource.tiny, dtype=DType.float32))
    pack(model, SYM)
    with pytest.raises(UserError, match="k_proj has out_features=48.*multiple of 32.*compressed-tensors"):
        write(model, tok, tmp_path / "out")


def test_an_adapter_is_refused(tmp_path) -> None:
    from trainer.config.lora import LoraConfig
    from trainer.lora import attach_lora

    model = attach_lora(pack(dense_model(), SYM), LoraConfig(), seed=0)
    with pytest.raises(UserError, match="has an adapter.*merge it"):
        write_gptq(model, tokenizer(), tmp_path / "out")


def test_a_folder_of_someone_else_is_left_alone(tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="no export of lowbit's"):
        write_gptq(pack(dense_model(), SYM), tokenizer(), tmp_path / "out")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"
