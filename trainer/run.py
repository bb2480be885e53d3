"""A run from config to export: prepare, train, evaluate, export, report."""

import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list
from datasets import Dataset
from filelock import FileLock, Timeout
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.checkpoint import TrainState, checkpoints, load_checkpoint
from trainer.compose import save_config
from trainer.config import Config, UserError, require
from trainer.data.chat import tokenize_rows
from trainer.data.formats import Row, load_rows
from trainer.data.loader import BatchPlan
from trainer.evaluate.perplexity import held_out_loss
from trainer.evaluate.report import print_report
from trainer.evaluate.samples import Sample, sample_answers
from trainer.export.adapter import write_adapter, write_model_card
from trainer.kernels._cpp import choose
from trainer.linear import QuantLinear, weights_sha256
from trainer.loop import Training, TrainingDiverged, train
from trainer.lora import attach_lora
from trainer.metrics import open_sinks, peak_memory_bytes
from trainer.model import load_model, prepare_model
from trainer.objective import NextTokenLoss, num_targets
from trainer.optim import build_optimizer, lora_learning_rate

log = logging.getLogger(__name__)

MAX_PASS_TOKENS = (2048, 16384)
"""Padded tokens of one pass on CPUs and on GPUs, unless `train.max_pass_tokens` is set; docs/decisions.md has the
measurement behind the first, the second is a guess that fills a GPU and fits beside a 7B model."""


@dataclass(frozen=True)
class Result:
    """What a run leaves: its folder, the figures of metrics.json, export format -> folder, the sample answers."""

    run_dir: Path
    metrics: dict[str, Any]
    exports: dict[str, Path]
    samples: list[Sample]


@dataclass
class _Run:
    """A prepared run: the loop's part and what the end needs."""

    training: Training
    model: PeftModel
    tokenizer: PreTrainedTokenizerBase
    held_out: Dataset
    held_out_rows: list[Row]
    state: TrainState


def finetune(config: Config) -> Result:
    """Fine-tune as `config` says (from `load_config`); returns figures and folders.

    raises  UserError for what the user can mend, TrainingDiverged, Interrupted (a checkpoint is written)
    """
    began = time.monotonic()
    on_cpu = torch.backends.mps.is_available() and not torch.cuda.is_available()  # float64 sums do not exist on mps
    accelerator = Accelerator(cpu=on_cpu, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])
    run_dir = _open_run_dir(config, accelerator)
    with _only_writer(run_dir, accelerator):
        run = _prepare(config, run_dir, accelerator)
        run.state.wall_s += time.monotonic() - began
        try:
            return _train_and_finish(run)
        finally:
            for sink in run.training.sinks:
                sink.close()


