"""Folders in other engines' layouts, opened and served with our layers; what is not read is refused."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.formats.packed import (
    ASYM,
    SYM,
    config_of,
    dense_model,
    dequantized,
    layers_of,
    logits,
    pack,
    tokenizer,
)
from trainer import LLM, finetune, load_config
from trainer.config.errors import UserError
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.export.merged import write_merged
from trainer.formats.awq import write_awq
from trainer.formats.bnb import write_bnb
from trainer.formats.card import FORMATS, write_card
from trainer.formats.compressed_tensors import write_compressed_tensors
from trainer.formats.gptq import write_gptq
from trainer.formats.open_quantized import READERS, open_foreign
from trainer.model import load_model
from trainer.qat.packed_model import scheme_of_layer
from trainer.quantizer import Quantizer
from trainer.serve.gate import train_serve_gate

ROWS = Quantizer("int4", group_size=-1, scale_dtype="float16", symmetric=False)
INT8 = Quantizer("int8")
CASES = {
    "gptq": (write_gptq, SYM, {}),
    "gptq, act-order": (write_gptq, SYM, {"act_order": True}),
    "gptq, asymmetric, act-order": (write_gptq, ASYM, {"act_order": True}),
    "gptq, asymmetric rows": (write_gptq, ROWS, {}),
    "gptq, a dense layer": (write_gptq, SYM, {"dense": ("1.mlp.down_proj",)}),
    "awq": (write_awq, ASYM, {}),
    "awq, symmetric": (write_awq, SYM, {}),
    "compressed-tensors": (write_compressed_tensors, SYM, {}),
    "compressed-tensors, asymmetric": (write_compressed_tensors, ASYM, {}),
    "compressed-tensors, several": (write_compressed_tensors, SYM, {"other": {"down_proj": INT8, "o_proj": ROWS}}),
    "compressed-tensors, int8": (write_compressed_tensors, INT8, {}),
    "compressed-tensors, int8 inputs": (write_compressed_tensors, INT8, {"inputs": "token"}),
    "compressed-tensors, static": (write_compressed_tensors, INT8, {"inputs": "tensor"}),
    "bitsandbytes, nf4": (write_bnb, Quantizer("nf4"), {}),
    "bitsandbytes, fp4": (write_bnb, Quantizer("fp4", double_quant=False), {}),
}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("case", CASES)
def test_what_was_written_is_opened(case: str, kind: str, tmp_path) -> None:
    """The same tensors in the same kinds of layers, and the same logits to the bit."""
    write, quantizer, options = CASES[case]
    model = pack(dense_model(kind), quantizer, **options)
    write(model, tokenizer(), tmp_path / "out", dtype=torch.float32)
    opened = open_foreign(tmp_path / "out", torch.float32)
    ours, theirs = layers_of(model), layers_of(opened)
    assert ours.keys() == theirs.keys()
    for name, layer in ours.items():
        assert type(theirs[name]) is type(layer)
        for key, tensor in layer.quantized.tensors.items():
            other = theirs[name].quantized.tensors[key]
            assert (tensor is None and other is None) or torch.equal(tensor, other), (name, key)
        scheme, other = scheme_of_layer(layer), scheme_of_layer(theirs[name])
        assert (scheme.activations, scheme.integer) == (other.activations, other.integer)
    assert torch.equal(logits(opened), logits(model))
    assert not opened.training and not any(p.requires_grad for p in opened.parameters())


@pytest.mark.parametrize("case", CASES)
def test_it_is_served(case: str, tmp_path) -> None:
    """The server beside the module; without rounded inputs, beside the dense model of the dequantized weights."""
    write, quantizer, options = CASES[case]
    model = pack(dense_model("qwen2" if "gptq" in case else "llama"), quantizer, **options)
    write(model, tokenizer(), tmp_path / "out", dtype=torch.float32)
    llm = LLM(str(tmp_path / "out"), dtype="float32", max_model_len=64, max_num_seqs=4)
    module = model if "inputs" in options else dequantized(model)
    report = train_serve_gate(module, llm, [list(range(4, 40)), list(range(200, 150, -1))])
    # float32 sums in another order, two layers; integer products are exact, and rounding of inputs may tip.
    assert report.max_difference < (1e-2 if "inputs" in options else 1e-4)


def test_tied_embeddings_are_stored_once(tmp_path) -> None:
    model = pack(dense_model(tied=True), SYM)
    write_gptq(model, tokenizer(), tmp_path / "out", dtype=torch.float32)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    opened = open_foreign(tmp_path / "out", torch.float32)
    assert opened.lm_head.weight is opened.model.embed_tokens.weight
    assert torch.equal(logits(opened), logits(model))


def test_packed_heads_and_embeddings_are_written_dense(tmp_path, caplog) -> None:
    from trainer.config.qat import QatConfig
    from trainer.convert import convert
    from trainer.qat.packed_linear import PackedEmbedding
    from trainer.qat.prepare import prepare_qat

    model = dense_model().requires_grad_(True)
    options = {"scheme": "int4", "schemes": ["lm_head:int4", "embed_tokens:int4"]}
    prepare_qat(model, QatConfig(**options))
    convert(model.eval())
    assert isinstance(model.model.embed_tokens, PackedEmbedding)
    write_compressed_tensors(model, tokenizer(), tmp_path / "out", dtype=torch.float32)
    opened = open_foreign(tmp_path / "out", torch.float32)
    assert torch.allclose(logits(opened), logits(model), atol=1e-5)  # the head's product is another kernel's
    assert torch.equal(opened.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert "lm_head is written dense" in caplog.text
    write_merged(model, tokenizer(), tmp_path / "dense", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert torch.equal(plain.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(plain.lm_head.weight, model.lm_head.quantized.dequantize(torch.float32))
    assert torch.allclose(logits(plain), logits(model), atol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_codes_that_are_stored_as_they_are_multiplied_are_not_copied(tmp_path) -> None:
    """INT8 and bitsandbytes' codes lie in the mapped file."""
    write_bnb(pack(dense_model(), Quantizer("nf4")), tokenizer(), tmp_path / "out", dtype=torch.float32)
    opened = open_foreign(tmp_path / "out", torch.float32)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    file = str((tmp_path / "out" / "model.safetensors").resolve())
    ranges = [[int(end, 16) for end in entry[0].split("-")] for entry in maps if entry[-1] == file]
    for tensor in (layers_of(opened)["model.layers.0.mlp.up_proj"].packed, opened.model.embed_tokens.weight):
        assert any(first <= tensor.data_ptr() < last for first, last in ranges)


