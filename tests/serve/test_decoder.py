"""The decoder is the transformers module: same greedy tokens and log-probabilities, for every family that is served."""

import pytest
import torch

from trainer.config import UserError
from trainer.kernels import _cpp
from trainer.serve.decoder import MAX_GREEDY_ROWS, Decoder, decoder_from_module
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


@pytest.mark.parametrize("drafts", [0, 3])
def test_greedy_tokens_without_logits_are_those_of_logits(
    drafts, monkeypatch, random_model, token_prompts, serve, greedy_params
):
    """With drafts too, whose rows are checked by their argmax; asking for log-probabilities takes the other way."""
    if _cpp.load("greedy_head") is None:
        pytest.skip("no C++ compiler here")
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
    if _cpp.load("greedy_head") is None:
        pytest.skip("no C++ compiler here")
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
    with pytest.raises(UserError, match=f"is not served: model_type={model_type} is none of Llama, SmolLM2, Mistral, Qwen2, .*Qwen3"):
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
