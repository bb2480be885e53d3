"""Where numbers go: metrics.jsonl always, a tracker when asked, a progress bar for the person who watches.

metrics.jsonl has a line a step. On resume the lines past the checkpoint are cut off, for those steps run again.
"""

import json
import logging
import os
import resource
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.config.errors import UserError
from trainer.config.schema import Config, Tracker, to_dict

log = logging.getLogger(__name__)

WANDB_FAULTS = (ImportError, OSError, ValueError, TypeError, AttributeError, RuntimeError)
"""No network, no disk, no login, a version that does not fit: of a tracker none may end a run."""
INIT_TIMEOUT_S = 30
"""wandb waits 90 s for its server, and a run without a network would too."""


class MetricSink(Protocol):
    """Takes a step's numbers, and at the end the report; `close` flushes."""

    def log(self, metrics: dict[str, Any]) -> None: ...

    def add_report(self, path: Path) -> None: ...

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

    def add_report(self, path: Path) -> None:
        """It lies beside the lines already."""

    def close(self) -> None:
        self._file.close()


def _lines_up_to(path: Path, step: int) -> list[str]:
    """Whole lines of steps 1..step; a line that a crash cut short is dropped."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]
    return [line for line in lines if json.loads(line)["step"] <= step]


class WandbSink:
    """Weights & Biases; WANDB_MODE=offline needs no account. A resumed run goes on under the same id, and the runs of
    a sweep are a group. A run never waits or fails for it: at the first fault it is given up with one warning."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._run: Any = None
        with self._giving_up("start"):
            import wandb

            id_path = run_dir / "wandb_id.txt"
            run_id = id_path.read_text().strip() if id_path.is_file() else secrets.token_hex(4)
            self._run = wandb.init(
                project=config.project,
                id=run_id,
                resume="allow",
                group=sweep_name(),
                name=run_dir.name,
                dir=run_dir,
                config=to_dict(config),
                settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S),
            )
            id_path.write_text(run_id + "\n")

    @contextmanager
    def _giving_up(self, what: str) -> Iterator[None]:
        try:
            yield
        except _wandb_faults() as error:
            self._give_up(what, error)

    def _give_up(self, what: str, error: Exception) -> None:
        self._run = None
        said = " ".join(str(error).split())[:200]
        log.warning(
            "tracker  wandb cannot %s (%s: %s); the run goes on without it, and its figures are in metrics.jsonl. "
            "`wandb login`, WANDB_MODE=offline, or tracker=tensorboard",
            *(what, type(error).__name__, said),
        )

    def log(self, metrics: dict[str, Any]) -> None:
        if self._run is not None:
            with self._giving_up("log"):
                self._run.log(metrics, step=metrics["step"])

    def add_report(self, path: Path) -> None:
        """As an artifact of the run."""
        if self._run is None:
            return
        with self._giving_up("take the report"):
            import wandb

            artifact = wandb.Artifact(f"report-{self._run.id}", type="report")
            artifact.add_file(str(path))
            self._run.log_artifact(artifact)

    def close(self) -> None:
        if self._run is not None:
            with self._giving_up("finish"):
                self._run.finish()


def _wandb_faults() -> tuple[type[Exception], ...]:
    """What may be raised, once wandb is imported as far as it goes: its own errors have a base of their own."""
    own = getattr(sys.modules.get("wandb"), "Error", OSError)
    return (*WANDB_FAULTS, own)


def sweep_name() -> str | None:
    """Of a job of a sweep (`--multirun`), the sweep's folder: `qlora/2026-01-31_12-00-00`; else None."""
    if not HydraConfig.initialized() or HydraConfig.get().mode is not RunMode.MULTIRUN:
        return None
    return "/".join(Path(HydraConfig.get().sweep.dir).parts[-2:])


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

    def add_report(self, path: Path) -> None:
        """It takes no files."""

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
