"""The decoder is the transformers module: same greedy tokens and log-probabilities, for every family that is served."""

import gc
import weakref

import pytest
import torch

from trainer.config.errors import UserError
from trainer.config.quant import Codebook, QuantConfig
from trainer.kernels import _cpp
from trainer.linear import QuantLinear, quantize_linears
from trainer.model import prepare_model
from trainer.qat.fake_quant import FakeQuantLinear, commit_observers, fake_quantize_linears
from trainer.qat.scheme import Scheme
from trainer.quantizer import Quantizer
from trainer.serve.config import QUANTIZATIONS, ServeConfig
from trainer.serve.decoder import MAX_GREEDY_ROWS, Decoder, decoder_from_module
from trainer.serve.open_model import open_model
from trainer.serve.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SMOLLM2 = {"tie_word_embeddings": True, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
WINDOW = 24

FAMILIES = {
    "llama": ("llama", {}),
    "llama-untied-mha": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (
        "llama",
        SMOLLM2,
    ),
    "llama-3": (
        "llama",
        {"rope_parameters": LLAMA3, "head_dim": 128},
    ),
    "llama-linear": ("llama", {"rope_parameters": LINEAR, "head_dim": 32}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW, "head_dim": 32}),
    "qwen2": ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 2}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-odd-sizes": ("qwen3", {"head_dim": 24, "hidden_size": 80, "intermediate_size": 112, "attention_bias": True}),
}
LENGTHS = (1, 16, 33, 70)  # a KV block of 16, past the window, past the original 64 positions of yarn and llama3
NEW_TOKENS = 8


def needs_cpp(file: str) -> None:
    if _cpp.choose(file, "cpu") != "cpu":
        pytest.skip("no C++ compiler here, so torch multiplies weights as they were loaded")


@pytest.mark.parametrize("drafts", [0, 3])
def test_greedy_tokens_without_logits_are_those_of_logits(
    drafts, monkeypatch, random_model, token_prompts, serve, greedy_params
):
    """With drafts too, whose rows are checked by their argmax; asking for log-probabilities takes the other way."""
    needs_cpp("greedy_head")
    computed = []
    logits = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, *args, **kw: computed.append(1) or logits(self, *args, **kw))
    llm = serve(random_model("llama"), max_num_seqs=4, num_speculative_tokens=drafts)
    prompts = token_prompts(*LENGTHS)
    short = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert not computed
    full = llm.generate(prompts, greedy_params(12))
    assert computed
    assert [r.choices[0].token_ids for r in short] == [r.choices[0].token_ids for r in full]


