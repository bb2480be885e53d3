"""LLM answers as the model that was trained: transformers' greedy tokens under every kind of contention, on a live
module, on a run's folder and export, and in the log-probabilities that evaluation asks for."""

import collections
import gc
import inspect
import json
import math
import os
import re
import statistics
import textwrap
import weakref

import pytest
import torch

from trainer.config.errors import UserError
from trainer.config.lora import LoraConfig as TrainerLoraConfig
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.quant import QuantConfig
from trainer.export.adapter import read_adapter
from trainer.lora import attach_lora
from trainer.model import load_model, prepare_model
from trainer.serve import scheduler
from trainer.serve.engine import request_output
from trainer.serve.gate import GateReport, PromptDifference, train_serve_gate
from trainer.serve.llm import LLM
from trainer.serve.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (70, 16, 33, 3, 47, 20, 64, 5)


class TestBundledModel:
    """SmolLM2-135M in float32 on 32 sentences."""

    NUM_TOKENS = 24
    CLOSE_CALL = 1e-3
    """Logits nearer than this may change places: thirty times the largest difference that was measured, 3e-5."""

    @pytest.fixture(scope="class")
    def model(self):
        try:
            return load_model(ModelConfig(ModelSource.bundled, dtype=DType.float32))
        except UserError as error:
            if "could not be fetched" not in str(error):
                raise
            pytest.skip(f"no network: {error}")

    @pytest.fixture(scope="class")
    def prompts(self, model) -> list[list[int]]:
        """The beginnings of 32 docstrings: eight each of 8, 12, 17 and 24 tokens."""
        names = [
            value
            for module in (os, json, re, statistics, textwrap, collections, inspect)
            for value in vars(module).values()
        ]
        docs = sorted({inspect.getdoc(value) for value in names if inspect.isroutine(value) and inspect.getdoc(value)})
        ids = [ids for doc in docs if len(ids := model[1](doc)["input_ids"]) > 24][:32]
        return [prompt[: (8, 12, 17, 24)[i % 4]] for i, prompt in enumerate(ids)]

    @pytest.fixture(scope="class")
    def expected(self, model, prompts) -> list[list[int]]:
        """transformers' greedy tokens, in groups of equal length (no padding, which would change sums), each cut where
        the first and second choice are too close to call."""
        answers: list[list[int]] = [[]] * len(prompts)
        for first in range(4):
            ids = torch.tensor(prompts[first::4])
            out = model[0].generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=self.NUM_TOKENS,
                max_new_tokens=self.NUM_TOKENS,
                eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
            best = torch.stack(out.logits, dim=1).topk(2).values  # [8, NUM_TOKENS, 2]
            clear = (best[..., 0] - best[..., 1] > self.CLOSE_CALL).cumprod(1).sum(1)
            answers[first::4] = [
                row[ids.shape[1] :][:n].tolist() for row, n in zip(out.sequences, clear.tolist(), strict=True)
            ]
        return answers

    def test_greedy_tokens_are_those_of_transformers(self, model, prompts, expected, greedy_params):
        assert sum(len(answer) == self.NUM_TOKENS for answer in expected) >= 28  # hardly any close call
        llm = LLM(*model, max_model_len=64, max_num_seqs=32, max_num_batched_tokens=100)
        params = SamplingParams(temperature=0, max_tokens=self.NUM_TOKENS, ignore_eos=True)
        batch = llm.generate(prompts, params)
        alone = [llm.generate([prompts[i]], params)[0] for i in (0, 13, 30)]
        answers = [output.choices[0].token_ids for output in batch]
        assert [answer[: len(wanted)] for answer, wanted in zip(answers, expected, strict=True)] == expected
        assert [output.choices[0].token_ids for output in alone] == [answers[i] for i in (0, 13, 30)]

    def test_gate_in_float32(self, model, prompts):
        llm = LLM(*model, max_model_len=64, max_num_seqs=32)
        report = train_serve_gate(model[0], llm, prompts[::4])
        report.check(5e-4)  # measured: 3e-5; float32 sums in another order through 30 layers


@pytest.fixture(scope="module")
def model(random_model):
    return random_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, packed=True)


