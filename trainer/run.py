"""A run from config to export: prepare, train, evaluate, export, report."""

import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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

from trainer.architecture import base_model
from trainer.checkpoint import TrainState, checkpoints, load_checkpoint
from trainer.compose import load_config, save_config
from trainer.config import Codebook, Config, LoraInit, UserError, Weights, require
from trainer.data.chat import tokenize_rows
from trainer.data.formats import Row, load_rows
from trainer.data.loader import BatchPlan
from trainer.evaluate.perplexity import held_out_loss
from trainer.evaluate.report import print_report
from trainer.evaluate.samples import Sample, sample_answers
from trainer.export.adapter import describe_method, write_adapter, write_model_card
from trainer.export.base_codes import FILE_NAME as BASE_CODES
from trainer.export.base_codes import load_base_codes, write_base_codes
from trainer.export.merged import export_bytes, merged_dtype, write_merged
from trainer.export.merged_4bit import write_merged_4bit
from trainer.export.merged_card import write_merged_card
from trainer.kernels._cpp import choose
from trainer.linear import pack_nearest, weights_sha256
from trainer.loftq import Loftq, measure_input_scales
from trainer.loop import Training, TrainingDiverged, train
from trainer.lora import Factors, attach_lora
from trainer.lora_init import (
    initialize_eva,
    load_directions,
    load_factors,
    pack_residual,
    principal_factors,
    restore_eva,
    save_factors,
)
from trainer.master_weights import with_master_weights
from trainer.metrics import open_sinks, peak_memory_bytes
from trainer.model import load_model, prepare_model
from trainer.objective import NextTokenLoss, num_targets
from trainer.optim import Optimizer, build_optimizer, default_learning_rate, require_device

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
    model: PeftModel | PreTrainedModel
    """With its adapter, or the model itself where every weight is trained."""
    tokenizer: PreTrainedTokenizerBase
    held_out: Dataset
    held_out_rows: list[Row]
    state: TrainState


def finetune(config: Config) -> Result:
    """Fine-tune as `config` says (from `load_config`); returns figures and folders.

    raises  UserError for what the user can mend, TrainingDiverged, Interrupted (a checkpoint is written)
    """
    began = time.monotonic()
    accelerator = _accelerator()
    run_dir = _open_run_dir(config, accelerator)
    with _only_writer(run_dir, accelerator):
        run = _prepare(config, run_dir, accelerator)
        run.state.wall_s += time.monotonic() - began
        try:
            return _train_and_finish(run)
        finally:
            for sink in run.training.sinks:
                sink.close()


def _accelerator() -> Accelerator:
    on_cpu = torch.backends.mps.is_available() and not torch.cuda.is_available()  # float64 sums do not exist on mps
    return Accelerator(cpu=on_cpu, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)])


def export_run(run: str, *overrides: str) -> dict[str, Path]:
    """Write exports from the newest checkpoint of a run, finished or stopped; nothing is trained.

    run        the run folder, or `latest`
    overrides  `export.formats=[merged]` and other keys of `export`, as on the command line
    returns    format -> folder, in <run folder>/export
    raises     UserError if the run has no checkpoint, or if its base or data are no longer what they were
    """
    config = load_config(f"resume={run}", *overrides)
    accelerator, run_dir = _accelerator(), Path(config.resume)
    require(bool(checkpoints(run_dir)), f"{run_dir} holds no checkpoint to export; let it train: resume={run_dir}")
    with _only_writer(run_dir, accelerator):
        prepared = _prepare(config, run_dir, accelerator, to_export=True)
        exports = _export(prepared)
        prepared.state.eval_loss_base = prepared.state.eval_loss_base or math.nan
        metrics = _metrics(prepared, eval_loss=prepared.training.evaluate(), wall_s=prepared.state.wall_s)
        _write_cards(exports, config, metrics)
    return exports


