"""Where numbers go: metrics.jsonl always, a tracker when asked, a progress bar for the person who watches.

metrics.jsonl has a line a step. On resume the lines past the checkpoint are cut off, for those steps run again.
"""

import json
import os
import resource
import secrets
import sys
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.config.errors import UserError
from trainer.config.schema import Config, Tracker, to_dict


class MetricSink(Protocol):
    """Takes a step's numbers; `close` flushes."""

    def log(self, metrics: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """metrics.jsonl: a JSON object a line, flushed line by line, floats in full precision."""

    def __init__(self, path: Path, *, keep_steps: int) -> None:
        """keep_steps: lines of steps above it are dropped (0 starts afresh)"""
        kept = _lines_up_to(path, keep_steps) if keep_steps and path.is_file() else []
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: dict[str, Any]) -> None:
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _lines_up_to(path: Path, step: int) -> list[str]:
    """Whole lines of steps 1..step; a line that a crash cut short is dropped."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]
    return [line for line in lines if json.loads(line)["step"] <= step]


class WandbSink:
    """Weights & Biases; WANDB_MODE=offline needs no account. A resumed run goes on under the same id."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        import wandb

        id_path = run_dir / "wandb_id.txt"
        run_id = id_path.read_text().strip() if id_path.is_file() else secrets.token_hex(4)
        id_path.write_text(run_id + "\n")
        self._run = wandb.init(
            project=config.project,
            id=run_id,
            resume="allow",
            name=run_dir.name,
            dir=run_dir,
            config=to_dict(config),
        )

    def log(self, metrics: dict[str, Any]) -> None:
        self._run.log(metrics, step=metrics["step"])

    def close(self) -> None:
        self._run.finish()


class TensorboardSink:
    """TensorBoard event files in <run folder>/tensorboard."""

    def __init__(self, run_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "tracker=tensorboard needs the package tensorboard; pip install 'lowbit[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(run_dir / "tensorboard")

    def log(self, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._writer.close()


def open_sinks(config: Config, run_dir: Path, *, keep_steps: int) -> list[MetricSink]:
    """The sinks that `tracker` asks for; metrics.jsonl is always the first."""
    sinks: list[MetricSink] = [JsonLines(run_dir / "metrics.jsonl", keep_steps=keep_steps)]
    match config.tracker:
        case Tracker.wandb:
            sinks.append(WandbSink(config, run_dir))
        case Tracker.tensorboard:
            sinks.append(TensorboardSink(run_dir))
    return sinks


def mean_over_processes(sums: dict[str, tuple[float, float]], accelerator: Accelerator) -> dict[str, float]:
    """Figure -> mean, of each process's sums and counts; a figure that nobody counted is left out.

    sums  the same names in every process
    """
    if not sums:
        return {}
    totals = torch.tensor(list(sums.values()), dtype=torch.float64, device=accelerator.device)
    means = zip(sums, accelerator.reduce(totals, "sum").tolist(), strict=True)
    return {name: total / count for name, (total, count) in means if count}


def peak_memory_bytes() -> int:
    """The most memory this process has held: GPU memory where there is a GPU, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


class ProgressLine:
    """A bar with loss, tokens/s, memory and time left in a terminal; a plain line now and then elsewhere."""

    def __init__(self, num_steps: int, *, done: int, enabled: bool) -> None:
        self._num_steps, self._enabled = num_steps, enabled
        self._every = max(1, num_steps // 20)
        self._console = Console()
        columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"))
        self._bar = Progress(
            *columns, TimeRemainingColumn(), console=self._console, disable=not (enabled and self._console.is_terminal)
        )
        self._task = self._bar.add_task("train", total=num_steps, completed=done, numbers="")

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def update(self, metrics: dict[str, Any], *, left_s: float) -> None:
        """Show a finished step; left_s: estimated seconds until the last one."""
        step = metrics["step"]
        memory = metrics["peak_memory_bytes"] / 2**30
        numbers = f"loss {metrics['loss']:.3f}  {metrics['tokens_per_s']:.0f} tok/s  {memory:.1f} GiB"
        self._bar.update(self._task, completed=step, numbers=numbers)
        due = step == self._num_steps or step % self._every == 0
        if self._enabled and due and not self._console.is_terminal:
            print(f"step {step}/{self._num_steps}  {numbers}  {left_s:.0f} s left", flush=True)
