"""Tiles of the Triton kernels: those measured on this GPU where somebody did, else the constants of the kernel files.

    tile = tiles("int4_linear", x.device, {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128}, itemsize=2)
    kernel[grid(tile)](..., **tile)

tuned.json beside this file holds what was measured: architecture -> "op name=value ..." -> entry. An entry has its
`source`, and `tiles`, which replace the default's where something is better. Entries without tiles whose source is
NOT_TIMED name the ops that nobody has timed there. `python scripts/gpu_report.py --tune` writes the entries of the GPU
that it runs on.

The surprising thing: what is looked up must never depend on the number of rows of a product. Tiles along the sum decide
the order of additions, and a row would get other bits in another batch.
"""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

TABLE_PATH = Path(__file__).parent / "tuned.json"
NOT_TIMED = "default, not timed"
ARCHITECTURES = ("sm_80", "sm_90", "gfx942")
Tiles = dict[str, int]
"""Constants of a kernel by name (BLOCK_M ...), and the options num_warps and num_stages of its launch."""


@functools.cache
def architecture(device: torch.device) -> str:
    """ "sm_90" or "gfx942"; the device's type where it is no GPU, as under Triton's interpreter."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def tiles(op: str, device: torch.device, default: Tiles, **bucket: int) -> Tiles:
    """The tiles of a launch.

    op       as in tuned.json
    default  what runs where nothing was measured: proved without spills by the tests that compile ahead of time
    bucket   what the best tiles depend on besides the device: itemsize, head_dim; never a number of rows
    returns  default, or a copy with the measured values in it
    """
    forced = _forced.get(op)
    if forced is not None:
        forced.asked.add(key(op, bucket))
        return {**default, **forced.tiles}
    measured = _measured(op, device, tuple(bucket.items()))
    return {**default, **measured} if measured else default


@functools.cache
def _measured(op: str, device: torch.device, bucket: tuple[tuple[str, int], ...]) -> Tiles | None:
    entry = table().get(architecture(device), {}).get(key(op, dict(bucket)), {})
    return entry.get("tiles")


@functools.cache
def table() -> dict[str, dict[str, dict]]:
    """tuned.json"""
    return json.loads(TABLE_PATH.read_text())


def key(op: str, bucket: dict[str, int]) -> str:
    """An entry's name: the op, then the bucket in order of its names."""
    return " ".join([op, *(f"{name}={value}" for name, value in sorted(bucket.items()))])


# ---- for the tuner


@dataclass(slots=True)
class Forced:
    """Tiles that an op must take now, and the entries that its launches asked for meanwhile."""

    tiles: Tiles
    asked: set[str]


_forced: dict[str, Forced] = {}


@contextmanager
def forced(op: str, candidate: Tiles) -> Iterator[Forced]:
    """Inside, every launch of op takes candidate over its default, whatever the table says."""
    _forced[op] = Forced(candidate, set())
    try:
        yield _forced[op]
    finally:
        del _forced[op]


def store(arch: str, entries: dict[str, dict], path: Path = TABLE_PATH) -> None:
    """Write measured entries of an architecture into the table; those of other ops and architectures stay.

    entries  key -> {"tiles": ..., "source": when, on what and how fast}, "tiles" left out where the default is best
    """
    known = json.loads(path.read_text()) if path.is_file() else {}
    mine = known.setdefault(arch, {})
    for name, entry in entries.items():
        mine.pop(name.partition(" ")[0], None)  # "not timed", which has no bucket
        mine[name] = entry
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    table.cache_clear()
    _measured.cache_clear()
