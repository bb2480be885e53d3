"""What every unit of the GPU report stands on: where it runs, how calls are timed, what a row is."""

import functools
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.kernels import _tuning

DTYPE = torch.bfloat16
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Relative error in the norm beside the reference on the same device. float32 sums of some thousand terms in another
order differ by less than 1e-5; a 16-bit result is rounded by up to 2^-9 and 2^-12, gradients several times."""
UNEQUAL = 1e30  # JSON has no infinity
FLUSH_BYTES = 512 << 20
"""Twice the largest last-level cache here (H200: 60 MB; MI300X: 256 MB)."""
WAIT_CYCLES = 2_000_000
"""1 ms of GPU time in which the launches of a call queue up: serving replays graphs, so they are not the kernel's."""
MATMUL_SIDE = 8192


class Limits(NamedTuple):
    """What the machine gives, measured in this run: bytes and operations a second."""

    copy: float
    bfloat16: float
    int8: float

    def rate(self, dtype: torch.dtype) -> float:
        return self.int8 if dtype == torch.int8 else self.bfloat16


class Target(NamedTuple):
    """A figure of a row and what it must reach."""

    figure: str
    value: float
    at_least: bool = True

    def __str__(self) -> str:
        return f"{self.figure} {'>=' if self.at_least else '<='} {self.value:g}"

    def is_met(self, row: dict) -> bool | None:
        figure = row[self.figure]
        return None if figure is None else figure >= self.value if self.at_least else figure <= self.value


@dataclass(frozen=True)
class Bench:
    """Where and how large everything runs."""

    device: torch.device
    quick: bool
    dry: bool
    limits: Limits | None = None

    def size(self, full: int, dry: int) -> int:
        return dry if self.dry else full

    def randn(self, *shape: int, dtype: torch.dtype = DTYPE, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * std).to(dtype)

    def layers(self) -> list[tuple[str, int, int]]:
        """Name, out_features, in_features of the layers that products are timed on."""
        if self.dry:
            return [("tiny", 96, 64)]
        full = [("8B gate", 14336, 4096), ("8B down", 4096, 14336), ("8B output", 4096, 4096), ("1B gate", 8192, 2048)]
        return full[:1] if self.quick else full

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


Rows = Iterator[dict]


# ---- timing and rows


@functools.cache
def flush_buffer(device: torch.device) -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)


def seconds(bench: Bench, function: Callable[[], object], *, total_s: float = 0.15) -> list[float]:
    """Times of calls of a function that reads its inputs from memory."""
    if bench.device.type == "cpu":
        began = time.perf_counter()
        function()
        return [time.perf_counter() - began] * 2
    for _ in range(2):  # compiles, and allocates as every later call does
        function()
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    repeats = min(30, max(5, int(total_s / (time.perf_counter() - began))))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in events:
        flush_buffer(bench.device).zero_()
        torch.cuda._sleep(WAIT_CYCLES)
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def row_of(work: str, shape: str = "", **figures: object) -> dict:
    """A row with nothing in the columns that are not given; exact: a result is judged, not a time."""
    row = dict.fromkeys(("ours", "peer", "peer_name", "ratio", "of_limit", "target", "met"))
    return {"work": work, "shape": shape, "unit": "", "note": "", "exact": False, **row, **figures}


def failed(work: str, note: str) -> dict:
    return row_of(work, met=False, note=note)


def judged(row: dict, *targets: Target) -> dict:
    """The row with its targets, and whether those that can be judged are met."""
    verdicts = [verdict for target in targets if (verdict := target.is_met(row)) is not None]
    return {**row, "target": ", ".join(map(str, targets)) or None, "met": all(verdicts) if verdicts else None}


Function = Callable[[], object]


