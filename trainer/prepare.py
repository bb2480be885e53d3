"""Everything up to the first step: model packed, adapter attached, data tokenized, checkpoint restored."""

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.blockwise.prepare import prepare_scales
from trainer.checkpoint import TrainState, checkpoints, load_checkpoint, load_data_state
from trainer.compose import save_config
from trainer.config.errors import require
from trainer.config.schema import Config
from trainer.config.train import Weights
from trainer.data.steps import Steps
from trainer.distillation import DistillationLoss, LiveTeacher, copy_teacher
from trainer.evaluate.perplexity import held_out_figures
from trainer.export.merged import export_bytes
from trainer.kernels._cpp import choose
from trainer.linear import weights_sha256
from trainer.loop import Training
from trainer.master_weights import with_master_weights
from trainer.metrics import open_sinks
from trainer.model import load_model
from trainer.objective import NextTokenLoss
from trainer.optim import Optimizer, build_optimizer, default_learning_rate, require_device
from trainer.preference import Objective, build_objective
from trainer.prepare_data import PreparedData, open_data, prepare_data
from trainer.prepare_weights import prepare_weights
from trainer.qat.packed_model import packed_layers
from trainer.qat.prepare import QatSchedule, calibrate, layer_schemes, require_kv_cache
from trainer.reference import with_reference
from trainer.teacher_cache import TeacherCache, cache_teacher, with_places

log = logging.getLogger(__name__)

MAX_PASS_TOKENS = (2048, 16384)
"""Padded tokens of one pass on CPUs and on GPUs, unless `train.max_pass_tokens` is set; docs/decisions.md has the
measurement behind the first, the second is a guess that fills a GPU and fits beside a 7B model."""
SCALES_LR = 2e-5
"""Where optim.lr is null and scales are trained: EfficientQAT's for 2 bits (arXiv:2407.11062, section 4.1)."""
CALIBRATION_ROWS = 32
"""Training rows from which ranges of static inputs start, unless `qat.calibration_rows` is set; training goes on."""


@dataclass
class PreparedRun:
    """A prepared run: the loop's part and what the end needs."""

    training: Training
    data: PreparedData
    model: PeftModel | PreTrainedModel
    """With its adapter, or the model itself where every weight is trained."""
    tokenizer: PreTrainedTokenizerBase
    state: TrainState
    qat: QatSchedule | None
    """Of quantization-aware training."""


