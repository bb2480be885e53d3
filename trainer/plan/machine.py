"""The memory that this machine has left for a run."""

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """device   "cpu" or "cuda"

    name        processor or GPU
    available   bytes that a new process can have: of main memory, or of the GPU
    host        bytes of main memory that are available; what a GPU trains is loaded through it
    """

    device: str
    name: str
    available: int
    host: int


def this_machine() -> Machine:
    """What torch would use here: the first GPU if there is one, else the processor."""
    host = host_memory()
    if not torch.cuda.is_available():
        return Machine("cpu", platform.processor() or platform.machine(), host, host)
    free, _ = torch.cuda.mem_get_info()
    return Machine("cuda", torch.cuda.get_device_name(), free, host)


def host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes of main memory that are available: what the kernel can free counts, a container's limit as well.

    raises  OSError where the kernel does not tell
    """
    lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
    available = 1024 * int(lines["MemAvailable"].split()[0])
    limit, used = (_read(cgroup / name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else min(available, max(0, limit - used))


def _read(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None