def speed(
    bench: Bench,
    work: str,
    shape: str,
    ours: Function,
    peers: dict[str, Function] | None = None,
    *,
    moved: float = 0,
    operations: float = 0,
    rate: torch.dtype = DTYPE,
    targets: Iterable[Target] = (),
) -> Rows:
    """One row for each peer, or one row.

    moved       bytes that must be read and written
    operations  of products, at the rate of products of `rate`
    """
    times = seconds(bench, ours)
    median, by_memory = statistics.median(times), moved / bench.limits.copy
    by_products = operations / bench.limits.rate(rate)
    unit, amount = ("GB/s", moved / 1e9) if by_memory > by_products else ("TFLOP/s", operations / 1e12)
    fifths = statistics.quantiles(times, n=5)
    row = row_of(
        work, shape, ours=amount / median, unit=unit, of_limit=max(by_memory, by_products) / median,
        ours_us=1e6 * median, ours_us_p20_p80=[1e6 * fifths[0], 1e6 * fifths[3]],
    )  # fmt: skip
    if not peers:
        yield judged(row, *targets)
    for name, function in (peers or {}).items():
        try:
            peer = amount / statistics.median(seconds(bench, function))
            yield judged({**row, "peer": peer, "peer_name": name, "ratio": row["ours"] / peer}, *targets)
        except Exception as error:  # a peer that does not run here must not cost our row
            if not still_works(bench):
                raise
            yield judged({**row, "peer_name": name, "note": f"peer: {described(error)}"}, *targets)


def still_works(bench: Bench) -> bool:
    """Whether kernels still run: after an illegal access every later call of the process fails."""
    try:
        bench.synchronize()
        return bool(torch.ones(1, device=bench.device).item())
    except RuntimeError:
        return False


def free_memory(bench: Bench) -> None:
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


def described(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def machine(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.machine()}, dry run: no figure here means anything"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {_tuning.architecture(device)}"


def measure_limits(bench: Bench) -> Limits:
    source = bench.randn(bench.size(1 << 30, 1 << 10))
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / min(seconds(bench, lambda: target.copy_(source)))
    side = bench.size(MATMUL_SIDE, 32)
    a, b = bench.randn(side, side), bench.randn(side, side)
    products = 2 * side**3 / min(seconds(bench, lambda: a @ b))
    a, b = (torch.randint(-127, 127, (side, side), device=bench.device, dtype=torch.int8) for _ in range(2))
    try:
        integers = 2 * side**3 / min(seconds(bench, lambda: torch._int_mm(a, b.T)))
    except RuntimeError:  # not on every GPU
        integers = 2 * products
    return Limits(copy, products, integers)


def step_of(function: Callable[..., Tensor], *inputs: Tensor) -> Function:
    """Forward and backward with an incoming gradient that is made once."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    grad = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


def peak_bytes(bench: Bench, function: Function) -> float:
    """The most that a call allocates beside what is there; 0 on a CPU."""
    if bench.device.type == "cpu":
        return 0.0
    free_memory(bench)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


@functools.cache
def bitsandbytes() -> Any | None:
    try:
        import bitsandbytes
    except (ImportError, RuntimeError, OSError):  # its GPU library may not fit the driver
        return None
    return bitsandbytes


def distance(got: Tensor, want: Tensor) -> float:
    """Relative error in the norm; UNEQUAL where shapes differ or one is finite and the other not."""
    got, want = got.detach().double(), want.detach().double()
    finite = want.isfinite()
    if got.shape != want.shape or not torch.equal(got.isfinite(), finite):
        return UNEQUAL
    got, want = got[finite], want[finite]
    return ((got - want).norm() / want.norm().clamp(min=1e-30)).item()


def with_gradients(function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Outputs and the gradients of inputs, for one incoming gradient that depends on shapes only."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator(outputs[0].device).manual_seed(2)
    grads = [torch.randn(y.shape, generator=generator, device=y.device).to(y.dtype) for y in outputs]
    return *outputs, *torch.autograd.grad(outputs, leaves, grads)


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)
