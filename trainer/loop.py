"""The one training loop, for every method: methods differ in how a model is prepared and finished.

    step s:  rows = steps.micro_batches(s)    of a table a pure function of (seed, s): nothing to save, nothing to lose
             loss = sum of losses / target tokens (or pairs) of the whole step, over micro-steps and processes
             clip, step, log; evaluate, checkpoint when due

accelerate owns processes and devices. A step is atomic: Ctrl-C or SIGTERM lets it end, then saves.
"""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from trainer.checkpoint import TrainState, checkpoints, save_checkpoint
from trainer.config.schema import Config
from trainer.data.loader import group_by_length, row_len
from trainer.data.steps import Steps
from trainer.metrics import MetricSink, ProgressLine, mean_over_processes, peak_memory_bytes
from trainer.optim import (
    Optimizer,
    averaged_weights,
    learning_rate,
    set_learning_rate,
    use_averaged_weights,
    use_training_weights,
)

log = logging.getLogger(__name__)


class TrainingDiverged(RuntimeError):
    """The loss or its gradient is not finite. The text names the step and the rows."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run after a whole step; `checkpoint` is where it goes on."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self.checkpoint = checkpoint


@dataclass
class Training:
    """What the loop works on. `objective` maps a batch to its summed losses, see objective.py; its trainable parameters
    are optimised."""

    config: Config
    run_dir: Path
    accelerator: Accelerator
    objective: nn.Module
    """Has `collate`, `count` and `drain_metrics` as objective.NextTokenLoss."""
    optimizer: Optimizer
    steps: Steps
    """What each step trains on."""
    max_pass_tokens: int
    """`train.max_pass_tokens`, resolved."""
    sinks: list[MetricSink]
    evaluate: Callable[[], dict[str, float]]
    """Held-out figures, `loss` the first, for `train.eval_every`."""
    before_step: Callable[[int], None] | None = None
    """Called with the 0-based number of each step before it is taken: what changes on the way, such as QAT's start."""
    after_step: Callable[[int], None] | None = None
    """Called with the same number when it is taken, on each process: evaluations and checkpoints see what it did."""


class StopSignal:
    """Turns the first SIGINT or SIGTERM into `requested`; a second SIGINT stops at once.

    Signals reach the main thread only; in another one nothing is installed.
    """

    def __enter__(self) -> "StopSignal":
        self.requested = False
        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        log.warning("stopping after this step; a checkpoint follows (Ctrl-C again stops at once, without one)")


def train(run: Training, state: TrainState) -> TrainState:
    """Train from `state` to the end of the plan; returns the final state, whose checkpoint is on disk.

    raises  TrainingDiverged if loss or gradient is not finite; Interrupted after a signal, with a checkpoint written
    """
    config, num_steps, rank = run.config.train, run.steps.num_steps, run.accelerator.process_index
    session = time.monotonic() - state.wall_s
    run.objective.train()
    use_training_weights(run.optimizer)
    with StopSignal() as stop, ProgressLine(num_steps, done=state.step, enabled=rank == 0) as progress:
        while state.step < num_steps:
            began = time.monotonic()
            if run.before_step is not None:
                run.before_step(state.step)
            lr = learning_rate(state.step, num_steps, run.config.optim)
            num_tokens, loss, grad_norm, measured = optimizer_step(run, step=state.step, lr=lr)
            if run.after_step is not None:
                run.after_step(state.step)
            step_s = time.monotonic() - began
            state.step += 1
            state.tokens += num_tokens
            state.train_s += step_s
            state.wall_s = time.monotonic() - session
            metrics: dict[str, Any] = {
                "step": state.step,
                "loss": loss,
                "lr": lr,
                "grad_norm": grad_norm,
                "tokens": state.tokens,
                "tokens_per_s": num_tokens / step_s,
                "peak_memory_bytes": peak_memory_bytes(),
                **measured,
            }
            if config.log_row_ids:
                metrics["row_ids"] = run.steps.row_ids(state.step - 1)
            last = state.step == num_steps
            if config.eval_every and state.step % config.eval_every == 0 and not last:
                with averaged_weights(run.optimizer):
                    metrics |= {f"eval_{name}": value for name, value in run.evaluate().items()}
                run.objective.train()
            for sink in run.sinks:
                sink.log(metrics)
            progress.update(metrics, left_s=(num_steps - state.step) * state.train_s / state.step)
            stopping = _any_process(run.accelerator, stop.requested)
            if last or stopping or (config.save_every and state.step % config.save_every == 0):
                with averaged_weights(run.optimizer):
                    path = _save(run, state)
                if stopping:
                    raise Interrupted(path)
        if num_steps == 0 and not checkpoints(run.run_dir):  # what was prepared is the result
            _save(run, state)
    use_averaged_weights(run.optimizer)
    return state