def prepare_run(config: Config, run_dir: Path, accelerator: Accelerator, *, to_export: bool = False) -> PreparedRun:
    """Everything up to the first step: model packed, adapter attached, data tokenized, checkpoint restored.

    to_export  leave config.yaml and the metrics of the run as they are
    """
    if not accelerator.is_main_process:
        logging.getLogger("trainer").setLevel(logging.WARNING)
    require_device(config.optim, accelerator.device)
    opened = open_data(config, accelerator)
    model, tokenizer = load_model(config.model)
    _require_model(model, config)
    data = prepare_data(opened, tokenizer, config, run_dir, accelerator)
    if config.qat.enabled:
        config.qat.require_moments(max(1, data.num_steps))
    teacher = _teacher(model, [data.rows, data.held_out], config, accelerator) if config.distill.enabled else None
    if isinstance(teacher, TeacherCache):
        data.rows, data.held_out = with_places([data.rows, data.held_out])
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def figures_of(objective: nn.Module) -> dict[str, float]:
        return held_out_figures(objective, data.held_out, accelerator, batch_size=config.train.eval_batch_size)

    before = None
    if config.train.weights is Weights.scales:
        if config.blockwise.epochs and accelerator.is_main_process and not to_export:
            save_config(config, run_dir / "config.yaml")  # its finished blocks are what a resumed run goes on from
        before = prepare_scales(
            *(model, data.rows, config, run_dir, accelerator),
            max_pass_tokens=_max_pass_tokens(config, accelerator),
            measure=None
            if checkpoints(run_dir)
            else lambda student: figures_of(_objective(NextTokenLoss(student), teacher, config)),
        )
        trained = model.to(accelerator.device)
    else:
        trained = prepare_weights(model, tokenizer, data.rows, config, run_dir, accelerator)
    next_token = NextTokenLoss(
        trained, decoded_bytes=config.train.decoded_mb << 20, neftune_alpha=config.train.neftune_alpha
    )
    objective = _objective(next_token, teacher, config)
    optim = replace(config.optim, lr=config.optim.lr or _default_learning_rate(model, config))
    optimizer = with_master_weights(build_optimizer(objective, optim))
    _require_disk(
        run_dir, objective, keep=config.train.keep_checkpoints, exports_bytes=export_bytes(model, config.export)
    )
    state = _new_state(trained, data.sha256, config, accelerator)
    if config.preference.precompute:
        tables = {"train": data.rows, "held_out": data.held_out}
        tables = _with_reference(objective, tables, run_dir, accelerator, state)
        data.rows, data.held_out = tables["train"], tables["held_out"]
    steps = data.steps(accelerator)
    qat = None
    if config.qat.enabled:
        qat = QatSchedule.of(trained, config.qat, num_steps=max(1, steps.num_steps), seed=config.seed)
        _calibrate(objective, data.rows, config, run_dir, accelerator)
    if before is not None:
        state.eval_base, state.eval_rounded = before
        state.eval_loss_base, state.eval_loss_rounded = (figures.pop("loss") for figures in before)
    state = _restore(run_dir, state, objective, optimizer, accelerator, steps, seed=config.seed)
    objective = accelerator.prepare(objective)
    _require_steps_left(steps.num_steps, state, config)
    writes = accelerator.is_main_process and not to_export
    training = Training(
        config=replace(config, optim=optim),
        run_dir=run_dir,
        accelerator=accelerator,
        objective=objective,
        optimizer=optimizer,
        steps=steps,
        max_pass_tokens=state.max_pass_tokens,
        sinks=open_sinks(config, run_dir, keep_steps=state.step) if writes else [],
        evaluate=lambda: figures_of(objective),
        before_step=None if qat is None else qat.before_step,
        after_step=None if qat is None else qat.after_step,
    )
    if writes:  # last, so that a folder with a config is a run that can be resumed
        save_config(config, run_dir / "config.yaml")
    return PreparedRun(training, data, trained, tokenizer, state, qat)


def _require_model(model: PreTrainedModel, config: Config) -> None:
    """What settings ask of a model, before a teacher or blocks take hours."""
    require(
        not packed_layers(model),
        f"model.path={config.model.path} is packed: steps smaller than the grid of its codes would be lost; train from "
        "the 16-bit model that it was made from",
    )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    require(
        limit is None or config.data.max_seq_len <= limit,
        f"data.max_seq_len={config.data.max_seq_len} exceeds the model's {limit} positions; use {limit} or less",
    )
    if config.qat.enabled:
        layer_schemes(model, config.qat)


def _new_state(trained: nn.Module, data_sha256: str, config: Config, accelerator: Accelerator) -> TrainState:
    """A run before its first step, and what a checkpoint has to agree with."""
    return TrainState(
        world_size=accelerator.num_processes,
        dtype=str(trained.dtype).removeprefix("torch."),
        base_sha256=weights_sha256(trained),
        data_sha256=data_sha256,
        device=accelerator.device.type,
        kernels=choose("codebook4", accelerator.device.type),
        max_pass_tokens=_max_pass_tokens(config, accelerator),
    )


def _calibrate(
    objective: Objective | DistillationLoss, dataset: Dataset, config: Config, run_dir: Path, accelerator: Accelerator
) -> None:
    """Where ranges of static inputs start, in a new run."""
    if config.qat.kv_cache:
        require_kv_cache(objective)
    if not checkpoints(run_dir):
        calibrate(objective, _calibration_batches(objective, dataset, config, accelerator))
        objective.drain_metrics()  # what these rows measured is no figure of the run


def _calibration_batches(
    objective: Objective, dataset: Dataset, config: Config, accelerator: Accelerator
) -> Iterator[dict[str, Tensor]]:
    """The first training rows, a micro-step's at a time; processes share them, since observers add up what all saw."""
    ids, size = range(min(config.qat.calibration_rows or CALIBRATION_ROWS, len(dataset))), config.train.batch_size
    for start in ids[accelerator.process_index * size :: accelerator.num_processes * size]:
        yield objective.collate([dataset[i] for i in ids[start : start + size]], accelerator.device)