@pytest.fixture(scope="module")
def prompts(token_prompts):
    """The last but one begins like the first."""
    prompts = token_prompts(*LENGTHS)
    return [*prompts, prompts[0][:40] + prompts[1], prompts[2][:12] * 4]


def mixed_params(n: int = 24) -> list[SamplingParams]:
    """Greedy and seeded sampling in turn."""
    greedy = {"temperature": 0, "max_tokens": n, "ignore_eos": True}
    drawn = {"temperature": 0.9, "top_p": 0.95, "max_tokens": n, "ignore_eos": True}
    return [SamplingParams(**(greedy if i % 2 else drawn), seed=i) for i in range(len(LENGTHS) + 2)]


def tokens(outputs) -> list[list[int]]:
    return [output.choices[0].token_ids for output in outputs]


class TestContention:
    """The same tokens, greedy and sampled, whatever memory, neighbours and shortcuts do."""

    @pytest.fixture(scope="class")
    def expected(self, model, prompts, serve) -> list[list[int]]:
        llm = serve(model, max_num_seqs=1, enable_prefix_caching=False)
        return tokens(llm.generate(prompts, mixed_params()))

    @pytest.fixture(scope="class")
    def tight(self, model, serve) -> int:
        """Bytes of 10 KV blocks: room for the longest request (70 + 24 tokens), not for three."""
        cache = serve(model).runner.cache
        return 10 * cache.nbytes // cache.num_blocks

    def test_greedy_is_transformers(self, model, prompts, expected, hf_greedy):
        for i in (1, 3, 5, 7, 9):
            assert expected[i] == hf_greedy(model, prompts[i], 24)

    @pytest.mark.parametrize("max_num_seqs", [1, 2, 16])
    def test_neighbours(self, model, prompts, expected, serve, max_num_seqs):
        llm = serve(model, max_num_seqs=max_num_seqs, max_num_batched_tokens=40)
        assert tokens(llm.generate(prompts, mixed_params())) == expected

    def test_recompute(self, model, prompts, expected, serve, tight):
        llm = serve(model, kv_cache_memory_bytes=tight)
        assert tokens(llm.generate(prompts, mixed_params())) == expected
        counts = llm.engine.scheduler.counts
        assert counts.preempted_recompute > 0 and counts.preempted_swap == 0

    def test_swap(self, model, prompts, expected, serve, tight):
        llm = serve(model, kv_cache_memory_bytes=tight, swap_space=0.01)
        assert tokens(llm.generate(prompts, mixed_params())) == expected
        counts = llm.engine.scheduler.counts
        assert counts.preempted_swap > 0 and counts.swapped_in_blocks > 0 and counts.preempted_recompute == 0

    def test_prefix_hits(self, model, prompts, expected, serve):
        llm = serve(model)
        first, second = (llm.generate(prompts, mixed_params()) for _ in range(2))
        assert tokens(first) == tokens(second) == expected
        assert second[0].num_cached_tokens == 64 and second[8].num_cached_tokens == 48
        llm.engine.blocks.forget()
        assert llm.generate(prompts, mixed_params())[0].num_cached_tokens == 0

    @pytest.mark.parametrize("memory", ["roomy", "tight"])
    def test_drafts(self, model, prompts, expected, serve, tight, memory, monkeypatch):
        """Drafts that are right for a while and then wrong: what is accepted, rejected and written over must not show,
        for greedy and for drawn tokens."""
        answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}

        def propose(token_ids: list[int], num_drafts: int) -> list[int]:
            prompt = next(prompt for prompt in answers if tuple(token_ids[: len(prompt)]) == prompt)
            begin = len(token_ids) - len(prompt)
            drafts = answers[prompt][begin : begin + num_drafts]
            return [token ^ 1 if (begin + i) % 5 == 3 else token for i, token in enumerate(drafts)]

        monkeypatch.setattr(scheduler, "propose", propose)
        settings = {"kv_cache_memory_bytes": tight} if memory == "tight" else {}
        llm = serve(model, num_speculative_tokens=4, **settings)
        assert tokens(llm.generate(prompts, mixed_params())) == expected
        counts = llm.engine.scheduler.counts
        assert 0 < counts.accepted < counts.drafted
        assert counts.preempted_recompute > 0 or memory == "roomy"

    def test_accepted_drafts(self, serve):
        """The tiny model repeats itself, so its drafts are right, and several tokens come out of a step."""
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        plain, drafting = (LLM("tiny", dtype="float32", max_model_len=128, num_speculative_tokens=n) for n in (0, 4))
        texts = ["Hello there, hello there", "def f(x): return"]
        assert tokens(drafting.generate(texts, params)) == tokens(plain.generate(texts, params))
        assert drafting.engine.scheduler.counts.accepted > 20
        assert drafting.engine.scheduler.num_steps < 0.75 * plain.engine.scheduler.num_steps

    def test_several_answers(self, model, prompts, serve, tight):
        """Answers of one request share their prompt's blocks; each is what its seed and number give alone."""
        params = SamplingParams(temperature=1.0, seed=7, n=4, max_tokens=12, ignore_eos=True)
        roomy = serve(model).generate([prompts[2]], params)[0]
        contended = serve(model, kv_cache_memory_bytes=tight).generate(
            [prompts[2], *prompts[:2]], [params, *mixed_params()[:2]]
        )
        answers = [choice.token_ids for choice in roomy.choices]
        assert len({tuple(answer) for answer in answers}) == 4
        assert [choice.token_ids for choice in contended[0].choices] == answers

    def test_int8_keys(self, model, prompts, serve, greedy_params, served_logprobs):
        exact, rounded = (
            torch.cat(
                [served_logprobs(o) for o in serve(model, kv_cache_dtype=dtype).generate(prompts, greedy_params(0))]
            )
            for dtype in ("auto", "int8")
        )
        difference = (exact - rounded).abs()
        print(f"int8 KV: |d logprob| max {difference.max():.4f}, mean {difference.mean():.4f}")
        # Measured 0.1 and 0.02. Codes of 1/127 are 0.2 % of a head's size, on scores of +-10 that is 2 %.
        assert 0 < difference.mean() < 0.05 and difference.max() < 0.5


