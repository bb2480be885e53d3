"""Checkpoints that are whole or absent.

    <run folder>/checkpoints/step_<n>/   trainable.safetensors   what is trained, float32
                                         optimizer.pt            the optimizer's state
                                         rng_<rank>.pt           each process's random generators
                                         data_<rank>.json        streaming: how far each process has read
                                         state.json              step and totals, base and data hashes

A checkpoint is written to a hidden folder beside its place, flushed to disk and renamed; one that a crash cut short
keeps the hidden name and is never picked up. Learning rate and the order of a table's
rows are functions of the step and need no file.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from trainer.config.errors import UserError, require
from trainer.qat.fake_quant import fake_quant_layers


@dataclass
class TrainState:
    """Where a run stands. `step` counts finished optimizer steps."""

    step: int = 0
    tokens: int = 0
    """Tokens trained on so far, padding not counted."""
    train_s: float = 0.0
    """Seconds spent in training steps so far."""
    wall_s: float = 0.0
    """Seconds since the run began, all its sessions added up."""
    eval_loss_base: float | None = None
    eval_base: dict[str, float] = field(default_factory=dict)
    """The base's other held-out figures, which preference methods and distillation have."""
    eval_loss_rounded: float | None = None
    """Quantization-aware training: the held-out loss of the base rounded to nearest."""
    eval_rounded: dict[str, float] = field(default_factory=dict)
    """Its other held-out figures, as in `eval_base`."""
    world_size: int = 1
    dtype: str = ""
    """The compute dtype; `model.dtype=auto` may choose another on another machine."""
    base_sha256: str = ""
    data_sha256: str = ""
    device: str = ""
    """The device type: cpu, cuda, ..."""
    kernels: str = ""
    """The implementation of the NF4 op: reference, cpu or triton."""
    max_pass_tokens: int = 0


def checkpoints(run_dir: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [path for path in (run_dir / "checkpoints").glob("step_*") if (path / "state.json").is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def save_checkpoint(
    run_dir: Path,
    state: TrainState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    *,
    keep: int,
    data_state: dict[str, Any] | None = None,
) -> Path:
    """Write the checkpoint of `state.step` and prune older ones, leaving `keep`; every process calls this.

    data_state  how far this process has read, where the step does not say it; see `steps.Steps.state`
    """
    folder = run_dir / "checkpoints"
    target, partial = folder / f"step_{state.step}", folder / f".step_{state.step}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    torch.save(_rng_state(accelerator.device), partial / f"rng_{accelerator.process_index}.pt")
    if data_state is not None:
        (partial / f"data_{accelerator.process_index}.json").write_text(json.dumps(data_state) + "\n")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        save_file(_trainable(model), partial / "trainable.safetensors")
        torch.save(optimizer.state_dict(), partial / "optimizer.pt")
        (partial / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
        for path in (*partial.iterdir(), partial):
            _flush(path)
        partial.rename(target)
        _flush(folder)
        for old in checkpoints(run_dir)[:-keep]:
            hidden = old.with_name(f".{old.name}.partial")  # a kill in mid-removal must not leave half of it
            old.rename(hidden)
            shutil.rmtree(hidden)
    accelerator.wait_for_everyone()
    return target


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator, *, expected: TrainState
) -> TrainState:
    """Put a checkpoint into model, optimizer and random generators; returns where the run stands.

    expected  what this run has; world size and hashes must equal the checkpoint's
    raises    UserError if base weights, data, processes or adapter are not those of the checkpoint
    """
    state = TrainState(**json.loads((path / "state.json").read_text()))
    for name, what in (
        ("base_sha256", "the base model's weights"),
        ("data_sha256", "the training or held-out data, the tokenizer or the chat template"),
        ("world_size", "the number of processes"),
        ("dtype", "the compute dtype (set model.dtype)"),
        ("device", "the device type"),
        ("kernels", "the kernel implementation (set LOWBIT_KERNELS, or install a compiler)"),
        ("max_pass_tokens", "train.max_pass_tokens"),
    ):
        now, then = getattr(expected, name), getattr(state, name)
        require(
            now == then,
            f"{path}: {what} changed since this checkpoint ({str(then)[:12]} then, {str(now)[:12]} now); "
            "restore it, or start a new run without resume",
        )
    _load_trainable(path / "trainable.safetensors", model)
    optimizer.load_state_dict(torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True))
    _restore_rng(torch.load(path / f"rng_{accelerator.process_index}.pt", weights_only=True), accelerator.device)
    return state


def load_data_state(path: Path, accelerator: Accelerator) -> dict[str, Any] | None:
    """How far this process had read at a checkpoint; None where the step says it."""
    file = path / f"data_{accelerator.process_index}.json"
    return json.loads(file.read_text()) if file.is_file() else None


def _trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in _changing(model).items()}


def _changing(model: nn.Module) -> dict[str, torch.Tensor]:
    """What training changes: parameters, and the ranges that layers observe."""
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    observed = {
        f"{name}.{key}": buffer for name, layer in fake_quant_layers(model) for key, buffer in layer.named_buffers()
    }
    return {**trained, **observed}


@torch.no_grad()
def _load_trainable(path: Path, model: nn.Module) -> None:
    saved, params = load_file(path), _changing(model)
    if saved.keys() != params.keys() or any(saved[name].shape != param.shape for name, param in params.items()):
        raise UserError(f"{path} holds other tensors than this run trains; resume with the config of that run")
    for name, param in params.items():
        param.copy_(saved[name])


def _rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def _restore_rng(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _flush(path: Path) -> None:
    """fsync a file or a folder (Linux and macOS; Windows cannot open folders and orders renames itself)."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