# ---- what other tools write


@pytest.fixture
def gptq_folder(tmp_path) -> Path:
    write_gptq(pack(dense_model(), SYM), tokenizer(), tmp_path / "gptq", dtype=torch.float32)
    return tmp_path / "gptq"


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object] | None = None, **config: object) -> Path:
    """The folder with other tensors and another `quantization_config`; a value of None is left out."""
    tensors = load_file(folder / "model.safetensors")
    if edit is not None:
        edit(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((folder / "config.json").read_text())
    merged = {**whole["quantization_config"], **config}
    whole["quantization_config"] = {key: value for key, value in merged.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def test_a_zero_point_of_0_in_version_1(gptq_folder: Path) -> None:
    """AutoGPTQ stores 15 for it; a label is missing in its older folders, and they hold what is computed."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.qzeros"][:] = -1  # 15 in each nibble
        for name in [name for name in tensors if name.endswith("q_proj.g_idx")]:
            del tensors[name]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)

    opened = open_foreign(change(gptq_folder, edit, checkpoint_format=None, sym=False), torch.float32)
    zeros = opened.model.layers[0].mlp.up_proj.quantized.tensors["zeros"]
    assert (zeros == 0).all()
    assert opened.model.layers[1].mlp.up_proj.quantized.tensors["zeros"] is None


def test_act_order_of_compressed_tensors(tmp_path) -> None:
    """What llm-compressor wrote while the format had it."""
    folder = tmp_path / "out"
    model = pack(dense_model(), ASYM)
    write_compressed_tensors(model, tokenizer(), folder, dtype=torch.float32)
    ordered = pack(dense_model(), ASYM, act_order=True)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name, layer in layers_of(ordered).items():
            tensors[f"{name}.weight_g_idx"] = layer.quantized.tensors["g_idx"]

    opened = open_foreign(change(folder, edit), torch.float32)
    assert torch.equal(logits(opened), logits(ordered))
    assert not torch.equal(logits(opened), logits(model))


def test_one_scale_for_a_whole_weight(tmp_path) -> None:
    model = pack(dense_model(), INT8, inputs="token")
    write_compressed_tensors(model, tokenizer(), tmp_path / "o", dtype=torch.float32)
    groups = config_of(tmp_path / "o")["config_groups"]
    groups["group_0"]["weights"]["strategy"] = "tensor"
    groups["group_0"]["targets"] = [r"re:.*_proj$"]

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = tensors[name][:1].reshape(1)

    opened = open_foreign(change(tmp_path / "o", edit, config_groups=groups), torch.float32)
    scales = layers_of(opened)["model.layers.0.mlp.up_proj"].quantized.tensors["scales"]
    assert scales.shape == (160, 1) and (scales == scales[0]).all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 8}, "bits=8; read here: 4.*16-bit model"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format=marlin; read here: gptq, gptq_v2"),
        ({"pack_dtype": "int8"}, "pack_dtype=int8"),
        ({"group_size": 16}, "q_proj.qzeros is torch.int32 .4, 16.*needs torch.int32 .8, 16"),
        ({"group_size": None}, "config.json lacks 'group_size'"),
        ({"quant_method": "quip"}, "quant_method=quip; read here: gptq, awq, compressed-tensors, bitsandbytes"),
        ({"quant_method": "awq", "version": "gemv"}, "version=gemv; read here: gemm"),
        ({"quant_method": "awq", "bits": 4}, "q_proj.qweight is torch.int32 .16, 128.*needs torch.int32 .128, 16"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_4bit=False; read here: true"),
        ({"quant_method": "compressed-tensors"}, "config.json lacks 'config_groups'"),
    ],
)
def test_settings_that_are_not_read(gptq_folder: Path, config: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_foreign(change(gptq_folder, **config), torch.float32)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("weights", {"num_bits": 3}, "weights.num_bits=3; read here: 4, 8"),
        ("weights", {"type": "float"}, "weights.type=float; read here: int"),
        ("weights", {"strategy": "block"}, "weights.strategy=block"),
        ("weights", {"num_bits": 8, "symmetric": False}, "weights.symmetric=False"),
        ("input_activations", {"num_bits": 8, "type": "float"}, "input_activations.type=float"),
        (
            "input_activations",
            {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "dynamic": True},
            "input_activations.strategy=group",
        ),
        ("targets", [r"re:.*q_proj"], "k_proj is packed, and no config group of quantization_config targets it"),
    ],
)
def test_schemes_that_are_not_read(key: str, value: object, message: str, tmp_path) -> None:
    write_compressed_tensors(pack(dense_model(), SYM), tokenizer(), tmp_path / "out", dtype=torch.float32)
    group = config_of(tmp_path / "out")["config_groups"]["group_0"]
    group[key] = {**(group[key] or {}), **value} if isinstance(value, dict) else value
    with pytest.raises(UserError, match=message):
        open_foreign(change(tmp_path / "out", config_groups={"group_0": group}), torch.float32)


def test_tensors_without_a_place_and_weights_without_a_tensor(gptq_folder: Path, tmp_path) -> None:
    up = "model.layers.0.mlp.up_proj"
    for number, (edit, message) in enumerate(
        [
            (lambda t: t.pop(f"{up}.scales"), f"{up} lacks scales"),
            (lambda t: t.pop(f"{up}.qweight"), r"weights that its config lacks: .*up_proj.*"),
            (lambda t: t.pop("model.norm.weight"), r"lacks the weights \['model.norm.weight'\]"),
            (lambda t: t.update({"extra.weight": torch.ones(2)}), r"weights that its config lacks: \['extra.weight'\]"),
            (lambda t: t.update({f"{up}.g_idx": torch.zeros(128, dtype=torch.int32)}), r"g_idx puts \[128, 0"),
        ]
    ):
        folder = shutil.copytree(gptq_folder, tmp_path / f"case{number}")
        with pytest.raises(UserError, match=message):
            open_foreign(change(folder, edit), torch.float32)
    (gptq_folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(UserError, match="cannot be read"):
        open_foreign(gptq_folder, torch.float32)


def test_damaged_bitsandbytes(tmp_path) -> None:
    folder = tmp_path / "out"
    write_bnb(pack(dense_model(), Quantizer("nf4")), tokenizer(), folder, dtype=torch.float32)
    state = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"

    def other_map(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight.quant_map"][3] += 0.01

    with pytest.raises(UserError, match="up_proj has the quantization states .., and needs one"):
        open_foreign(change(shutil.copytree(folder, tmp_path / "a"), lambda t: t.pop(state)), torch.float32)
    with pytest.raises(UserError, match="up_proj has another codebook"):
        open_foreign(change(shutil.copytree(folder, tmp_path / "b"), other_map), torch.float32)


# ---- through the front doors


def test_training_over_it_is_refused(gptq_folder: Path, tmp_path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}", "completion": "b"}) + "\n" for i in range(8)))
    settings = ("conf=qlora", "model=folder", f"model.path={gptq_folder}", "data=jsonl", f"data.path={data}")
    with pytest.raises(UserError, match="is packed: .*train from the 16-bit model"):
        finetune(load_config(*settings, f"output_dir={tmp_path / 'run'}", "data.eval_rows=2"))


def test_load_model(gptq_folder: Path) -> None:
    model, tok = load_model(ModelConfig(ModelSource.folder, str(gptq_folder), dtype=DType.bfloat16))
    assert model.dtype == torch.bfloat16 and len(layers_of(model)) == 14
    assert tok.chat_template == tokenizer().chat_template
    with pytest.raises(UserError, match="model.add_tokens=.*leave it out"):
        load_model(ModelConfig(ModelSource.folder, str(gptq_folder), add_tokens=["<x>"]))
    with pytest.raises(UserError, match="quantization=nf4 would round .* again"):
        LLM(str(gptq_folder), quantization="nf4")


def test_the_card(tmp_path) -> None:
    write_gptq(pack(dense_model(), Quantizer("int4")), tokenizer(), tmp_path / "out", allow_rounded_scales=True)
    figures = {"perplexity": 21.43, "size, MB": 12}
    options = {"base": "org/name", "method": "Rounded to nearest", "data": "WikiText-2", "figures": figures}
    write_card(tmp_path / "out", **options, format_name="gptq")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\nbase_model: org/name\n")
    assert "Rounded to nearest, on WikiText-2, with lowbit, in GPTQ's layout. 14 layers are codes." in card
    assert "Scales were rounded to float16" in card and "| perplexity | 21.4300 |\n| size, MB | 12 |" in card
    for command in ("AutoModelForCausalLM.from_pretrained", "vllm serve", "python -m trainer.serve model="):
        assert command in card
    with pytest.raises(UserError, match="format=marlin; cards are written for quantized, merged, gptq, awq"):
        write_card(tmp_path / "out", **options, format_name="marlin")
    assert set(FORMATS) == {*READERS, "quantized", "merged"}


def test_the_card_says_what_others_do_not_read(tmp_path) -> None:
    """vLLM has dropped act-order, and reads no zero points of GPTQ; transformers dequantizes by one scheme."""
    options = {"base": "org/name", "method": "Rounded", "data": "", "figures": {}}
    write_gptq(pack(dense_model(), ASYM), tokenizer(), tmp_path / "asym")
    write_card(tmp_path / "asym", **options, format_name="gptq")
    card = (tmp_path / "asym" / "README.md").read_text()
    assert "not this folder" in card and "vllm serve" not in card
    for case, dequantizes in (("compressed-tensors", True), ("compressed-tensors, several", False)):
        write, quantizer, more = CASES[case]
        write(pack(dense_model(), quantizer, **more), tokenizer(), tmp_path / case, dtype=torch.float32)
        write_card(tmp_path / case, **options, format_name="compressed-tensors")
        card = (tmp_path / case / "README.md").read_text()
        assert ("dequantize=True" in card) == dequantizes and "vllm serve" in card