class TestLiveModule:
    """The module in memory, its adapter trained between calls."""

    @pytest.fixture
    def trained(self, random_model):
        return attach_lora(random_model("llama", packed=True), TrainerLoraConfig(rank=8, alpha=16), seed=0)

    @staticmethod
    def steps(model, prompts, num: int = 3) -> None:
        model.train()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
        for _ in range(num):
            ids = torch.tensor([prompts[0]])
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()

    def test_refresh_follows_training(self, trained, prompts, serve, hf_greedy, greedy_params):
        llm = serve(trained)
        answers = []
        for _ in range(3):
            outputs = llm.generate(prompts[:4], greedy_params(12))
            assert tokens(outputs) == [hf_greedy(trained, prompt, 12) for prompt in prompts[:4]]
            train_serve_gate(trained, llm, prompts).check(1e-4)  # float32 sums in another order, two layers
            answers.append(tokens(outputs))
            self.steps(trained, prompts)
            llm.refresh()
        assert answers[0] != answers[1] != answers[2]
        base = llm.generate(prompts[:4], greedy_params(12), adapter=None)
        assert tokens(base) == answers[0]  # lora_B began at zero

    def test_no_key_survives_a_refresh(self, trained, prompts, serve):
        llm = serve(trained)
        params = SamplingParams(temperature=0, max_tokens=1)
        assert [llm.generate([prompts[0]], params)[0].num_cached_tokens for _ in range(2)] == [0, 64]
        self.steps(trained, prompts, 1)
        llm.refresh()
        assert llm.generate([prompts[0]], params)[0].num_cached_tokens == 0

    def test_an_adapter_that_comes_later(self, random_model, prompts, serve, hf_greedy):
        model = random_model("llama", packed=True)
        llm = serve(model)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        before = tokens(llm.generate(prompts[:2], params))
        adapted = attach_lora(model, TrainerLoraConfig(rank=4, alpha=8), seed=0)
        self.steps(adapted, prompts)
        llm.refresh()
        after = tokens(llm.generate(prompts[:2], params))
        assert after == [hf_greedy(adapted, prompt, 8) for prompt in prompts[:2]] != before
        assert tokens(llm.generate(prompts[:2], params, adapter=None)) == before

    def test_refresh_waits_for_requests(self, trained, prompts, serve):
        llm = serve(trained)
        request = llm.engine.request(prompts[0], SamplingParams(max_tokens=2), adapter=llm.adapters.by_name["live"])
        llm.engine.add(request)
        with pytest.raises(UserError, match="1 requests use the adapter live"):
            llm.refresh()
        llm.engine.abort(request.request_id)
        llm.refresh()

    def test_gate_sees_a_stale_adapter(self, trained, prompts, serve):
        llm = serve(trained)
        self.steps(trained, prompts)
        trained.train()
        report = train_serve_gate(trained, llm, prompts)
        assert trained.training  # left as it was
        with pytest.raises(RuntimeError, match="adapter_sha256 is .*refresh"):
            report.check(1e9)

    def test_gate_sees_wrong_numbers(self, trained, prompts, serve):
        llm = serve(trained)
        good = train_serve_gate(trained, llm, prompts)
        assert good.digest == train_serve_gate(trained, llm, prompts[:1]).digest
        llm.runner.decoder.layers[1].down.weight.weight[5] ^= 0x11  # one row's codes
        llm.engine.blocks.forget()
        report = train_serve_gate(trained, llm, prompts)
        worst = max(range(len(prompts)), key=lambda i: report.prompts[i].max_difference)
        with pytest.raises(RuntimeError, match=rf"prompt {worst}, token \d+ \(.*the limit is 0.0001") as error:
            report.check(1e-4)
        position = int(re.search(r"token (\d+)", str(error.value))[1])
        assert abs(report.prompts[worst].differences[position - 1]) == report.max_difference > 1e-3

    def test_gate_refuses_what_it_cannot_compare(self, trained, serve):
        with pytest.raises(UserError, match="prompt 1 has one token"):
            train_serve_gate(trained, serve(trained), [[5, 6], [7]])
        with pytest.raises(UserError, match="prompts is empty"):
            train_serve_gate(trained, serve(trained), [])

    def test_mistakes(self, trained, random_model, serve):
        with pytest.raises(UserError, match="needs tokenizer="):
            LLM(trained)
        with pytest.raises(UserError, match=r"\['max_seqs'\] are no settings"):
            serve(trained, max_seqs=3)
        with pytest.raises(UserError, match="no active adapter"):
            serve(random_model("llama")).refresh()


