"""Batch invariance: the bits of a request's log-probabilities do not depend on what shares the machine with it.

Alone, in a batch, with its prompt cut into pieces, from the prefix cache, preempted and computed again or swapped, with
drafts, with one thread or two: bit for bit the same, in both dtypes, packed and dense, base and adapter.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from trainer.config.lora import LoraConfig as TrainerLoraConfig
from trainer.lora import attach_lora
from trainer.serve.engine import request_output
from trainer.serve.outputs import RequestOutput
from trainer.serve.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (70, 16, 33, 1, 47, 20, 64, 5, 31, 90, 12, 17, 55, 8, 40, 26)
NEW_TOKENS = 12


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=["dense", "nf4"])
def model(request, random_model, dtype):
    """With a random adapter on every linear layer."""
    model = random_model("qwen3", head_dim=32, packed=request.param == "nf4", dtype=dtype)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    if request.param == "nf4":
        model = attach_lora(model, TrainerLoraConfig(rank=8, alpha=8), seed=0)
    else:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=8, target_modules=targets))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="module")
def prompts(token_prompts):
    return token_prompts(*LENGTHS)


@pytest.fixture(scope="module")
def alone(model, serve, prompts, greedy_params):
    """The first prompt and the fourth, each in a server of its own, nothing before it."""
    return [run(serve(model, max_num_seqs=1), [prompts[i]], greedy_params(NEW_TOKENS))[0] for i in (0, 3)]


def run(llm, prompts: list[list[int]], params: SamplingParams) -> list[list[tuple]]:
    """(token, log-probability, rank) of each token of prompt and answer, under the model's own adapter."""
    return [bits(output) for output in llm.generate(prompts, params)]


def bits(output: RequestOutput) -> list[tuple]:
    entries = (*output.prompt_logprobs, *output.choices[0].logprobs)
    return [(t.token_id, t.logprob, t.rank) for t in entries if t is not None]


@pytest.mark.parametrize("budget", [16, 23, 64, 512])
def test_batch_and_pieces(model, serve, prompts, alone, greedy_params, budget):
    """16 requests in a step; budgets cut prompts into pieces of 7 and less, 64, or not at all."""
    batch = run(serve(model, max_num_batched_tokens=budget), prompts, greedy_params(NEW_TOKENS))
    assert [batch[0], batch[3]] == alone


def test_small_pieces(model, serve, prompts, alone, greedy_params):
    llm = serve(model, max_num_seqs=1, max_num_batched_tokens=7)
    assert run(llm, [prompts[0]], greedy_params(NEW_TOKENS)) == alone[:1]


def test_neighbours_of_the_base(model, serve, prompts, alone, greedy_params):
    """Rows with and without the adapter in the same steps."""
    llm = serve(model, max_num_batched_tokens=32)
    adapter = llm.adapters.by_name[llm.default_adapter]
    requests = [
        llm.engine.request(prompt, greedy_params(NEW_TOKENS), adapter=adapter if i in (0, 3) else None)
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.has_work:
        llm.engine.step()
    assert [bits(request_output(requests[i])) for i in (0, 3)] == alone
    base = llm.generate([prompts[1]], greedy_params(NEW_TOKENS), adapter=None)
    assert bits(request_output(requests[1])) == bits(base[0])
    assert bits(base[0]) != run(llm, [prompts[1]], greedy_params(NEW_TOKENS))[0]  # the adapter does something


def test_cache_hit(model, serve, prompts, alone):
    """Prompt log-probabilities are computed, never cached: with them only from position 66 on, 64 tokens are hits."""
    llm = serve(model)
    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0, prompt_logprobs_start=66
    )
    llm.generate([prompts[0]], params)
    (output,) = llm.generate([prompts[0]], params)
    assert output.num_cached_tokens == 64
    assert bits(output) == alone[0][65:]


@pytest.mark.parametrize("swap_space", [0.0, 0.01], ids=["recompute", "swap"])
def test_preemption(model, serve, prompts, alone, greedy_params, swap_space):
    roomy = serve(model)
    block_bytes = roomy.runner.cache.nbytes // roomy.runner.cache.num_blocks
    tight = serve(model, kv_cache_memory_bytes=10 * block_bytes, swap_space=swap_space)  # one of the prompts needs 7
    chosen = [prompts[i] for i in (2, 5, 8, 0)]  # the last in order is the one that is preempted
    batch = run(tight, chosen, greedy_params(40))
    counts = tight.engine.scheduler.counts
    assert (counts.preempted_swap if swap_space else counts.preempted_recompute) > 0
    assert batch == run(roomy, chosen, greedy_params(40))
    assert batch[-1][: len(alone[0])] == alone[0]


def test_drafts(model, serve, prompts, alone, greedy_params):
    """Prompt lookup checks several tokens in one step; what it accepts has the bits of one at a time."""
    llm = serve(model, num_speculative_tokens=4)
    repeated = prompts[0][:20] * 3
    plain = run(serve(model), [repeated], greedy_params(40))
    assert run(llm, [repeated, *prompts], greedy_params(40))[0] == plain[0]
    assert llm.engine.scheduler.counts.drafted > 0
    assert [run(llm, prompts, greedy_params(NEW_TOKENS))[i] for i in (0, 3)] == alone


def test_threads(model, serve, prompts, alone, greedy_params):
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert run(serve(model), [prompts[0], prompts[3]], greedy_params(NEW_TOKENS)) == alone
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_the_mode_is_what_keeps_the_bits(random_model, serve, greedy_params, packed, batch_invariant):
    """A prompt of 150 tokens in one piece and in pieces of 16: with the mode off the pieces meet other products."""
    model, prompt = random_model("qwen3", head_dim=32, packed=packed), [3 + i % 90 for i in range(150)]
    settings = {"batch_invariant": batch_invariant, "max_num_seqs": 8}
    pieces, whole = (
        run(serve(model, max_num_batched_tokens=budget, **settings), [prompt], greedy_params(NEW_TOKENS))
        for budget in (16, 512)
    )
    assert (pieces == whole) is batch_invariant


def test_torch_products_do_change_bits(monkeypatch, random_model, serve, prompts, greedy_params):
    """What the tests above would look like without the kernels: torch picks its order of sums by the batch."""
    monkeypatch.setenv("LOWBIT_KERNELS", "reference")
    model = random_model("qwen3", head_dim=32)
    alone = run(serve(model, max_num_seqs=1), [prompts[0]], greedy_params(NEW_TOKENS))
    assert run(serve(model, max_num_batched_tokens=23), prompts, greedy_params(NEW_TOKENS))[0] != alone[0]