def _train_and_finish(run: _Run) -> Result:
    """Train, export, evaluate, report."""
    state, training, config = run.state, run.training, run.training.config
    began = time.monotonic()
    if state.eval_loss_base is None:
        with run.model.disable_adapter() if isinstance(run.model, PeftModel) else nullcontext():
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
        _write_cards(exports, config, metrics)
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


def _prepare(config: Config, run_dir: Path, accelerator: Accelerator, *, to_export: bool = False) -> _Run:
    """Everything up to the first step: model packed, adapter attached, data tokenized, checkpoint restored.

    to_export  leave config.yaml and the metrics of the run as they are
    """
    if not accelerator.is_main_process:
        logging.getLogger("trainer").setLevel(logging.WARNING)
    require_device(config.optim, accelerator.device)
    rows, held_out_rows = load_rows(config.data, config.seed)
    model, tokenizer = load_model(config.model)
    _require_positions(model, config)
    dataset = tokenize_rows(rows, tokenizer, config.data.max_seq_len)
    held_out = tokenize_rows(held_out_rows, tokenizer, config.data.max_seq_len)
    start = _pack(model, dataset, config, run_dir, accelerator)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if config.train.weights is Weights.lora:
        token_ids = tokenizer.convert_tokens_to_ids(config.model.add_tokens)
        _warn_of_unseen(dict(zip(config.model.add_tokens, token_ids, strict=True)), dataset)
        trained = attach_lora(model, config.lora, seed=config.seed, start=start, token_ids=token_ids)
        trained.to(accelerator.device)
        if config.lora.init is LoraInit.eva:
            _start_from_activations(trained, dataset, config, run_dir, accelerator)
    else:
        trained = model.requires_grad_(True).to(accelerator.device)
    objective = NextTokenLoss(
        trained, decoded_bytes=config.train.decoded_mb << 20, neftune_alpha=config.train.neftune_alpha
    )
    optim = replace(config.optim, lr=config.optim.lr or _default_learning_rate(model, config))
    optimizer = with_master_weights(build_optimizer(objective, optim))
    _require_disk(
        run_dir, objective, keep=config.train.keep_checkpoints, exports_bytes=export_bytes(model, config.export)
    )
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
        base_sha256=weights_sha256(trained),
        data_sha256=_data_sha256(dataset, held_out),
        device=accelerator.device.type,
        kernels=choose("codebook4", accelerator.device.type),
        max_pass_tokens=config.train.max_pass_tokens or MAX_PASS_TOKENS[accelerator.device.type != "cpu"],
    )
    state = _restore(run_dir, state, objective, optimizer, accelerator, seed=config.seed)
    objective = accelerator.prepare(objective)
    _require_steps_left(plan, state, config)
    writes = accelerator.is_main_process and not to_export

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
        sinks=open_sinks(config, run_dir, keep_steps=state.step) if writes else [],
        evaluate=evaluate,
    )
    if writes:  # last, so that a folder with a config is a run that can be resumed
        save_config(config, run_dir / "config.yaml")
    return _Run(training, trained, tokenizer, held_out, held_out_rows, state)


def _pack(
    model: PreTrainedModel, dataset: Dataset, config: Config, run_dir: Path, accelerator: Accelerator
) -> Factors | None:
    """Pack the base; returns where the adapter starts, if not plain.

    One process of a new LoftQ run chooses codes and factors; the others, and a resumed run, read them.
    """
    with accelerator.main_process_first():
        if not config.loftq.iterations:
            start = _principal_factors(model, config, run_dir, accelerator)
            if config.quant.codebook is not Codebook.none:
                prepare_model(
                    model, config.quant, pack=pack_nearest if start is None else pack_residual(start, config.lora)
                )
                if start is not None and accelerator.is_main_process:
                    write_base_codes(model, start, run_dir)
            return start
        if checkpoints(run_dir) or not accelerator.is_main_process:
            prepare_model(model, config.quant)
            if (run_dir / BASE_CODES).is_file():
                load_base_codes(model, run_dir)
            return load_factors(run_dir)
        rows = dataset[: config.loftq.calibration_rows]["input_ids"]
        loftq = Loftq(config.loftq, config.lora, measure_input_scales(model, rows), accelerator.device)
        prepare_model(model, config.quant, pack=loftq)
        loftq.finish()
        loftq.write_report(run_dir / "loftq.json")
        write_base_codes(model, loftq.changed, run_dir)
        save_factors(run_dir, loftq.factors)
        return loftq.factors