class TestRunFolder:
    """What a run wrote is what it trained."""

    @pytest.fixture(scope="class")
    def module(self, trained_run):
        """The base as it was packed for training, with the exported adapter, by the trainer's own reader."""
        model, _ = load_model(ModelConfig(ModelSource.tiny, dtype=DType.float32))
        prepare_model(model, QuantConfig())
        return read_adapter(model, trained_run.exports["adapter"])

    @pytest.mark.parametrize("folder", ["run", "export"])
    def test_same_tokens_as_the_trained_module(self, trained_run, module, folder, hf_greedy):
        llm = LLM(
            trained_run.run_dir if folder == "run" else trained_run.exports["adapter"],
            max_model_len=256,
            dtype="auto" if folder == "run" else "float32",
        )
        texts = ["Repeat 23", "Repeat 40, please", "<|im_start|>user\nRepeat 31<|im_end|>\n<|im_start|>assistant\n"]
        outputs = llm.generate(texts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        expected = [hf_greedy(module, llm.tokenizer(text)["input_ids"], 16) for text in texts]
        assert tokens(outputs) == expected
        report = train_serve_gate(module, llm, texts)
        report.check(1e-4)  # float32 sums in another order, two layers
        base = llm.generate(texts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), adapter=None)
        assert tokens(base) != expected  # the adapter does something

    def test_the_export_says_its_dtype(self, trained_run):
        """dtype=auto is the dtype that was trained, not what this machine would choose."""
        llm = LLM(trained_run.exports["adapter"], max_model_len=64)
        assert llm.runner.decoder.config.dtype == torch.float32
        with pytest.raises(UserError, match="was trained on a base"):
            LLM(trained_run.exports["adapter"], max_model_len=64, dtype="bfloat16")

    def test_another_base_is_refused(self, trained_run, serve, random_model):
        with pytest.raises(UserError, match="was trained on a base"):
            serve(random_model("llama")).load_adapter("a", trained_run.exports["adapter"])