def _max_pass_tokens(config: Config, accelerator: Accelerator) -> int:
    return config.train.max_pass_tokens or MAX_PASS_TOKENS[accelerator.device.type != "cpu"]


def _teacher(
    model: PreTrainedModel, datasets: list[Dataset], config: Config, accelerator: Accelerator
) -> TeacherCache | LiveTeacher:
    """The 16-bit model before anything changes it: its answers on disk, or a copy that answers in each step."""
    if config.distill.top_k:
        max_pass_tokens = _max_pass_tokens(config, accelerator)
        return cache_teacher(
            model, datasets, config.distill, device=accelerator.device, max_pass_tokens=max_pass_tokens
        )
    teacher = copy_teacher(model, share_weights=config.train.weights is Weights.lora)
    return LiveTeacher(teacher.to(accelerator.device))


def _objective(
    next_token: NextTokenLoss, teacher: TeacherCache | LiveTeacher | None, config: Config
) -> Objective | DistillationLoss:
    """What is minimised, over the model of `next_token`."""
    if teacher is None:
        return build_objective(next_token, config.preference)
    return DistillationLoss(next_token, config.distill, teacher)


def _default_learning_rate(model: PreTrainedModel, config: Config) -> float:
    """Where optim.lr is null; LoRA's best rate is ten times that of all weights (LoRA Without Regret, 2025)."""
    if config.train.weights is Weights.scales:
        return SCALES_LR
    lr = default_learning_rate(config.optim.name, model.config.get_text_config().hidden_size)
    return lr if config.train.weights is Weights.lora else lr / 10


def _with_reference(
    objective: Objective, datasets: dict[str, Dataset], run_dir: Path, accelerator: Accelerator, state: TrainState
) -> dict[str, Dataset]:
    """The datasets with what the model, which no checkpoint has been put into yet, says of them."""
    hashes = {name: getattr(state, name) for name in ("base_sha256", "data_sha256", "dtype", "device", "kernels")}
    return with_reference(
        objective, datasets, run_dir, accelerator, max_pass_tokens=state.max_pass_tokens, hashes=hashes
    )


def _restore(
    run_dir: Path,
    state: TrainState,
    objective: Objective,
    optimizer: Optimizer,
    accelerator: Accelerator,
    steps: Steps,
    *,
    seed: int,
) -> TrainState:
    """Seed the random generators, then go on from the newest checkpoint if there is one."""
    torch.manual_seed(seed + accelerator.process_index)
    found = checkpoints(run_dir)
    if not found:
        return state
    state = load_checkpoint(found[-1], objective, optimizer, accelerator, expected=state)
    if (read := load_data_state(found[-1], accelerator)) is not None:
        steps.restore(read, state.step)
    log.info(
        "resume   %s, step %d (with other train.max_steps or epochs the schedule is that of the new length)",
        run_dir,
        state.step,
    )
    return state


def _require_steps_left(num_steps: int, state: TrainState, config: Config) -> None:
    """A resumed run cannot end before its checkpoint."""
    require(
        state.step <= num_steps,
        f"train.max_steps={config.train.max_steps}, train.epochs={config.train.epochs} end at step {num_steps}, "
        f"before the checkpoint's step {state.step}; give more, or start a new run without resume",
    )


def _require_disk(run_dir: Path, objective: Objective, *, keep: int, exports_bytes: int) -> None:
    """Checkpoints hold the trained weights and up to three tensors of their size; they must fit before training."""
    trained_bytes = sum(p.numel() * max(4, p.element_size()) for p in objective.parameters() if p.requires_grad)
    needed, free = 4 * trained_bytes * (keep + 1) + trained_bytes + exports_bytes, shutil.disk_usage(run_dir).free
    require(
        free >= needed,
        f"output_dir={run_dir} has {free / 1e9:.2f} GB free; checkpoints and export need {needed / 1e9:.2f} GB. "
        "Free some, lower train.keep_checkpoints, or choose another output_dir",
    )