def _principal_factors(
    model: PreTrainedModel, config: Config, run_dir: Path, accelerator: Accelerator
) -> Factors | None:
    """What PiSSA or OLoRA takes out of the weights: computed once in a run, then read; None for other starts."""
    if config.lora.init not in (LoraInit.pissa, LoraInit.olora):
        return None
    if checkpoints(run_dir) or not accelerator.is_main_process:
        return load_factors(run_dir)
    factors = principal_factors(model, config.lora)
    save_factors(run_dir, factors)
    return factors


def _start_from_activations(
    model: PeftModel, dataset: Dataset, config: Config, run_dir: Path, accelerator: Accelerator
) -> None:
    """EVA's ranks and directions: computed once in a run, then read."""
    with accelerator.main_process_first():
        if accelerator.is_main_process and not checkpoints(run_dir):
            save_factors(run_dir, initialize_eva(model, dataset, seed=config.seed))
        restore_eva(model, load_directions(run_dir))


def _warn_of_unseen(tokens: dict[str, int], dataset: Dataset) -> None:
    """Say which added tokens no training row holds: their rows stay the mean of the others."""
    unseen = set(tokens.values())
    for row in dataset["input_ids"] if unseen else ():
        unseen -= set(row)
    if unseen:
        names = [token for token, index in tokens.items() if index in unseen]
        log.warning("model.add_tokens has %s, which no training row holds; nothing is learned about them", names)


def _default_learning_rate(model: PreTrainedModel, config: Config) -> float:
    """Where optim.lr is null; LoRA's best rate is ten times that of all weights (LoRA Without Regret, 2025)."""
    lr = default_learning_rate(config.optim.name, model.config.get_text_config().hidden_size)
    return lr if config.train.weights is Weights.lora else lr / 10


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
    optimizer: Optimizer,
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


def _require_disk(run_dir: Path, objective: NextTokenLoss, *, keep: int, exports_bytes: int) -> None:
    """Checkpoints hold the trained weights and up to three tensors of their size; they must fit before training."""
    trained_bytes = sum(p.numel() * max(4, p.element_size()) for p in objective.parameters() if p.requires_grad)
    needed, free = 4 * trained_bytes * (keep + 1) + trained_bytes + exports_bytes, shutil.disk_usage(run_dir).free
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
        for name, folder in folders.items():
            _write_export(run, name, folder)
    return folders


def _write_export(run: _Run, name: str, folder: Path) -> None:
    config = run.training.config
    provenance = {
        "base": base_model(run.model).name_or_path,
        "base_sha256": run.state.base_sha256,
        "step": run.state.step,
        "method": describe_method(config),
    }
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
            rows = [(torch.tensor(row["input_ids"]), torch.tensor(row["labels"])) for row in run.held_out]
            merge = write_merged_4bit(run.model, run.tokenizer, folder, rows, provenance=provenance)
            log.warning(
                "merged_4bit: %.1f %% of the update is left after rounding to 4 bits again; KL to the unmerged model "
                "%.3g nats a token, another likeliest token at %.1f %% of %d held-out positions",
                *(100 * merge.survival.overall, merge.kl, 100 * merge.flips, merge.num_tokens),
            )


def _write_cards(exports: dict[str, Path], config: Config, metrics: dict[str, Any]) -> None:
    for name, folder in exports.items():
        write_card = write_model_card if name == "adapter" else write_merged_card
        write_card(folder, config, metrics)


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
