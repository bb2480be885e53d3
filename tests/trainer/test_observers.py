"""Observers against numpy, and what makes them exact: steps cut differently, processes, a resumed checkpoint."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.qat.observers import NUM_BINS, Observer, ObserverKind, ObserverSettings

KINDS = list(ObserverKind)


def inputs(step: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 64, generator=generator) * spread * (1 + step / 4)


def observed(observer: Observer, num_steps: int = 5, *, passes: int = 1, first: int = 0) -> Observer:
    for step in range(first, num_steps):
        for part in inputs(step).chunk(passes):
            observer.observe(part)
        observer.commit()
    return observer


def magnitudes(num_steps: int = 5) -> np.ndarray:
    return np.abs(np.concatenate([inputs(step).numpy().ravel() for step in range(num_steps)]))


def test_minmax_is_the_largest_of_all() -> None:
    observer = observed(Observer(ObserverSettings(ObserverKind.minmax)))
    assert observer.absmax().item() == magnitudes().max()
    assert observer.scale().item() == np.float32(magnitudes().max()) / np.float32(127)


def test_moving_average_starts_at_the_first_step() -> None:
    observer = observed(Observer(ObserverSettings(momentum=0.25)))
    want = np.abs(inputs(0).numpy()).max()
    for step in range(1, 5):
        want = want + np.float32(0.25) * (np.abs(inputs(step).numpy()).max() - want)
    assert observer.absmax().item() == pytest.approx(want, rel=1e-6)  # four float32 sums


@pytest.mark.parametrize("percentile", [50.0, 99.0, 99.9, 100.0])
def test_percentile_is_numpys_up_to_a_bin(percentile: float) -> None:
    observer = observed(Observer(ObserverSettings(ObserverKind.percentile, percentile=percentile)))
    want = np.percentile(magnitudes(), percentile, method="inverted_cdf")
    width = observer.width.item()
    assert width <= 2 * magnitudes().max() / NUM_BINS  # bins are no coarser than twice the finest that hold all
    assert want <= observer.absmax().item() <= want + width


def test_mse_is_the_best_clip_up_to_its_grid() -> None:
    """A normal input with one outlier at 40 sigma: clipping it costs less than rounding the rest 10 times coarser."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    x[3, 5] = 40.0
    observer = Observer(ObserverSettings(ObserverKind.mse))
    observer.observe(x)
    values = x.double().abs().numpy().ravel()

    def error(clip: float) -> float:
        step = clip / 127
        return float(np.square(np.clip(np.round(values / step), None, 127) * step - values).sum())

    candidates = np.linspace(1, 40, 118)
    best = min(map(error, candidates))
    # Bins of 40 / 2048 to 80 / 2048 blur each value by up to 0.02 and clips are 1/128 of the range apart: 0.3.
    assert error(observer.absmax().item()) <= 1.1 * best
    assert error(40.0) > 1.3 * best


def test_counts_are_exact_in_any_order() -> None:
    """A width that doubled on the way holds the counts that the final width would have counted."""
    one, other = (Observer(ObserverSettings(ObserverKind.mse)) for _ in range(2))
    parts = [inputs(0, 0.01), inputs(1, 1.0), inputs(2, 100.0)]
    for part in parts:
        one.observe(part)
    for part in reversed(parts):
        other.observe(part)
    for observer in (one, other):
        observer.commit()
    assert one.width == other.width and torch.equal(one.counts, other.counts)
    assert one.counts.sum() == sum(part.numel() for part in parts)
    want, _ = np.histogram(torch.cat(parts).abs().numpy(), NUM_BINS, (0, NUM_BINS * one.width.item()))
    assert (one.counts.numpy() == want).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_may_be_cut_into_passes(kind: ObserverKind) -> None:
    whole, cut = (observed(Observer(ObserverSettings(kind, momentum=0.1)), passes=n) for n in (1, 3))
    assert all(torch.equal(a, b) for a, b in zip(whole.buffers(), cut.buffers(), strict=True))
    assert whole.absmax() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(kind: ObserverKind) -> None:
    settings = ObserverSettings(kind, momentum=0.1)
    whole, first, second = observed(Observer(settings)), observed(Observer(settings), 2), Observer(settings)
    second.load_state_dict(first.state_dict())
    observed(second, 5, first=2)
    assert all(torch.equal(a, b) for a, b in zip(whole.buffers(), second.buffers(), strict=True))
    assert whole.scale() == second.scale() != first.scale()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_zeros_and_values_that_are_no_numbers(kind: ObserverKind) -> None:
    observer = Observer(ObserverSettings(kind))
    assert observer.absmax() == 0 and observer.scale() == 1
    for x in (torch.zeros(3, 4), torch.empty(0, 4), torch.tensor([float("nan"), float("inf")])):
        observer.observe(x)
        observer.commit()
    assert observer.scale() == 1
    observer.observe(torch.tensor([[1.0, float("nan"), -3.0]]))
    assert 2.9 < observer.absmax() <= 3.01  # up to a bin of 3/1024


PROCESSES = """
import sys, torch, torch.distributed as dist
from trainer.qat.observers import Observer, ObserverSettings
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
for kind in ("minmax", "moving_average", "percentile", "mse"):
    observer, alone = (Observer(ObserverSettings(kind, momentum=0.25)) for _ in range(2))
    reduce = dist.is_initialized
    for step in range(3):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)) * (1 + 10 * step)
        observer.observe(x[rank::2])
        observer.commit()
        alone.observe(x)
        dist.is_initialized = lambda: False
        alone.commit()
        dist.is_initialized = reduce
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, observer.state_dict()[name]), (kind, name)
dist.destroy_process_group()
"""


def test_two_processes_know_what_one_knows(tmp_path) -> None:
    command = [sys.executable, "-c", PROCESSES]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE) for rank in (0, 1)
    ]
    errors = [process.communicate()[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"momentum": 0.0}, "observer.momentum=0.0; use a number above 0, at most 1"),
        ({"percentile": 100.5}, "observer.percentile=100.5; use a number above 0, at most 100"),
        ({"kind": "median"}, "median"),
    ],
)
def test_bad_settings_are_named(settings: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ObserverSettings(**settings)
