"""Adapters over one base: each row computes its own, load and unload under way, no keys shared across contents."""

import json
import shutil

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file

from trainer.config.errors import UserError
from trainer.export.adapter import read_adapter_factors
from trainer.linear import weights_sha256
from trainer.serve.engine import request_output
from trainer.serve.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
KINDS = {
    "all": {"r": 16, "lora_alpha": 8, "target_modules": ALL},
    "values": {"r": 3, "lora_alpha": 6, "target_modules": ["v_proj", "down_proj"]},
    "rs": {"r": 32, "lora_alpha": 2, "target_modules": [*ATTENTION, "up_proj"], "use_rslora": True},
    "uneven": {
        "r": 8,
        "lora_alpha": 4,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"k_proj|o_proj": 12, "model.layers.1.mlp.up_proj": 20},
        "layers_to_transform": [1],
    },
}


@pytest.fixture(scope="module")
def base(random_model):
    return random_model("qwen2")


@pytest.fixture(scope="module")
def adapter_folder(random_model, tmp_path_factory):
    """Writes a PEFT adapter with random factors over the base, as plain PEFT saves it."""

    def write(seed: int = 1, **options):
        folder = tmp_path_factory.mktemp("adapter")
        model = with_random_factors(random_model("qwen2"), LoraConfig(task_type="CAUSAL_LM", **options), seed)
        model.save_pretrained(folder)
        return folder

    return write


def with_random_factors(model, config: LoraConfig, seed: int) -> PeftModel:
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                # 0.15: the update is of the base product's size, so that a wrong scaling or part shows at once
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="module")
def folders(adapter_folder):
    return {name: adapter_folder(seed, **options) for seed, (name, options) in enumerate(KINDS.items())}


@pytest.fixture
def llm(base, serve):
    return serve(base, max_loras=4, max_num_batched_tokens=32)


def test_each_row_computes_its_own_adapter(
    llm, folders, random_model, token_prompts, greedy_params, hf_greedy, hf_logprobs, served_logprobs
):
    """Base and four adapters of different ranks, targets and scalings in the same steps, twice each."""
    names = [None, *KINDS] * 2
    prompts = token_prompts(*(10 + 7 * i for i in range(len(names))))
    for name, folder in folders.items():
        llm.load_adapter(name, folder)
    params = greedy_params(6)
    requests = [
        llm.engine.request(prompt, params, adapter=name and llm.adapters.by_name[name])
        for prompt, name in zip(prompts, names, strict=True)
    ]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_work:
        llm.engine.step()
    outputs = [request_output(request) for request in requests]
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        module = random_model("qwen2")
        module = module if name is None else PeftModel.from_pretrained(module, folders[name]).eval()
        assert output.choices[0].token_ids == hf_greedy(module, prompt, 6)
        expected = hf_logprobs(module, prompt + output.choices[0].token_ids)
        torch.testing.assert_close(served_logprobs(output), expected, atol=1e-4, rtol=0)  # float32 sums, two layers


def greedy(llm, prompt: list[int], adapter: str | None, n: int = 8) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    return llm.generate([prompt], params, adapter=adapter)[0].choices[0].token_ids


def test_hot_swap_under_generation(llm, folders, token_prompts):
    """A request keeps the adapter it began with; the next one under the name gets the new content."""
    (prompt,) = token_prompts(40)
    llm.load_adapter("all", folders["all"]), llm.load_adapter("rs", folders["rs"])
    old, new = greedy(llm, prompt, "all"), greedy(llm, prompt, "rs")
    assert old != new
    llm.unload_adapter("rs")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first = llm.engine.request(prompt, params, adapter=llm.adapters.by_name["all"])
    llm.engine.add(first)
    for _ in range(4):
        llm.engine.step()
    assert 0 < first.sequences[0].num_output_tokens < 8
    llm.unload_adapter("all")
    with pytest.raises(UserError, match="adapter=all is not loaded; loaded are: none"):
        llm.generate([prompt], params, adapter="all")
    llm.load_adapter("all", folders["rs"])
    second = llm.engine.request(prompt, params, adapter=llm.adapters.by_name["all"])
    llm.engine.add(second)
    while llm.engine.has_work:
        llm.engine.step()
    assert first.sequences[0].output_token_ids == old
    assert second.sequences[0].output_token_ids == new
    assert second.num_cached_tokens == 32  # two blocks that "rs" of the same content left
    assert sorted(llm.adapters._free_slots) == sorted(set(range(4)) - {llm.adapters.by_name["all"].slot})


