"""A run from config to export: prepare, train, evaluate, export, report."""

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, broadcast_object_list
from filelock import FileLock, Timeout
from peft import PeftModel

from trainer.architecture import base_model
from trainer.checkpoint import checkpoints
from trainer.compose import load_config
from trainer.config.errors import UserError, require
from trainer.config.lora import LoraInit
from trainer.config.preference import Method
from trainer.config.schema import Config
from trainer.evaluate.report.record import begin_session
from trainer.evaluate.report.terminal import print_report
from trainer.evaluate.run_fidelity import MAX_ROWS, run_fidelity
from trainer.evaluate.samples import Sample, rows_to_show, sample_answers
from trainer.export.adapter import write_adapter, write_model_card
from trainer.export.merged import merged_dtype, write_merged
from trainer.export.merged_4bit import write_merged_4bit
from trainer.export.merged_card import write_merged_card
from trainer.export.method import describe_method
from trainer.export.quantized import write_quantized_card
from trainer.figures import perplexity
from trainer.finish import QatEnd, finish_qat
from trainer.leave_report import leave_report
from trainer.loop import TrainingDiverged, train
from trainer.metrics import peak_memory_bytes
from trainer.objective import num_targets
from trainer.prepare import PreparedRun, prepare_run

log = logging.getLogger(__name__)

MAX_WAIT = timedelta(days=7)
"""How long processes wait for the one that trains blocks, asks a teacher or fits LoftQ: torch waits 10 to 30 minutes,
and a large model takes longer. Where a process dies torchrun ends the others."""


@dataclass(frozen=True)
class Result:
    """What a run leaves: its folder, the figures of metrics.json, export format -> folder, the sample answers."""

    run_dir: Path
    metrics: dict[str, Any]
    exports: dict[str, Path]
    samples: list[Sample]


def finetune(config: Config) -> Result:
    """Fine-tune as `config` says (from `load_config`); returns figures and folders.

    raises  UserError for what the user can mend, TrainingDiverged, Interrupted (a checkpoint is written)
    """
    began = time.monotonic()
    accelerator = _accelerator(config)
    run_dir = _open_run_dir(config, accelerator)
    with _only_writer(run_dir, accelerator):
        run = prepare_run(config, run_dir, accelerator)
        run.state.wall_s += time.monotonic() - began
        try:
            if accelerator.is_main_process:
                begin_session(run_dir, step=run.state.step)
            return _train_and_finish(run)
        finally:
            run.data.close(run_dir, accelerator)
            for sink in run.training.sinks:
                sink.close()


def _accelerator(config: Config) -> Accelerator:
    on_cpu = torch.backends.mps.is_available() and not torch.cuda.is_available()  # float64 sums do not exist on mps
    unused = config.qat.start > 0  # learned scales have no gradient before it
    parallel = DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=unused)
    return Accelerator(cpu=on_cpu, kwargs_handlers=[parallel, InitProcessGroupKwargs(timeout=MAX_WAIT)])


def export_run(run: str, *overrides: str) -> dict[str, Path]:
    """Write exports from the newest checkpoint of a run, finished or stopped; nothing is trained.

    run        the run folder, or `latest`
    overrides  `export.formats=[merged]` and other keys of `export`, as on the command line
    returns    format -> folder, in <run folder>/export
    raises     UserError if the run has no checkpoint, or if its base or data are no longer what they were
    """
    config = load_config(f"resume={run}", *overrides)
    accelerator, run_dir = _accelerator(config), Path(config.resume)
    require(bool(checkpoints(run_dir)), f"{run_dir} holds no checkpoint to export; let it train: resume={run_dir}")
    with _only_writer(run_dir, accelerator):
        prepared = prepare_run(config, run_dir, accelerator, to_export=True)
        state = prepared.state
        state.eval_loss_base = state.eval_loss_base or math.nan
        if prepared.qat is not None:
            prepared.qat.finish()
            state.eval_loss_rounded = state.eval_loss_rounded or math.nan
        evaluated = prepared.training.evaluate()
        exports, qat = _export(prepared, evaluated["loss"])
        metrics = _metrics(prepared, qat, evaluated=evaluated, wall_s=state.wall_s)
        _write_cards(exports, config, metrics)
    return exports


def _train_and_finish(run: PreparedRun) -> Result:
    """Train, export, evaluate, report."""
    state, training, config = run.state, run.training, run.training.config
    began = time.monotonic()
    if state.eval_loss_base is None:
        if run.qat is not None:
            run.qat.enable(True)
            state.eval_rounded = training.evaluate()
            state.eval_loss_rounded = state.eval_rounded.pop("loss")
            log.info("held-out loss of the base, rounded to nearest: %.4f", state.eval_loss_rounded)
            run.qat.enable(False)
        with run.model.disable_adapter() if isinstance(run.model, PeftModel) else nullcontext():
            state.eval_base = training.evaluate()
        state.eval_loss_base = state.eval_base.pop("loss")
        log.info("held-out loss of the base: %.4f", state.eval_loss_base)
    state.wall_s += time.monotonic() - began
    train(training, state)
    began = time.monotonic() - state.wall_s
    if run.qat is not None:
        run.qat.finish()
    evaluated = training.evaluate()
    eval_loss = evaluated["loss"]
    if not math.isfinite(eval_loss):
        raise TrainingDiverged(f"the held-out loss after step {state.step} is {eval_loss}; start anew, lower optim.lr")
    rows = rows_to_show(run.data.held_out, config.evaluate.samples)
    samples = sample_answers(run.model, run.tokenizer, rows, max_new_tokens=config.evaluate.max_new_tokens)
    exports, qat = _export(run, eval_loss)
    metrics = _metrics(run, qat, evaluated=evaluated, wall_s=time.monotonic() - began)
    if training.accelerator.is_main_process:
        if config.evaluate.compares:
            some = run.data.held_out[:MAX_ROWS]["input_ids"]
            fidelity = run_fidelity(run.model, config.model, some, seed=config.seed)
            metrics |= {} if fidelity is None else {"fidelity": fidelity}
        (training.run_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        _write_cards(exports, config, metrics)
        leave_report(run, samples)
        folders = {name: str(folder) for name, folder in exports.items()}
        print_report(metrics, samples, config, run_dir=str(training.run_dir), exports=folders)
    return Result(training.run_dir, metrics, exports, samples)


@contextmanager
def _only_writer(run_dir: Path, accelerator: Accelerator) -> Iterator[None]:
    """Hold the run folder: a second process would tear checkpoints and metrics.

    raises  UserError if another process holds it
    """
    if not accelerator.is_main_process:
        yield
        return
    path = run_dir / ".lock"
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"{run_dir} is being written by another process; wait for it, or stop it first") from None
    try:
        yield
    finally:
        lock.release()
        path.unlink(missing_ok=True)


