"""The evaluation: the original first, then itself computed in other ways, then each candidate; one model in memory.

    original   its hidden states at the windows are kept (kept.py), its answers, and what it scores
    floors     the original against itself: what rounding and the order of sums make of nothing
    rounded    the original on each grid of a candidate, nearest codes
    candidates compared with what was kept

All figures are taken on the same draws of rows. A candidate that cannot be opened is skipped, with the reason.
"""

import gc
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import version
from typing import Any

from trainer.config.errors import UserError, require
from trainer.config.evaluation import EvaluationConfig
from trainer.evaluate.quality.asking import Questions, Said, Say, ask, require_same_tokens, tokenizer_of
from trainer.evaluate.quality.bootstrap import Resampler
from trainer.evaluate.quality.choices import compare_choices
from trainer.evaluate.quality.divergence import Pair, compare_answers, first_divergence
from trainer.evaluate.quality.figures import cost_figures, divergence_figures, loss_figures, recovered_share
from trainer.evaluate.quality.gsm8k import compare_problems
from trainer.evaluate.quality.harness import compare_tasks, run_tasks
from trainer.evaluate.quality.kept import Kept
from trainer.evaluate.quality.module_program import ModuleProgram, open_module
from trainer.evaluate.quality.nearest import describe_grid, grid_of, round_to_nearest
from trainer.evaluate.quality.program import Program, open_program
from trainer.evaluate.quality.server_program import ServerProgram
from trainer.evaluate.quality.subject import Subject, made_from
from trainer.evaluate.token_rows import LOSS, TokenRows
from trainer.qat.scheme import Scheme
from trainer.resident import release_free_memory

TASK_TOKENS = 2048
"""Longest prompt and answer of tasks whose lengths are not known before."""


@dataclass
class Evaluation:
    """What is known while models come and go."""

    config: EvaluationConfig
    original: Subject
    questions: Questions
    say: Say
    kept: Kept | None = None
    said: Said | None = None
    tasks: dict[str, Any] = field(default_factory=dict)
    rounded: dict[str, TokenRows] = field(default_factory=dict)

    def draws(self, num_rows: int) -> Resampler:
        return Resampler(num_rows, resamples=self.config.resamples, seed=self.config.seed)

    @property
    def longest(self) -> int:
        longest = self.questions.longest
        return longest if self.config.tasks is None else max(longest, TASK_TOKENS - 1)

    @contextmanager
    def opened(self, subject: Subject, *, other_batches: bool = False) -> Iterator[Program]:
        """A subject as long as the block runs; raises UserError if it has another vocabulary"""
        tokenizer = self.questions.tokenizer
        settings = {"tokenizer": tokenizer, "longest": self.longest, "other_batches": other_batches}
        with open_program(subject, **settings) as program:
            require_same_tokens(subject, program.tokenizer, tokenizer)
            yield program


def evaluate(config: EvaluationConfig, say: Say = lambda text: None) -> dict[str, Any]:
    """Evaluate `config.run` against the original.

    say      is told what is being done
    returns  everything, per row too, as evaluation.json holds it
    raises   UserError for what cannot be opened or read, if it is not one candidate of several
    """
    original = _original(config)
    candidates = [Subject.of(name, path, dtype=config.dtype) for name, path in config.candidates]
    questions = Questions.of(config, tokenizer_of(original))
    state = Evaluation(config, original, questions, say)
    try:
        about = _measure_original(state)
        floors = {}
        for path in dict.fromkeys(subject.path for subject in candidates):
            floors[path] = _floors(state, path) if config.floors else []
        found = [_measure_or_skip(state, subject, floors[subject.path]) for subject in candidates]
    finally:
        if state.kept is not None:
            state.kept.close()
    skipped = [candidate["skipped"] for candidate in found if "skipped" in candidate]
    require(len(skipped) < len(found), "; ".join(skipped))
    return {
        "name": "evaluation",
        "date": datetime.now().strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {platform.system()}",
        "versions": {name: version(name) for name in ("lowbit", "torch", "transformers")},
        "settings": asdict(config),
        "protocol": questions.windows.protocol,
        "intervals": f"95 %, bootstrap over rows (windows, prompts, questions), {config.resamples} samples, "
        f"seed {config.seed}, expanded percentiles",
        "original": about,
        "candidates": found,
    }


def _original(config: EvaluationConfig) -> Subject:
    name, path = config.candidates[0]
    chosen = config.against_path or ("server" if path == "llama_cpp" else path)
    return Subject.of(config.against or made_from(name), chosen, dtype=config.dtype)


# ---- the original


def _measure_original(state: Evaluation) -> dict[str, Any]:
    windows = state.questions.windows
    with state.opened(state.original) as program:
        state.say(f"original: {state.original.name}, {program.description}; {len(windows.rows)} windows")
        state.kept = Kept.of(program, windows.rows)
        state.said = ask(program, state.questions, state.say)
        state.tasks = run_tasks(program, state.config, state.say) if state.config.tasks else {}
        again = state.kept.compare(program)  # the same program and batches: a divergence here is no noise, but a fault
        description = program.description
    draws = state.draws(len(windows.rows))
    about = {
        **_about(state.original, description),
        "kept": state.kept.description,
        **loss_figures(again, windows, draws),
        "repeats": divergence_figures(again, draws)["kl"]["value"],
    }
    if state.said.problems is not None:
        figures = compare_problems(None, state.said.problems, state.draws(len(state.said.problems)))
        about["gsm8k"] = {**figures, "shots": state.config.shots, "rows": state.said.problems}
    return about | ({"tasks": state.tasks} if state.tasks else {})


def _about(subject: Subject, description: str) -> dict[str, Any]:
    facts = {"name": subject.name, "model": subject.model, "kind": subject.kind, "path": subject.path}
    return {**facts, "computed_by": description, "bytes_on_disk": subject.bytes_on_disk}