def test_the_greedy_head_is_counted_and_can_be_left_out(random_model):
    needs_cpp("greedy_head")
    model = random_model("llama")
    decoder, plain = (decoder_from_module(model, max_model_len=64, screen_greedy=screen) for screen in (True, False))
    hidden_states = torch.randn(MAX_GREEDY_ROWS + 1, decoder.config.hidden_size).to(decoder.config.dtype)
    assert decoder.nbytes - plain.nbytes == decoder.greedy_head.nbytes > 0
    assert plain.likeliest(hidden_states[:1]) is None and decoder.likeliest(hidden_states) is None
    tokens = decoder.likeliest(hidden_states[:MAX_GREEDY_ROWS])
    logits = decoder.logits(hidden_states[:MAX_GREEDY_ROWS], batch_invariant=True)
    assert tokens.tolist() == logits.numpy().argmax(-1).tolist()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "nf4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(
    family, packed, random_model, token_prompts, serve, greedy_params, hf_greedy, hf_logprobs, served_logprobs
):
    model_type, options = FAMILIES[family]
    model = random_model(model_type, packed=packed, **options)
    prompts = token_prompts(*LENGTHS)
    expected = [hf_greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert len({token for answer in expected for token in answer}) > 12  # nothing that a constant would pass
    llm = serve(model, max_num_seqs=4, max_num_batched_tokens=13)  # prompts go in pieces, decodes between them
    batch = llm.generate(prompts, greedy_params(NEW_TOKENS))
    alone = llm.generate([prompts[-1]], greedy_params(NEW_TOKENS))
    assert [output.choices[0].token_ids for output in batch] == expected
    assert alone[0].choices[0].token_ids == expected[-1]
    for prompt, answer, output in zip(prompts, expected, batch, strict=True):
        # float32 sums in another order: 1e-6 of logits up to 10, grown through two layers
        torch.testing.assert_close(served_logprobs(output), hf_logprobs(model, prompt + answer), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-window"])
def test_bfloat16_rounds_where_the_module_rounds(
    family, random_model, token_prompts, serve, greedy_params, hf_logprobs, served_logprobs
):
    model_type, options = FAMILIES[family]
    exact, rounded = (random_model(model_type, dtype=dtype, **options) for dtype in (torch.float32, torch.bfloat16))
    prompts = token_prompts(40, 70, 100, 130)
    served = torch.cat([served_logprobs(o) for o in serve(rounded).generate(prompts, greedy_params(0))])
    ours = torch.cat([hf_logprobs(rounded, prompt) for prompt in prompts])
    theirs = torch.cat([hf_logprobs(exact, prompt) for prompt in prompts])
    # Sums in another order flip some roundings: 0.5 to 0.7 of what bfloat16 itself loses. Rounding anywhere else would
    # be independent of the module's and give 1.4 of it.
    assert (served - ours).abs().mean() < 0.85 * (ours - theirs).abs().mean()


# ---- other quantized layers

INT4, INT8 = Scheme.named("int4"), Scheme(Quantizer("int8"))
SCHEMES = {
    "int4": INT4,
    "int4-bfloat16-scales": Scheme.named("int4", divisor=8.0, scale_dtype="bfloat16"),
    "int4-asymmetric": Scheme.named("int4", symmetric=False),
    "int4-learned": Scheme.named("int4", learn_scales=True, scale_init="mse"),
    "int8": INT8,
    "nf4": Scheme.named("nf4"),
    "mxfp4": Scheme.named("mxfp4"),
    "int4_dynamic": Scheme.named("int4_int8"),
    "int4_dynamic-asymmetric": Scheme.named("int4_int8", symmetric=False),
    "int8_dynamic": Scheme.named("int8"),
    "int8_static": Scheme.named("int8_static"),
}


def fake_quantized(model, scheme: Scheme):
    head = model.get_output_embeddings()
    assert fake_quantize_linears(model, lambda name: None if model.get_submodule(name) is head else scheme) == 14
    if scheme.activations is not None and scheme.activations.static:
        model.train()(input_ids=torch.arange(64)[None])  # ranges are observed
        commit_observers(model.eval())
    return model


@pytest.mark.parametrize("family", ["llama-biases", "qwen3"])
@pytest.mark.parametrize("scheme", [*SCHEMES, "fp4"])
def test_other_codes_answer_as_their_module(
    scheme, family, random_model, token_prompts, serve, greedy_params, hf_greedy, hf_logprobs, served_logprobs
):
    model_type, options = FAMILIES[family]
    model = random_model(model_type, **options)
    if scheme == "fp4":
        prepare_model(model, QuantConfig(Codebook.fp4))
    else:
        fake_quantized(model, SCHEMES[scheme])
    prompts = token_prompts(*LENGTHS)
    expected = [hf_greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert len({token for answer in expected for token in answer}) > 12  # nothing that a constant would pass
    batch = serve(model, max_num_seqs=4, max_num_batched_tokens=13).generate(prompts, greedy_params(NEW_TOKENS))
    assert [output.choices[0].token_ids for output in batch] == expected
    # float32 sums in another order, as above. Where inputs are rounded to 8 bits they move a value over the middle of
    # two codes now and then: a step of max|x| / 127 in one of 64 products, some 1e-2 of logits up to 10.
    rounds_inputs = scheme in SCHEMES and SCHEMES[scheme].activations is not None
    tolerance = 5e-2 if rounds_inputs else 1e-4
    for prompt, answer, output in zip(prompts, expected, batch, strict=True):
        torch.testing.assert_close(served_logprobs(output), hf_logprobs(model, prompt + answer), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["int4_dynamic", "int8_dynamic", "int4_dynamic-asymmetric", "int8_static"])
def test_rounded_inputs_give_the_bits_of_training(scheme, dtype, random_model):
    """FakeQuantLinear(integer=True) and the server's fused layer, with biases, float32 master weights too."""
    model_type, options = FAMILIES["llama-biases"]
    model = random_model(model_type, dtype=dtype, **options)
    layers = model.model.layers
    for layer in (layers[0].self_attn.q_proj, layers[0].self_attn.k_proj, layers[0].self_attn.v_proj):
        layer.float()
    fake_quantized(model, SCHEMES[scheme])
    decoder = decoder_from_module(model, max_model_len=64)
    generator = torch.Generator().manual_seed(1)
    for layer, served in zip(layers, decoder.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        fused = [
            (served.qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (served.output, (attention.o_proj,)),
            (served.gate_up, (mlp.gate_proj, mlp.up_proj)),
            (served.down, (mlp.down_proj,)),
        ]
        for linear, modules in fused:
            assert linear.weight.kind == "integer"
            x = torch.randn(7, linear.weight.in_features, generator=generator).to(dtype)
            want = torch.cat([module(x) for module in modules], 1)
            assert torch.equal(linear(x, None, True), want)


@pytest.mark.parametrize("scheme", ["int4", "int4_dynamic", "int8_dynamic"])
def test_answers_are_the_same_bits_in_every_batch(
    scheme, random_model, token_prompts, serve, greedy_params, served_logprobs
):
    needs_cpp("integer_linear")
    model = fake_quantized(random_model("llama", dtype=torch.bfloat16), SCHEMES[scheme])
    prompts, params = token_prompts(*LENGTHS), greedy_params(NEW_TOKENS)
    batch = serve(model, max_num_batched_tokens=16).generate(prompts, params)
    llm = serve(model, max_num_batched_tokens=64)
    for prompt, output in zip(prompts, batch, strict=True):
        assert torch.equal(served_logprobs(llm.generate([prompt], params)[0]), served_logprobs(output))


def test_codes_are_kept_packed_and_what_is_decoded_is_logged(random_model, caplog):
    needs_cpp("packed_linear")
    packed = decoder_from_module(fake_quantized(random_model(), INT4), max_model_len=64)
    assert {linear.weight.kind for layer in packed.layers for linear in layer.linears} == {"codebook"}
    assert not caplog.records
    dense = decoder_from_module(fake_quantized(random_model(), INT8), max_model_len=64)
    assert {linear.weight.kind for layer in dense.layers for linear in layer.linears} == {"dense"}
    # 2 layers of q 64, k, v 32, o 64, gate, up 160 rows of 64 and down 64 of 160, 4 bytes each: 0.3 MB
    assert [r.getMessage() for r in caplog.records] == [
        "serve    8 of 8 fused layers are decoded to float32, 0.3 MB: 8-bit codes, zero points or act-order have no "
        "table of 16 values"
    ]
    sizes = [sum(linear.weight.nbytes for layer in d.layers for linear in layer.linears) for d in (packed, dense)]
    assert sizes[0] * 32 == sizes[1] * 5  # 4 bits, and 32 of a scale over 32 weights


def test_layers_of_several_codebooks_are_decoded(random_model, token_prompts, serve, greedy_params, hf_greedy, caplog):
    model = random_model()
    k_proj, v_proj = (getattr(model.model.layers[0].self_attn, name) for name in ("k_proj", "v_proj"))
    second = model.model.layers[1].mlp.up_proj
    quantize_linears(model, Quantizer(), skip={model.get_output_embeddings(), k_proj, v_proj, second})
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[1].mlp
    for name in ("k_proj", "v_proj"):
        layer = getattr(attention, name)
        setattr(attention, name, QuantLinear(Quantizer("fp4").quantize(layer.weight), layer.bias))
    mlp.up_proj = FakeQuantLinear(mlp.up_proj.weight, None, INT4)
    prompts = token_prompts(1, 33)
    outputs = serve(model).generate(prompts, greedy_params(NEW_TOKENS))
    assert [o.choices[0].token_ids for o in outputs] == [hf_greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    if _cpp.choose("packed_linear", "cpu") == "cpu":
        decoded = [r.getMessage() for r in caplog.records if "decoded" in r.getMessage()]
        assert len(decoded) == 2
        assert "1 of 8 fused layers are decoded to float32" in decoded[0] and "several codebooks" in decoded[0]
        assert "1 of 8" in decoded[1] and "quantized in different ways" in decoded[1]


def test_16_bit_weights_under_float32_are_rounded_twice_as_in_training(random_model):
    model = fake_quantized(random_model(), INT4)
    layer = model.model.layers[0].mlp.down_proj
    layer.weight.data = layer.weight.bfloat16()
    decoder = decoder_from_module(model, max_model_len=64)
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(0))
    # float32 sums of 160 products in another order
    torch.testing.assert_close(decoder.layers[0].down(x, None, True), layer(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(
        decoder.layers[0].down.weight.dequantize(), decoder.layers[0].down.weight.dequantize().bfloat16().float()
    )


@pytest.mark.parametrize(
    "names, text",
    [
        (("q_proj",), r"q_proj, .*v_proj do not round their input alike.*prepare them alike"),
        (
            ("q_proj", "k_proj", "v_proj"),
            r"layers.1.self_attn.q_proj.k_proj.v_proj: 3 weights do not stack.*prepare them alike",
        ),
    ],
)
def test_layers_that_do_not_fuse_are_refused(names, text, random_model):
    needs_cpp("integer_linear")
    model = random_model()
    attention = model.model.layers[1].self_attn
    for name in names:
        scheme = Scheme.named("int8" if name == "v_proj" else "int4_int8")
        setattr(attention, name, FakeQuantLinear(getattr(attention, name).weight, None, scheme))
    with pytest.raises(UserError, match=text):
        decoder_from_module(model, max_model_len=64)


def test_other_rounded_inputs_and_weights_that_diverged_are_refused(random_model):
    model = random_model()
    fake_quantized(model, Scheme.named("fp8"))
    with pytest.raises(
        UserError, match=r"layers.0.self_attn.q_proj rounds its input to FP8; .* or rounds them to INT8"
    ):
        decoder_from_module(model, max_model_len=64)
    model = random_model()
    fake_quantized(model, Scheme.named("int8_static"))
    for place, layer in enumerate(layer for layer in model.modules() if isinstance(layer, FakeQuantLinear)):
        layer.set_input_scale(torch.tensor(0.01 * (1 + place)))
    with pytest.raises(UserError, match="do not round their input alike; .* static scales without qat.learn_scales"):
        decoder_from_module(model, max_model_len=64)
    model = fake_quantized(random_model(), Scheme.named("int4_int8"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    with pytest.raises(UserError, match=r"layers.1.mlp.up_proj.weight: weight\[3, 5\] is nan"):
        decoder_from_module(model, max_model_len=64)
    model.model.layers[1].mlp.up_proj = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(UserError, match="up_proj is a Bilinear; the server reads nn.Linear, QuantLinear and FakeQ"):
        decoder_from_module(model, max_model_len=64)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_model_is_packed_when_it_is_loaded(quantization, serve, tokenizer, token_prompts, greedy_params, hf_greedy):
    """The served function is that of the module which open_model made; each packing is another base for adapters."""
    settings = {"model": "tiny", "dtype": "float32", "quantization": quantization}
    opened = open_model(ServeConfig(**settings))
    plain = open_model(ServeConfig(**{**settings, "quantization": None}))
    assert (opened.base_sha256 == plain.base_sha256) == (quantization == "none")
    llm = serve(settings.pop("model"), **settings)
    linear = llm.runner.decoder.layers[0].qkv.weight
    kinds = {"none": "dense", "int4_dynamic": "integer", "int8_dynamic": "integer"}
    assert linear.kind == kinds.get(quantization, "codebook")
    weights, bits = linear.out_features * linear.in_features, {"none": 32, "int8_dynamic": 8}.get(quantization, 4)
    # a float32 scale over 32 weights or more, and panels of 32 features
    assert (
        weights * bits // 8
        <= linear.nbytes
        <= (-(-linear.out_features // 32) * 32 * linear.in_features) * (bits + 1.01) // 8
    )
    prompts = token_prompts(3, 40)
    outputs = llm.generate(prompts, greedy_params(NEW_TOKENS))
    assert [o.choices[0].token_ids for o in outputs] == [hf_greedy(opened.module, p, NEW_TOKENS) for p in prompts]


@pytest.mark.parametrize("quantization", ["nf4", "int4", "int4_dynamic"])
def test_dense_weights_are_freed_after_packing(quantization, serve, monkeypatch):
    needs_cpp("packed_linear")
    opened = []

    def remember(config: ServeConfig):
        model = open_model(config)
        opened.append(weakref.ref(model.module.model.layers[0].mlp.down_proj))
        return model

    monkeypatch.setattr("trainer.serve.llm.open_model", remember)
    llm = serve("tiny", quantization=quantization)
    gc.collect()
    assert llm.runner.decoder.layers and opened[0]() is None


def test_an_unknown_quantization_is_named():
    with pytest.raises(
        UserError, match="quantization=int3; use none, nf4, fp4, int4, int4_dynamic, int8_dynamic or null"
    ):
        ServeConfig(quantization="int3")


def test_reference_kernels_compute_the_same(monkeypatch, random_model, token_prompts, serve, greedy_params, hf_greedy):
    """Where no compiler is, torch serves: other layouts of weights and KV cache, the same tokens."""
    monkeypatch.setenv("LOWBIT_KERNELS", "reference")
    prompts = token_prompts(1, 33)
    model = random_model("qwen3", head_dim=32, packed=True)
    llm = serve(model, max_num_batched_tokens=16)
    assert not llm.runner.cache.packed
    outputs = llm.generate(prompts, greedy_params(NEW_TOKENS))
    assert [o.choices[0].token_ids for o in outputs] == [hf_greedy(model, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral", "gemma"])
def test_other_architectures_are_refused(model_type, random_model, serve):
    options = {"n_embd": 64, "n_layer": 1, "n_head": 2} if model_type == "gpt2" else {"num_local_experts": 2}
    with pytest.raises(
        UserError, match=f"is not served: model_type={model_type} is none of Llama, SmolLM2, Mistral, Qwen2, .*Qwen3"
    ):
        serve(random_model(model_type, **options))


@pytest.mark.parametrize(
    "options, text",
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope scaling dynamic.*yarn"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu.*silu"),
    ],
)
def test_other_functions_are_refused(options, text, random_model, serve):
    with pytest.raises(UserError, match=text):
        serve(random_model(**options))


def test_two_dtypes_are_refused(random_model, serve):
    model = random_model("llama", dtype=torch.bfloat16)
    model.model.norm.float()
    with pytest.raises(UserError, match="in bfloat16 and float32; the server computes in one dtype"):
        serve(model)