def _open_run_dir(config: Config, accelerator: Accelerator) -> Path:
    """Create the run folder; one that holds a run is not written over."""
    chosen = [config.output_dir or datetime.now().strftime("outputs/run/%Y-%m-%d_%H-%M-%S")]
    run_dir = Path(broadcast_object_list(chosen)[0])
    if accelerator.is_main_process:
        require(
            bool(config.resume) or not (run_dir / "config.yaml").is_file(),
            f"output_dir={run_dir} holds a run already; use resume={run_dir} to go on with it, or another folder",
        )
        run_dir.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    return run_dir


def _export(run: PreparedRun, eval_loss: float) -> tuple[dict[str, Path], QatEnd | None]:
    """Write the exports of `export.formats`; format -> folder, and how quantization-aware training ended.

    Afterwards the model of such a run holds codes.
    """
    training = run.training
    folders = {name: training.run_dir / "export" / name for name in training.config.export.formats}
    of_codes = {name: folder for name, folder in folders.items() if run.qat and name in ("quantized", "merged")}
    if training.accelerator.is_main_process:
        for name, folder in folders.items():
            if name not in of_codes:
                _write_export(run, name, folder)
    if run.qat is None:
        return folders, None
    return folders, finish_qat(run, of_codes, _provenance(run), eval_loss)


def _provenance(run: PreparedRun) -> dict[str, Any]:
    """What an export says about where it comes from."""
    return {
        "base": base_model(run.model).name_or_path,
        "base_sha256": run.state.base_sha256,
        "step": run.state.step,
        "method": describe_method(run.training.config),
    }


def _write_export(run: PreparedRun, name: str, folder: Path) -> None:
    config, provenance = run.training.config, _provenance(run)
    match name:
        case "adapter":
            starts_plain = not config.loftq.iterations and config.lora.init is LoraInit.default
            base_codes = None if starts_plain else run.training.run_dir
            base_sha256 = run.state.base_sha256
            write_adapter(run.model, run.tokenizer, folder, base_sha256=base_sha256, base_codes=base_codes)
        case "merged":
            dtype = merged_dtype(config.export)
            survival = write_merged(run.model, run.tokenizer, folder, dtype=dtype, provenance=provenance)
            if survival.overall is not None:
                log.info("merged   %.2f %% of the update is left after rounding", 100 * survival.overall)
        case "merged_4bit":
            rows = [(torch.tensor(row["input_ids"]), torch.tensor(row["labels"])) for row in run.data.held_out]
            merge = write_merged_4bit(run.model, run.tokenizer, folder, rows, provenance=provenance)
            log.warning(
                "merged_4bit: %.1f %% of the update is left after rounding to 4 bits again; KL to the unmerged model "
                "%.3g nats a token, another likeliest token at %.1f %% of %d held-out positions",
                *(100 * merge.survival.overall, merge.kl, 100 * merge.flips, merge.num_tokens),
            )


def _write_cards(exports: dict[str, Path], config: Config, metrics: dict[str, Any]) -> None:
    for name, folder in exports.items():
        writers = {"adapter": write_model_card, "quantized": write_quantized_card}
        writers.get(name, write_merged_card)(folder, config, metrics)


def _metrics(run: PreparedRun, qat: QatEnd | None, *, evaluated: dict[str, float], wall_s: float) -> dict[str, Any]:
    """The content of metrics.json: losses in nats a target token or of a preference, times in seconds."""
    state, eval_loss = run.state, evaluated["loss"]
    others = {f"eval_{name}_base": value for name, value in state.eval_base.items()}
    others |= {f"eval_{name}_rounded": value for name, value in state.eval_rounded.items()}
    others |= {f"eval_{name}": value for name, value in evaluated.items() if name != "loss"}
    if run.training.config.preference.method is Method.none:
        others |= {"perplexity_base": perplexity(state.eval_loss_base), "perplexity": perplexity(eval_loss)}
    held_out = run.data.held_out
    labels = [held_out[name] for name in ("labels", "rejected_labels") if name in held_out.column_names]
    return {
        "steps": state.step,
        "wall_s": wall_s,
        "eval_loss_base": state.eval_loss_base,
        "eval_loss": eval_loss,
        **others,
        "eval_rows": len(held_out),
        "eval_tokens": sum(num_targets(torch.tensor(row[1:])) for column in labels for row in column),
        "tokens": state.tokens,
        "tokens_per_s": state.tokens / state.train_s if state.train_s else 0.0,
        "peak_memory_bytes": peak_memory_bytes(),
        **({} if qat is None else {"qat": qat.to_dict()}),
    }