def _floors(state: Evaluation, path: str) -> list[dict[str, Any]]:
    """The original against itself: through the candidate's program; where that is its own, in other batches, and
    through another program too."""
    if path != state.original.path:
        return [_floor(state, state.original.at(path), "the candidate's program", answers=True)]
    other = "module" if path == "server" else "server"
    return [
        _floor(state, state.original, "the same program, other batches", other_batches=True),
        _floor(state, state.original.at(other), f"another program, {other}"),
    ]


def _floor(
    state: Evaluation, subject: Subject, how: str, *, other_batches: bool = False, answers: bool = False
) -> dict[str, Any]:
    state.say(f"floor: {how}")
    prompts, draws = state.questions.prompts.rows, state.draws(len(state.questions.windows.rows))
    try:
        with state.opened(subject, other_batches=other_batches) as program:
            figures = divergence_figures(state.kept.compare(program), draws)
            if answers and prompts:
                found = program.answers(prompts, max_new_tokens=state.questions.max_new_tokens)
                parted = [first_divergence(*pair) for pair in zip(state.said.answers, found, strict=True)]
                figures["exact"] = state.draws(len(prompts)).share([place is None for place in parted]).to_dict()
            return {"how": how, "computed_by": program.description, **figures}
    except UserError as error:
        return {"how": how, "skipped": str(error)}


# ---- candidates


def _measure_or_skip(state: Evaluation, subject: Subject, floors: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        return {**_measure(state, subject), "floors": floors}
    except UserError as error:
        state.say(f"{subject.name} is skipped: {error}")
        return {"name": subject.name, "path": subject.path, "skipped": str(error)}


def _measure(state: Evaluation, subject: Subject) -> dict[str, Any]:
    questions = state.questions
    with state.opened(subject) as program:
        state.say(f"{subject.name}: {subject.kind}, {program.description}")
        tokens = state.kept.compare(program)
        said = ask(program, questions, state.say)
        tasks = run_tasks(program, state.config, state.say) if state.config.tasks else {}
        description = program.description
    draws = state.draws(len(questions.windows.rows))
    return {
        **_about(subject, description),
        **loss_figures(tokens, questions.windows, draws),
        **cost_figures(tokens, draws),
        **divergence_figures(tokens, draws),
        **_recovered(state, subject, tokens, draws),
        **_compare_said(state, said),
        **({"tasks": compare_tasks(state.tasks, tasks, state.draws)} if tasks else {}),
        "rows": tokens.to_rows(),
    }


def _compare_said(state: Evaluation, said: Said) -> dict[str, Any]:
    questions, original, found = state.questions, state.said, {}
    if questions.prompts.rows:
        triples = zip(questions.prompts.texts, original.answers, said.answers, strict=True)
        pairs = [Pair.of(text, ours, theirs, questions.tokenizer) for text, ours, theirs in triples]
        figures = compare_answers(pairs, state.draws(len(pairs)))
        found["prompts"] = {"source": questions.prompts.source, **figures, "pairs": [p.to_dict() for p in pairs]}
    if questions.choices is not None:
        draws = state.draws(len(questions.choices.questions))
        figures = compare_choices(questions.choices, original.scores, said.scores, draws)
        scores = [{"original": a, "candidate": b} for a, b in zip(original.scores, said.scores, strict=True)]
        found["choices"] = {**figures, "rows": scores}
    if said.problems is not None:
        figures = compare_problems(original.problems, said.problems, state.draws(len(said.problems)))
        found["gsm8k"] = {**figures, "shots": state.config.shots, "rows": said.problems}
    return found


# ---- rounding to nearest


def _recovered(state: Evaluation, subject: Subject, tokens: TokenRows, draws: Resampler) -> dict[str, Any]:
    """`recovered` and against what; null with the reason where there is nothing to compare with."""
    if not state.config.recovered:
        return {"recovered": None, "recovered_against": "not asked for"}
    rounded = _rounded(state, subject)
    if isinstance(rounded, str):
        return {"recovered": None, "recovered_against": rounded}
    against, nearest = rounded
    share = recovered_share(tokens, nearest, draws)
    loss = draws.interval(lambda weights: weights @ nearest.sums(LOSS) / (weights @ nearest.counts)).to_dict()
    if share is None:
        return {"recovered": None, "recovered_against": f"{against}, which adds no loss", "rounded_loss": loss}
    return {"recovered": share.to_dict(), "recovered_against": against, "rounded_loss": loss}


def _rounded(state: Evaluation, subject: Subject) -> tuple[str, TokenRows] | str:
    """(in words, the original rounded as the candidate is, beside the original); or why there is none."""
    if subject.path not in ("server", "module"):
        return f"path={subject.path} computes no layers of ours"
    schemes = _grid(subject)
    if isinstance(schemes, str):
        return schemes
    against = f"{describe_grid(schemes)}, {subject.path}"
    if against not in state.rounded:
        state.say(against)
        try:
            state.rounded[against] = _round_and_compare(state, subject.path, schemes)
        except ValueError as error:
            return str(error)
        finally:
            gc.collect()
            release_free_memory()
    return against, state.rounded[against]


def _grid(subject: Subject) -> dict[str, Scheme] | str:
    return grid_of(open_module(subject)[0])


def _round_and_compare(state: Evaluation, path: str, schemes: dict[str, Scheme]) -> TokenRows:
    module, tokenizer = open_module(state.original)
    round_to_nearest(module, schemes)
    kind = ServerProgram if path == "server" else ModuleProgram
    program = kind(state.original, tokenizer=tokenizer, longest=state.longest, module=module)
    try:
        return state.kept.compare(program)
    finally:
        program.close()
