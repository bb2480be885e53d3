"""Other programs open what we wrote, and compute with the same weights."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, CompressedTensorsConfig

from tests.formats.packed import (
    ASYM,
    SYM,
    dense_model,
    dequantized,
    files_of,
    layers_of,
    logits,
    pack,
    tokenizer,
)
from trainer.formats.awq import write_awq
from trainer.formats.bnb import write_bnb
from trainer.formats.compressed_tensors import write_compressed_tensors
from trainer.formats.gptq import write_gptq
from trainer.formats.open_quantized import open_foreign
from trainer.quantizer import Quantizer

ROWS = Quantizer("int4", group_size=-1, scale_dtype="float16", symmetric=False)
SYMMETRIC_ROWS = Quantizer("int4", group_size=-1, scale_dtype="float16")
SCHEMES = {
    "symmetric": (SYM, {}),
    "asymmetric": (ASYM, {}),
    "asymmetric rows": (ROWS, {}),
    "a dense layer": (SYM, {"dense": ("1.mlp.down_proj",)}),
    "several schemes": (SYM, {"other": {"down_proj": Quantizer("int8"), "o_proj": SYMMETRIC_ROWS}}),
    "int8": (Quantizer("int8"), {}),
}
ORDERED = {
    "act-order": (SYM, {"act_order": True}),
    "asymmetric, act-order": (ASYM, {"act_order": True}),
}


def weights_of(model: torch.nn.Module, names) -> dict[str, Tensor]:
    return {name: model.get_submodule(name).weight.float() for name in names}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("case", SCHEMES)
def test_transformers_opens_compressed_tensors(case: str, kind: str, tmp_path) -> None:
    pytest.importorskip("compressed_tensors", reason="the library that opens the format")
    quantizer, options = SCHEMES[case]
    model = pack(dense_model(kind), quantizer, **options)
    write_compressed_tensors(model, tokenizer(), tmp_path / "out", dtype=torch.float32)
    # transformers 5.24 dequantizes every layer by the first scheme. The library itself, at the first forward, does not,
    # but has no place for packed zero points there (compressed-tensors 0.20.1).
    options = {} if case == "several schemes" else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True, **options
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    logits(theirs)
    ours = layers_of(model)
    for name, weight in weights_of(theirs, ours).items():
        assert torch.equal(weight, ours[name].quantized.dequantize(torch.float32)), name
    # The same weights in the same program.
    assert torch.equal(logits(theirs), logits(dequantized(model)))


@pytest.mark.parametrize("symmetric", [True, False])
def test_bfloat16_is_bfloat16(symmetric: bool, tmp_path) -> None:
    """Scales of 16 bits, and weights in 16 bits: rounded once there and here."""
    pytest.importorskip("compressed_tensors", reason="the library that opens the format")
    model = pack(dense_model(dtype=torch.bfloat16), Quantizer("int4", scale_dtype="bfloat16", symmetric=symmetric))
    assert write_compressed_tensors(model, tokenizer(), tmp_path / "out").figures == {}
    options = {"dtype": torch.bfloat16, "quantization_config": CompressedTensorsConfig(dequantize=True)}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options)
    for name, layer in layers_of(model).items():
        assert torch.equal(theirs.get_submodule(name).weight, layer.quantized.dequantize(torch.bfloat16)), name


@pytest.mark.parametrize("inputs", ["token", "tensor"])
def test_transformers_computes_int8_inputs(inputs: str, tmp_path) -> None:
    """Without dequantize the library rounds inputs itself, as fake quantization; ours are integer products."""
    pytest.importorskip("compressed_tensors", reason="the library that opens the format")
    model = pack(dense_model("qwen2"), Quantizer("int8"), inputs=inputs)
    write_compressed_tensors(model, tokenizer(), tmp_path / "out", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ours = logits(model)
    rounded = dequantized(pack(dense_model("qwen2"), Quantizer("int8")))
    difference = (logits(theirs) - ours).norm() / ours.norm()
    # A static scale is stored, and is the same grid: what is left are float32 sums in another order, which move an
    # input over the edge of its step now and then. For the scale of a token compressed-tensors divides by 127.5 and we
    # by 127: grids 0.4 % apart, so that the two differ by about as much as each differs from inputs as they are.
    assert difference < (1e-3 if inputs == "tensor" else 2 * (logits(rounded) - ours).norm() / ours.norm())


@pytest.mark.parametrize("case", ["symmetric", "asymmetric", "asymmetric rows"])
def test_the_converter_of_autoawq_folders(case: str, tmp_path) -> None:
    """compressed-tensors' own reader of AutoAWQ's GEMM layout, then its decompressor."""
    converters = pytest.importorskip("compressed_tensors.entrypoints.convert.converters.autoawq")
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    model = pack(dense_model("qwen2"), SCHEMES[case][0])
    write_awq(model, tokenizer(), tmp_path / "out", dtype=torch.float32)
    group_size = SCHEMES[case][0].group_size
    converter = converters.AutoAWQConverter(group_size=group_size)
    tensors = {name: torch.from_numpy(value) for name, value in files_of(tmp_path / "out").items()}
    converted = converter.process(tensors)
    for name, layer in layers_of(model).items():
        shape = converted[f"{name}.weight_shape"]
        codes = unpack_from_int32(converted[f"{name}.weight_packed"], 4, shape)
        scales = converted[f"{name}.weight_scale"].float()
        zeros = unpack_from_int32(
            converted[f"{name}.weight_zero_point"], 4, torch.Size([shape[0], scales.shape[1]]), packed_dim=0
        )
        span = layer.in_features // scales.shape[1]
        steps = codes.float() - zeros.float().repeat_interleave(span, 1)
        assert torch.equal(steps * scales.repeat_interleave(span, 1), layer.quantized.dequantize(torch.float32)), name


@pytest.mark.parametrize("codebook", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [True, False])
def test_transformers_opens_bitsandbytes(codebook: str, double_quant: bool, tmp_path) -> None:
    from bitsandbytes.functional import dequantize_4bit

    # On CPUs bitsandbytes 0.50 needs rows that end on a block (see formats/bnb.py): 128 and 160 with blocks of 32.
    quantizer = Quantizer(codebook, double_quant=double_quant, block_size=32)
    model = pack(dense_model("qwen2"), quantizer, dense=("v_proj",))
    write_bnb(model, tokenizer(), tmp_path / "out", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, device_map="cpu").train()
    assert isinstance(theirs.config.quantization_config, BitsAndBytesConfig)
    for name, layer in layers_of(model).items():
        weight = theirs.get_submodule(name).weight
        decoded = dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(decoded, layer.quantized.dequantize(torch.float32)), name
    # In train mode bitsandbytes decodes and multiplies: float32 sums of the same terms in another order.
    assert torch.allclose(logits(theirs), logits(model), atol=1e-4)


@pytest.mark.parametrize("double_quant", [True, False])
def test_what_bitsandbytes_wrote(double_quant: bool, tmp_path) -> None:
    dense_model().save_pretrained(tmp_path / "dense")
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.float32,
    )
    options = {"dtype": torch.float32, "device_map": "cpu", "quantization_config": config}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", **options)
    theirs.save_pretrained(tmp_path / "packed")
    opened = open_foreign(tmp_path / "packed", torch.float32)
    ours = pack(dense_model(), Quantizer("nf4", double_quant=double_quant))
    assert layers_of(opened).keys() == layers_of(ours).keys()
    assert torch.equal(logits(opened), logits(ours))


@pytest.mark.parametrize(
    ("write", "case"),
    [
        *[(write_gptq, case) for case in ("symmetric", "asymmetric", "asymmetric rows", "a dense layer")],
        *[(write_gptq, case) for case in ("act-order", "asymmetric, act-order")],
        *[(write_awq, case) for case in ("symmetric", "asymmetric", "a dense layer")],
    ],
)
def test_gptqmodel_opens_gptq_and_awq(write, case: str, tmp_path) -> None:
    gptqmodel = pytest.importorskip("gptqmodel", reason="builds from source; not in the test extra")
    quantizer, options = (SCHEMES | ORDERED)[case]
    model = pack(dense_model("llama"), quantizer, **options)
    write(model, tokenizer(), tmp_path / "out")
    options = {"device": "cpu", "backend": gptqmodel.BACKEND.TORCH, "dtype": torch.float16}
    theirs = gptqmodel.GPTQModel.load(str(tmp_path / "out"), **options).model
    for name, layer in layers_of(model).items():
        # Ones times weights: in float16 the product of code and scale, rounded once, as it is with us.
        decoded = theirs.get_submodule(name)(torch.eye(layer.in_features, dtype=torch.float16)).T
        assert torch.equal(decoded, layer.quantized.dequantize(torch.float16)), name
