"""Tasks of lm-evaluation-harness, asked of our engine in this process; offline, from task files and data on this disk.

A task file may hold `@name@` where the path of its data belongs; `task_data=['name=file']` says which file that is.
What a task asks for in generation (until, max_gen_toks, temperature) is what it gets; log-likelihoods are of the text
as it is, without a chat template.
"""

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.errors import UserError, require
from trainer.config.evaluation import EvaluationConfig
from trainer.evaluate.quality.bootstrap import Interval, Resampler, mean
from trainer.evaluate.quality.server_program import ServerProgram
from trainer.serve.llm import LLM
from trainer.serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM

SHIPPED = Path(__file__).parent.parent / "tasks"
_PLACE = re.compile(r"@(\w+)@")
_LONGEST_ANSWER = 256  # the harness' own default


def run_tasks(program: ServerProgram, config: EvaluationConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Task -> metric -> value, and a number a question where the metric is their mean.

    raises  UserError if lm-eval is not installed, or no task has its data
    """
    try:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError(
            f"tasks={config.tasks} needs lm-evaluation-harness; pip install -e '.[eval]', or leave tasks out"
        ) from None
    with tempfile.TemporaryDirectory(prefix="lowbit_tasks_") as folder:
        names = write_tasks(config, Path(folder), say)
        manager = TaskManager(include_path=folder, include_defaults=False)
        say(f"lm-eval: {', '.join(names)}")
        results = simple_evaluate(
            model=model_of(program.llm),
            tasks=names,
            task_manager=manager,
            limit=config.task_limit,
            bootstrap_iters=0,
            log_samples=True,
            random_seed=config.seed,
            fewshot_random_seed=config.seed,
        )
    return {name: _metrics(results["results"][name], results["samples"][name]) for name in names}


def write_tasks(config: EvaluationConfig, folder: Path, say: Callable[[str], None]) -> list[str]:
    """Task files with their paths filled in; returns the names of the tasks that have their data."""
    source = SHIPPED if config.tasks == "shipped" else Path(config.tasks)
    data = {name: str(Path(path).resolve()) for name, _, path in (item.partition("=") for item in config.task_data)}
    names, missing, used = [], [], set()
    for path in sorted(source.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        wanted = set(_PLACE.findall(text))
        if wanted - data.keys():
            missing.append(f"{path.name} needs {', '.join(sorted(f'{name}=<file>' for name in wanted - data.keys()))}")
            continue
        used |= wanted
        (folder / path.name).write_text(_PLACE.sub(lambda match: data[match[1]], text), encoding="utf-8")
        names += re.findall(r"^task:\s*(\S+)\s*$", text, re.M)
    unused = sorted(data.keys() - used)
    require(not unused, f"task_data names {', '.join(unused)}, and no task of {source} has a place for it")
    require(bool(names), f"tasks={config.tasks} has no task that can run: {'; '.join(missing) or 'no .yaml file'}")
    for reason in missing:
        say(f"left out: {reason}, in task_data")
    return names


def _metrics(results: dict[str, Any], samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`exact_match,last-number` -> value and items; perplexities have no items, since they are no means."""
    found = {}
    for key, value in results.items():
        metric, comma, name = key.partition(",")
        if not comma or "stderr" in metric or not isinstance(value, int | float):
            continue
        own = [sample.get(metric) for sample in samples if sample.get("filter", name) == name]
        plain = bool(own) and all(isinstance(item, int | float) for item in own)
        found[key] = {"value": float(value), "items": [float(item) for item in own] if plain else None}
    return found


def compare_tasks(
    original: dict[str, Any], found: dict[str, Any], draws: Callable[[int], Resampler]
) -> dict[str, dict[str, Any]]:
    """Task -> metric -> both values with intervals over questions, and the difference on the same draws."""
    compared: dict[str, dict[str, Any]] = {}
    for task, metrics in found.items():
        for name, own in metrics.items():
            theirs = original[task][name]
            figures: dict[str, Any] = {"value": own["value"], "original": theirs["value"]}
            if own["items"] is not None and theirs["items"] is not None:
                resampler = draws(len(own["items"]))
                more = [a - b for a, b in zip(own["items"], theirs["items"], strict=True)]
                figures |= {
                    "questions": len(more),
                    "interval": _interval(own["items"], resampler).to_dict(),
                    "interval_original": _interval(theirs["items"], resampler).to_dict(),
                    "difference": resampler.interval(mean(more)).to_dict(),
                    "right_to_wrong": sum(item < 0 for item in more),
                    "wrong_to_right": sum(item > 0 for item in more),
                }
            compared.setdefault(task, {})[name] = figures
    return compared


def _interval(items: Sequence[float], resampler: Resampler) -> Interval:
    if set(items) <= {0.0, 1.0}:
        return resampler.share([bool(item) for item in items])
    return resampler.interval(mean(items))


def model_of(llm: LLM) -> "TemplateLM":
    """Our engine as the harness asks models; batches are the engine's own."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    longest, tokenizer = llm.config.max_model_len, llm.tokenizer

    class ServedModel(TemplateLM):
        """Requests come all at once; the engine's scheduler makes steps of them."""

        @property
        def eot_token_id(self) -> int:
            return tokenizer.eos_token_id

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id

        @property
        def tokenizer_name(self) -> str:
            return tokenizer.name_or_path.replace("/", "__")

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
            return tokenizer(string, verbose=False, **special)["input_ids"]

        def _loglikelihood_tokens(
            self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
        ) -> list[tuple[float, bool]]:
            pairs = [(before[-max(1, longest - len(own)) :], own) for _, before, own in requests]
            return llm.loglikelihood(*(list(side) for side in zip(*pairs, strict=True)))

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            owners, pairs = [], []
            for number, request in enumerate(requests):
                ids = self.tok_encode(request.args[0], add_special_tokens=False)
                windows = get_rolling_token_windows(ids, self.prefix_token_id, longest - 1, 1)
                for before, own in map(make_disjoint_window, windows):
                    owners.append(number)
                    pairs.append((("", ""), before, own))
            totals = [0.0] * len(requests)
            for number, (total, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
                totals[number] += total
            return totals

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            prompts, params = [], []
            for context, settings in (request.args for request in requests):
                params.append(_sampling(settings))
                room = max(1, longest - params[-1].max_tokens)
                prompts.append(self.tok_encode(context)[-room:])
            return [output.choices[0].text for output in llm.generate(prompts, params)]

    return ServedModel()


def _sampling(settings: dict[str, Any]) -> SamplingParams:
    """What a task says of its answers."""
    until = settings.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    sampled = settings.get("do_sample", False)
    return SamplingParams(
        temperature=float(settings.get("temperature", 1.0)) if sampled else 0.0,
        max_tokens=int(settings.get("max_gen_toks", _LONGEST_ANSWER)),
        stop=tuple(stop for stop in stops if stop),
    )
