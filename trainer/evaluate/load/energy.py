"""Energy of this machine during a point, where it can be read: GPUs by nvidia-smi, processors by RAPL.

Both are the whole machine's, what runs beside the server and idling included. Without a reading there is no figure:
an estimate from a data sheet would be one of the data sheet.
"""

import asyncio
import contextlib
import shutil
import time
from pathlib import Path

RAPL = Path("/sys/class/powercap")
LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
PERIOD_MS = 100


class EnergyMeter:
    """Joules between entry and exit: `async with EnergyMeter() as meter`, then `meter.joules`.

    joules  source -> joules; empty where nothing is readable
    """

    def __init__(self, *, enabled: bool = True, rapl: Path = RAPL) -> None:
        self.joules: dict[str, float] = {}
        self._zones = _zones(rapl) if enabled else []
        self._smi = shutil.which("nvidia-smi") if enabled else None
        self._powers: list[tuple[float, float]] = []
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task | None = None
        self._before: list[int] = []

    async def __aenter__(self) -> "EnergyMeter":
        self._before = [_microjoules(zone / "energy_uj") for zone in self._zones]
        if self._smi:
            await self._start_smi(self._smi)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._zones:
            self.joules["RAPL, processor packages"] = sum(map(_grown, self._zones, self._before)) / 1e6
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            await self._task
            if len(self._powers) > 1:
                self.joules["nvidia-smi, all GPUs"] = _integral(self._powers)

    async def _start_smi(self, path: str) -> None:
        command = (path, "--query-gpu=power.draw", "--format=csv,noheader,nounits", f"--loop-ms={PERIOD_MS}")
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            self._process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=null)
        except OSError:
            return
        self._task = asyncio.create_task(self._read_powers())

    async def _read_powers(self) -> None:
        """Watts of all GPUs at each moment; one line a GPU, those of one reading come at once."""
        while line := await self._process.stdout.readline():
            now = time.perf_counter()
            with contextlib.suppress(ValueError):  # "[N/A]": this GPU does not tell
                watts = float(line)
                if self._powers and now - self._powers[-1][0] < PERIOD_MS / 3000:
                    self._powers[-1] = (self._powers[-1][0], self._powers[-1][1] + watts)
                else:
                    self._powers.append((now, watts))


def _zones(rapl: Path) -> list[Path]:
    """Readable packages; their parts (cores, memory) are in them."""
    zones = [zone for zone in sorted(rapl.glob("intel-rapl:*")) if zone.name.count(":") == 1]
    return [zone for zone in zones if _readable(zone / "energy_uj")]


def _readable(path: Path) -> bool:
    try:
        _microjoules(path)
    except (OSError, ValueError):
        return False
    return True


def _microjoules(path: Path) -> int:
    return int(path.read_text())


def _grown(zone: Path, before: int) -> int:
    """The counter starts anew at its range."""
    after = _microjoules(zone / "energy_uj")
    return after - before if after >= before else after - before + _microjoules(zone / "max_energy_range_uj")


def _integral(powers: list[tuple[float, float]]) -> float:
    steps = zip(powers, powers[1:], strict=False)
    return sum((after - before) * (watts + watts_after) / 2 for (before, watts), (after, watts_after) in steps)