def _train_and_finish(run: _Run) -> Result:
    """Train, export, evaluate, report."""
    state, training, config = run.state, run.training, run.training.config
    began = time.monotonic()
    if state.eval_loss_base is None:
        with run.model.disable_adapter():
            state.eval_loss_base = training.evaluate()
        log.info("held-out loss of the base: %.4f", state.eval_loss_base)
    state.wall_s += time.monotonic() - began
    train(training, state)
    began = time.monotonic() - state.wall_s
    eval_loss = training.evaluate()
    if not math.isfinite(eval_loss):
        raise TrainingDiverged(f"the held-out loss after step {state.step} is {eval_loss}; start anew, lower optim.lr")
    exports = _export(run)
    rows = run.held_out_rows[: config.evaluate.samples]
    samples = sample_answers(run.model, run.tokenizer, rows, max_new_tokens=config.evaluate.max_new_tokens)
    metrics = _metrics(run, eval_loss=eval_loss, wall_s=time.monotonic() - began)
    if training.accelerator.is_main_process:
        (training.run_dir / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        for folder in exports.values():
            write_model_card(folder, config, metrics)
        folders = {name: str(folder) for name, folder in exports.items()}
        print_report(metrics, samples, run_dir=str(training.run_dir), exports=folders)
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


def _prepare(config: Config, run_dir: Path, accelerator: Accelerator) -> _Run:
    """Everything up to the first step: model packed, adapter attached, data tokenized, checkpoint restored."""
    if not accelerator.is_main_process:
        logging.getLogger("trainer").setLevel(logging.WARNING)
    rows, held_out_rows = load_rows(config.data, config.seed)
    model, tokenizer = load_model(config.model)
    _require_positions(model, config)
    dataset = tokenize_rows(rows, tokenizer, config.data.max_seq_len)
    held_out = tokenize_rows(held_out_rows, tokenizer, config.data.max_seq_len)
    prepare_model(model, config.quant)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    peft_model = attach_lora(model, config.lora, seed=config.seed)
    peft_model.to(accelerator.device)
    objective = NextTokenLoss(peft_model, decoded_bytes=config.train.decoded_mb << 20)
    optim = replace(config.optim, lr=config.optim.lr or lora_learning_rate(model.config.get_text_config().hidden_size))
    optimizer = build_optimizer([p for p in objective.parameters() if p.requires_grad], optim)
    _require_disk(run_dir, objective, keep=config.train.keep_checkpoints)
    plan = BatchPlan(
        num_rows=len(dataset),
        batch_size=config.train.batch_size,
        grad_accum_steps=config.train.grad_accum_steps,
        world_size=accelerator.num_processes,
        seed=config.seed,
        epochs=config.train.epochs,
        max_steps=config.train.max_steps,
    )
    state = TrainState(
        world_size=accelerator.num_processes,
        dtype=str(model.dtype).removeprefix("torch."),
        base_sha256=weights_sha256(peft_model),
        data_sha256=_data_sha256(dataset, held_out),
        device=accelerator.device.type,
        kernels=choose("codebook4", accelerator.device.type),
        max_pass_tokens=config.train.max_pass_tokens or MAX_PASS_TOKENS[accelerator.device.type != "cpu"],
    )
    state = _restore(run_dir, state, objective, optimizer, accelerator, seed=config.seed)
    objective = accelerator.prepare(objective)
    _require_steps_left(plan, state, config)

    def evaluate() -> float:
        return held_out_loss(objective, held_out, accelerator, batch_size=config.train.eval_batch_size)

    training = Training(
        config=replace(config, optim=optim),
        run_dir=run_dir,
        accelerator=accelerator,
        objective=objective,
        optimizer=optimizer,
        dataset=dataset,
        plan=plan,
        max_pass_tokens=state.max_pass_tokens,
        sinks=open_sinks(config, run_dir, keep_steps=state.step) if accelerator.is_main_process else [],
        evaluate=evaluate,
    )
    if accelerator.is_main_process:  # last, so that a folder with a config is a run that can be resumed
        save_config(config, run_dir / "config.yaml")
    return _Run(training, peft_model, tokenizer, held_out, held_out_rows, state)


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


def _restore(
    run_dir: Path,
    state: TrainState,
    objective: NextTokenLoss,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    *,
    seed: int,
) -> TrainState:
    """Seed the random generators, then go on from the newest checkpoint if there is one."""
    torch.manual_seed(seed + accelerator.process_index)
    found = checkpoints(run_dir)
    if not found:
        return state
    state = load_checkpoint(found[-1], objective, optimizer, accelerator, expected=state)
    log.info(
        "resume   %s, step %d (with other train.max_steps or epochs the schedule is that of the new length)",
        run_dir,
        state.step,
    )
    return state


def _data_sha256(*datasets: Dataset) -> str:
    """A hash of all tokens and labels: it changes with the data, the tokenizer, the template and the cut."""
    digest = hashlib.sha256()
    for dataset in datasets:
        for rows in dataset.with_format("numpy").iter(batch_size=1024):
            for column in ("input_ids", "labels"):
                digest.update(np.concatenate(rows[column]).astype(np.int64))
    return digest.hexdigest()


def _require_positions(model: PreTrainedModel, config: Config) -> None:
    """Rows must not be longer than the model's positions reach."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    require(
        limit is None or config.data.max_seq_len <= limit,
        f"data.max_seq_len={config.data.max_seq_len} exceeds the model's {limit} positions; use {limit} or less",
    )


def _require_steps_left(plan: BatchPlan, state: TrainState, config: Config) -> None:
    """A resumed run cannot end before its checkpoint."""
    require(
        state.step <= plan.num_steps,
        f"train.max_steps={config.train.max_steps}, train.epochs={config.train.epochs} end at step {plan.num_steps}, "
        f"before the checkpoint's step {state.step}; give more, or start a new run without resume",
    )


def _require_disk(run_dir: Path, objective: NextTokenLoss, *, keep: int) -> None:
    """Checkpoints hold the trained weights and two moments; they must fit before training starts."""
    trained_bytes = sum(p.numel() * p.element_size() for p in objective.parameters() if p.requires_grad)
    needed, free = 3 * trained_bytes * (keep + 1) + trained_bytes, shutil.disk_usage(run_dir).free
    require(
        free >= needed,
        f"output_dir={run_dir} has {free / 1e9:.2f} GB free; checkpoints and export need {needed / 1e9:.2f} GB. "
        "Free some, lower train.keep_checkpoints, or choose another output_dir",
    )


def _export(run: _Run) -> dict[str, Path]:
    """Write the exports of `export.formats`; format -> folder."""
    training = run.training
    folders = {name: training.run_dir / "export" / name for name in training.config.export.formats}
    if training.accelerator.is_main_process:
        quantizer = next(m.quantizer for m in run.model.modules() if isinstance(m, QuantLinear))
        for folder in folders.values():
            write_adapter(run.model, run.tokenizer, folder, quantizer=quantizer, base_sha256=run.state.base_sha256)
    return folders


def _perplexity(loss: float) -> float:
    """exp(loss), infinite where a float64 cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def _metrics(run: _Run, *, eval_loss: float, wall_s: float) -> dict[str, Any]:
    """The content of metrics.json: losses in nats a target token, times in seconds."""
    state = run.state
    return {
        "steps": state.step,
        "wall_s": wall_s,
        "eval_loss_base": state.eval_loss_base,
        "eval_loss": eval_loss,
        "perplexity_base": _perplexity(state.eval_loss_base),
        "perplexity": _perplexity(eval_loss),
        "eval_rows": len(run.held_out),
        "eval_tokens": sum(num_targets(torch.tensor(labels[1:])) for labels in run.held_out["labels"]),
        "tokens": state.tokens,
        "tokens_per_s": state.tokens / state.train_s,
        "peak_memory_bytes": peak_memory_bytes(),
    }