def test_the_slot_waits_for_the_last_request(base, serve, folders, token_prompts):
    """Two requests of an unloaded adapter: when the shorter one ends, the slot is not yet free for another content."""
    (prompt,) = token_prompts(40)
    llm = serve(base, max_loras=1)
    llm.load_adapter("all", folders["all"])
    expected = greedy(llm, prompt, "all", 12)
    requests = [
        llm.engine.request(
            prompt,
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True),
            adapter=llm.adapters.by_name["all"],
        )
        for n in (3, 12)
    ]
    for request in requests:
        llm.engine.add(request)
    llm.unload_adapter("all")
    while not requests[0].finished:
        llm.engine.step()
    with pytest.raises(UserError, match="unloaded and still in use"):
        llm.load_adapter("rs", folders["rs"])
    while llm.engine.has_work:
        llm.engine.step()
    assert requests[1].sequences[0].output_token_ids == expected
    llm.load_adapter("rs", folders["rs"])


def test_keys_are_never_shared_across_contents(llm, folders, token_prompts):
    (prompt,) = token_prompts(50)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    def cached(adapter: str | None) -> int:
        return llm.generate([prompt], params, adapter=adapter)[0].num_cached_tokens

    llm.load_adapter("a", folders["all"]), llm.load_adapter("b", folders["values"])
    assert [cached(None), cached("a"), cached("b")] == [0, 0, 0]
    assert [cached(None), cached("a"), cached("b")] == [48, 48, 48]
    llm.unload_adapter("a")
    llm.load_adapter("a", folders["rs"])
    assert cached("a") == 0  # the name is the same, the content is not
    llm.load_adapter("twin", folders["rs"])
    assert cached("twin") == 48  # the content is the same, the name is not


def test_a_slot_is_empty_after_its_adapter(base, serve, folders, token_prompts):
    """An adapter that targets less must not meet the factors of the one that had the slot before."""
    (prompt,) = token_prompts(20)
    fresh, used = serve(base, max_loras=1), serve(base, max_loras=1)
    fresh.load_adapter("values", folders["values"])
    used.load_adapter("all", folders["all"])
    greedy(used, prompt, "all")
    used.unload_adapter("all")
    used.load_adapter("values", folders["values"])
    assert greedy(used, prompt, "values") == greedy(fresh, prompt, "values") != greedy(fresh, prompt, None)


def test_max_loras(base, serve, folders, token_prompts):
    llm = serve(base, max_loras=1)
    llm.load_adapter("a", folders["all"])
    with pytest.raises(UserError, match="max_loras=1 adapters are loaded"):
        llm.load_adapter("b", folders["rs"])
    request = llm.engine.request(token_prompts(5)[0], SamplingParams(max_tokens=3), adapter=llm.adapters.by_name["a"])
    llm.engine.add(request)
    llm.unload_adapter("a")
    with pytest.raises(UserError, match="unloaded and still in use"):
        llm.load_adapter("b", folders["rs"])
    llm.engine.abort(request.request_id)
    llm.load_adapter("b", folders["rs"])


def test_names(llm, folders):
    llm.load_adapter("a", folders["all"])
    with pytest.raises(UserError, match="lora_name=a is loaded already"):
        llm.load_adapter("a", folders["all"])
    with pytest.raises(UserError, match="lora_name=b is not loaded; loaded are: a"):
        llm.unload_adapter("b")
    with pytest.raises(UserError, match="lora_name='a b'; use letters"):
        llm.load_adapter("a b", folders["all"])
    with pytest.raises(UserError, match="nowhere is not a folder"):
        llm.load_adapter("b", "nowhere")