def _save(run: Training, state: TrainState) -> Path:
    objective, keep = run.accelerator.unwrap_model(run.objective), run.config.train.keep_checkpoints
    return save_checkpoint(
        *(run.run_dir, state, objective, run.optimizer, run.accelerator), keep=keep, data_state=run.steps.state()
    )


def optimizer_step(run: Training, *, step: int, lr: float) -> tuple[int, float, float, dict[str, float]]:
    """Step `step` (0-based) of the plan; returns its tokens, mean loss, gradient norm and what the objective measured.

    All are of all processes. The objective's sums are each divided by its count, and added.

    raises  TrainingDiverged, before any weight has changed
    """
    accelerator, objective = run.accelerator, run.accelerator.unwrap_model(run.objective)
    micro_rows = run.steps.micro_batches(step)
    passes = [rows for micro in micro_rows for rows in group_by_length(micro, run.max_pass_tokens)]
    batches = [objective.collate(rows, device=accelerator.device) for rows in passes]
    counts = [sum(row_len(row) for rows in passes for row in rows)]
    counts += [sum(each) for each in zip(*(objective.count(batch) for batch in batches), strict=True)]
    num_tokens, *divisors = accelerator.reduce(torch.tensor(counts, device=accelerator.device), "sum").tolist()
    if not all(divisors):  # never a mean over nothing
        raise TrainingDiverged(f"step {step + 1} has no target token in any process, which no row should allow")
    # data parallelism averages gradients over processes; the sum is wanted
    shares = torch.tensor([accelerator.num_processes / divisor for divisor in divisors], device=accelerator.device)
    objective.look_ahead(batches, accelerator.reduce)
    total = torch.zeros((), device=accelerator.device)
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        with nullcontext() if last else accelerator.no_sync(run.objective):
            loss = (run.objective(**batch) * shares).sum()
            accelerator.backward(loss)
            total += loss.detach()
    loss = accelerator.reduce(total, "mean").item()
    grad_norm = _clip(run)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        rows = run.steps.row_ids(step)
        origins = [row["origin"] for micro in micro_rows for row in micro]
        raise TrainingDiverged(
            f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; no weight was changed. Rows {rows} from "
            f"{origins[:8]}. Look at these rows, or start a new run with a lower optim.lr (now {lr:.2e})"
        )
    set_learning_rate(run.optimizer, lr)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return num_tokens, loss, grad_norm, mean_over_processes(objective.drain_metrics(), accelerator)


def _clip(run: Training) -> float:
    """Clip the gradient norm to `train.max_grad_norm` (0: measure only); returns the norm before."""
    limit = run.config.train.max_grad_norm or float("inf")
    params = [param for param in run.objective.parameters() if param.requires_grad]
    return float(run.accelerator.clip_grad_norm_(params, limit))


def _any_process(accelerator: Accelerator, flag: bool) -> bool:
    return bool(accelerator.reduce(torch.tensor(int(flag), device=accelerator.device), "sum").item())