class TestLoglikelihood:
    def test_sums_are_those_of_transformers(self, model, serve, token_prompts, hf_greedy, hf_logprobs):
        contexts = token_prompts(1, 16, 40, 41, seed=3)
        pairs = [(context, hf_greedy(model, context, 5)) for context in contexts]  # greedy ones
        pairs += [(context, own) for context in contexts for own in token_prompts(1, 2, 9, seed=4)]
        found = serve(model).loglikelihood(*zip(*pairs, strict=True))
        for (context, own), (total, is_greedy) in zip(pairs, found, strict=True):
            assert abs(total - hf_logprobs(model, context + own)[len(context) - 1 :].sum()) < 1e-3  # up to 9 sums
            assert is_greedy == (hf_greedy(model, context, len(own)) == own)
        assert [is_greedy for _, is_greedy in found[:4]] == [True] * 4
        assert not any(is_greedy for _, is_greedy in found[4:])

    def test_continuations_share_their_context(self, model, serve, token_prompts):
        llm = serve(model)
        (context,) = token_prompts(50)
        llm.loglikelihood([context] * 4, token_prompts(1, 2, 3, 4))
        assert llm.engine.scheduler.counts.prefix_hits == 3 * 48

    def test_text(self, model, serve, tokenizer, hf_logprobs):
        ((total, _),) = serve(model).loglikelihood(["The sky"], [" is blue"])
        ids = tokenizer("The sky is blue")["input_ids"]
        assert abs(total - hf_logprobs(model, ids)[6:].sum()) < 1e-3
        with pytest.raises(UserError, match="context is empty"):
            serve(model).loglikelihood([""], ["a"])


def test_a_server_that_nobody_holds_is_freed(random_model, serve):
    llm = serve(random_model("llama"))
    runner = weakref.ref(llm.runner)
    del llm
    gc.collect()
    assert runner() is None


def test_a_float16_module_runs_without_a_tape(random_model, serve):
    """The compiled kernels have float32 and bfloat16; the reference cannot be recorded."""
    llm = serve(random_model("llama", dtype=torch.float16))
    assert len(llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))) == 1


def test_settings_that_a_module_in_memory_cannot_have_are_refused(random_model, serve):
    with pytest.raises(UserError, match="quantization"):
        serve(random_model("llama"), quantization="nf4")


def test_the_best_answers_are_the_same_each_time_they_are_asked_for(random_model, serve):
    llm = serve(random_model("llama"))
    request = llm.engine.request([5, 6, 7], SamplingParams(n=2, best_of=4, max_tokens=5, seed=1, ignore_eos=True))
    llm.engine.add(request)
    while llm.engine.has_work:
        llm.engine.step()
    first, second = ([(choice.index, choice.token_ids) for choice in request_output(request).choices] for _ in range(2))
    assert first == second and [index for index, _ in first] == [0, 1]


def test_ctrl_c_between_schedule_and_forward_leaves_no_unwritten_keys(random_model, serve, greedy_params, monkeypatch):
    """Blocks can be found from the moment they are scheduled; what was never computed must not be."""
    llm, prompt = serve(random_model("llama")), list(range(3, 53))
    want = [c.token_ids for c in llm.generate([prompt], greedy_params(4))[0].choices]
    llm.engine.blocks.forget()
    schedule = llm.engine.scheduler.schedule

    def interrupted():
        schedule()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "schedule", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt], greedy_params(4))
    assert not llm.engine.has_work and llm.engine.blocks.num_free_blocks == llm.engine.blocks.num_blocks
    output = llm.generate([prompt], greedy_params(4))[0]
    assert output.num_cached_tokens == 0 and [c.token_ids for c in output.choices] == want


def test_the_gate_fails_on_a_nan_anywhere(random_model):
    for differences in ([[0.0, math.nan]], [[0.0, 0.0], [math.nan, 0.0]]):
        prompts = [PromptDifference([1, 2, 3], ["a", "b", "c"], values) for values in differences]
        with pytest.raises(RuntimeError, match="nan"):
            GateReport(prompts, {}).check(1.0)