def test_another_base_is_refused(llm, base, folders, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(folders["all"], folder)
    (folder / "lowbit.json").write_text(json.dumps({"base_sha256": "0" * 64, "quantizer": {}}))
    with pytest.raises(UserError, match="was trained on a base whose packed weights have sha256 000000000000"):
        llm.load_adapter("a", folder)
    (folder / "lowbit.json").write_text(json.dumps({"base_sha256": weights_sha256(base), "quantizer": {}}))
    llm.load_adapter("a", folder)


def edit(folder, target, change) -> None:
    """Copy an adapter with changed tensors."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, target / "adapter_model.safetensors")


FIRST, HEAD = "base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.lm_head"
ONES = torch.ones
BROKEN = {
    "in_features": (
        lambda t: t.update({f"{FIRST}.lora_A.weight": ONES(16, 32)}),
        "layers.0.self_attn.q_proj is 64 x 32, the layer 64 x 64",
    ),
    "ranks": (
        lambda t: t.update({f"{FIRST}.lora_B.weight": ONES(64, 15)}),
        "lora_A of rank 16 and lora_B of rank 15",
    ),
    "large-rank": (
        lambda t: t.update({f"{FIRST}.lora_A.weight": ONES(257, 64), f"{FIRST}.lora_B.weight": ONES(64, 257)}),
        "has rank 257; the server takes up to 256",
    ),
    "half": (lambda t: t.pop(f"{FIRST}.lora_A.weight"), "has only one of lora_A and lora_B"),
    "dora": (
        lambda t: t.update({f"{FIRST}.lora_magnitude_vector": ONES(64)}),
        "lora_magnitude_vector; the server reads",
    ),
    "head": (
        lambda t: t.update({f"{HEAD}.lora_A.weight": ONES(4, 64), f"{HEAD}.lora_B.weight": ONES(260, 4)}),
        "adapts lm_head, which is no linear layer inside",
    ),
    "layers": (
        lambda t: t.update({k.replace("layers.1", "layers.7"): v.clone() for k, v in t.items()}),
        "adapts layers.7.*has layers 0..1 with down_proj, gate_proj",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_factors_that_do_not_fit_are_refused(llm, folders, tmp_path, kind):
    change, text = BROKEN[kind]
    edit(folders["all"], tmp_path / "adapter", change)
    with pytest.raises(UserError, match=text):
        llm.load_adapter("a", tmp_path / "adapter")
    assert len(llm.adapters._free_slots) == 4 and not llm.adapters.by_name  # nothing is lost


@pytest.mark.parametrize(
    "options, text",
    [
        ({"use_dora": True}, "use_dora are not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save are not served"),
        ({"bias": "lora_only"}, "bias=lora_only are not served"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens are not served"),
    ],
    ids=["dora", "modules_to_save", "bias", "alora"],
)
def test_other_updates_are_refused(options, text, llm, adapter_folder, base, serve, random_model):
    """From a folder and on a live module: an update that the server would leave out must not pass in silence."""
    options = {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], **options}
    with pytest.raises(UserError, match=text):
        llm.load_adapter("a", adapter_folder(**options))
    if "bias" not in options:
        with pytest.raises(UserError, match="is not served|computes LoRA of linear layers only"):
            serve(get_peft_model(random_model("qwen2"), LoraConfig(task_type="CAUSAL_LM", **options)))


def test_live_head_and_two_active_adapters_are_refused(serve, random_model):
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"])
    with pytest.raises(UserError, match="adapts lm_head, which is no linear layer inside"):
        serve(get_peft_model(random_model("qwen2", tie_word_embeddings=False), config))
    model = get_peft_model(random_model("qwen2"), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
    model.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(UserError, match=r"has the active adapters \['default', 'second'\]; activate one"):
        serve(model)


def test_other_methods_are_refused(serve, random_model):
    """A module in memory whose adapter is no LoRA, and a folder of such a one."""
    prompt_tuning = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    ia3 = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    with pytest.raises(UserError, match="learn a prompt are not served"):
        serve(get_peft_model(random_model("qwen2"), prompt_tuning))
    with pytest.raises(UserError, match="k_proj is adapted by Linear; the server computes LoRA"):
        serve(get_peft_model(random_model("qwen2"), ia3))


def test_a_merged_or_disabled_adapter_is_not_added_twice(serve, random_model, token_prompts, hf_greedy):
    (prompt,) = token_prompts(20)
    model = with_random_factors(random_model("qwen2"), LoraConfig(task_type="CAUSAL_LM", **KINDS["all"]), 1)
    adapted = hf_greedy(model, prompt, 8)
    model.base_model.disable_adapter_layers()
    assert greedy(serve(model), prompt, "default") == hf_greedy(model, prompt, 8) != adapted
    model.base_model.enable_adapter_layers()
    model.merge_adapter()
    assert greedy(serve(model), prompt, "default") == adapted


def test_hash_is_of_the_content(folders, adapter_folder):
    """Another scaling is another content; the same file under another path is not."""
    same, other = adapter_folder(0, **KINDS["all"]), adapter_folder(0, **{**KINDS["all"], "lora_alpha": 9})
    hashes = [read_adapter_factors(folder).sha256 for folder in (folders["all"], same, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def damaged(folders, tmp_path, name: str, text: str):
    folder = tmp_path / "damaged"
    shutil.copytree(folders["all"], folder)
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("adapter_model.safetensors", "garbage", "cannot be read"),
        ("adapter_config.json", "{", "cannot be read"),
        ("lowbit.json", "{", "cannot be read"),
        ("lowbit.json", "{}", "was trained on a base"),
        ("lowbit.json", "[]", "holds no object"),
    ],
)
def test_damaged_folders_are_named(llm, folders, tmp_path, name, text, message):
    with pytest.raises(UserError, match=message):
        llm.load_adapter("damaged", damaged(folders, tmp_path, name, text))


def test_factors_that_are_not_finite_are_refused(llm, folders, tmp_path):
    """One such adapter would otherwise end the engine for everybody."""
    folder = tmp_path / "diverged"
    shutil.copytree(folders["values"], folder)
    factors = load_file(folder / "adapter_model.safetensors")
    next(iter(factors.values()))[0, 0] = float("nan")
    save_file(factors, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="inf or nan"):
        llm.load_adapter("diverged", folder)
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=2), adapter=None)[0].choices[0].token_ids


def test_an_adapter_whose_initialisation_changed_the_base_is_refused(llm, adapter_folder):
    with pytest.raises(UserError, match="init_lora_weights=pissa"):
        llm.load_adapter("pissa", adapter_folder(target_modules=["q_proj"], init_lora_weights="pissa"))


def test_default_names_no_adapter(llm, folders):
    with pytest.raises(UserError, match="default"):
        llm.load_adapter("default", folders["all"])
