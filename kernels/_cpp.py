"""C++ kernels, compiled on first use, and the choice between implementations.

A file `cpp/<name>.cpp` has a plain C interface and no torch headers, so g++ or clang++ builds it in about a second,
for exactly the processor it will run on. The result lies in `$LOWBIT_CACHE/kernels` (default `~/.cache/lowbit/kernels`,
mode 0700) under a hash of source, flags, compiler and processor, is written atomically under a file lock, and is
loaded with ctypes. Without a compiler the torch reference runs and one log line says so.

The surprising thing: the library is linked against the OpenMP runtime that torch itself loaded. A second runtime would
bring a second pool of threads that fights the first for the same cores.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainer.kernels._triton import HAS_TRITON

IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")
SOURCE_DIR = Path(__file__).parent / "cpp"
# No contraction: a fused multiply-add would round differently from the torch reference.
_X86 = platform.machine() in ("x86_64", "AMD64")
# GCC 12 moves pairs of integers through MMX registers, and leaves the x87 unit, which they are part of, full: the next
# long double or fmod of the thread, numpy's say, was nan.
BASE_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fopenmp", *(("-mno-mmx",) if _X86 else ()))
NATIVE_FLAGS = ("-march=native",) if _X86 else ("-mcpu=native",)

logger = logging.getLogger(__name__)


def choose(name: str, device_type: str) -> str:
    """The implementation that runs op file `name` on a device: "reference", "cpu" or "triton".

    `LOWBIT_KERNELS` forces one of IMPLEMENTATIONS; auto takes C++ on CPUs (the reference where it cannot be built)
    and Triton on GPUs.
    raises  ValueError if LOWBIT_KERNELS is unknown or cannot run on this device
    """
    forced = os.environ.get("LOWBIT_KERNELS", "auto")
    if forced not in IMPLEMENTATIONS:
        raise ValueError(f"LOWBIT_KERNELS={forced} is unknown; use one of {', '.join(IMPLEMENTATIONS)}")
    if forced == "reference":
        return "reference"
    if device_type != "cpu":
        if forced == "cpu":
            raise ValueError(f"LOWBIT_KERNELS=cpu cannot run on a {device_type} tensor; use auto, triton or reference")
        return _triton_or_reference(device_type)
    if forced == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("LOWBIT_KERNELS=triton cannot run on a cpu tensor; set TRITON_INTERPRET=1, or use auto")
        return "triton"
    if load(name) is not None:
        return "cpu"
    if forced == "cpu":
        raise ValueError(f"LOWBIT_KERNELS=cpu, but kernels/cpp/{name}.cpp could not be built (see the log); use auto")
    return "reference"


@functools.cache
def _triton_or_reference(device_type: str) -> str:
    if HAS_TRITON:
        return "triton"
    logger.warning("triton is not installed: the slower torch reference runs on %s; pip install triton", device_type)
    return "reference"


@functools.cache
def load(name: str, flags: tuple[str, ...] | None = None) -> ctypes.CDLL | None:
    """The library built from `cpp/<name>.cpp`, or None, after one log line, where it cannot be built.

    flags  processor flags instead of the native ones, e.g. ("-march=haswell",)
    """
    try:
        return ctypes.CDLL(str(_build(SOURCE_DIR / f"{name}.cpp", NATIVE_FLAGS if flags is None else flags)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "kernels/cpp/%s.cpp: %s. The slower torch reference runs instead; install g++ or clang++ (Debian: apt "
            "install g++), name one in CXX, or move the cache with LOWBIT_CACHE.",
            name,
            _reason(error),
        )
        return None


def cache_dir() -> Path:
    """`$LOWBIT_CACHE/kernels` or `~/.cache/lowbit/kernels`, private to this user.

    raises  PermissionError if the folder belongs to someone else: code is loaded from it
    """
    path = Path(os.environ.get("LOWBIT_CACHE") or Path.home() / ".cache" / "lowbit") / "kernels"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"cache folder {path} belongs to another user")
    path.chmod(0o700)
    return path


def _build(source: Path, flags: tuple[str, ...]) -> Path:
    if os.name != "posix":
        raise OSError(f"C++ kernels are not built on {platform.system()}")
    compiler = _compiler()
    command = [*compiler, *BASE_FLAGS, *flags]
    openmp = _torch_openmp("clang" in _version(compiler))
    sources = [path.read_text() for path in (source, *sorted(SOURCE_DIR.glob("*.h")))]
    key = "\0".join([*sources, *command, *openmp, _version(compiler), _processor()])
    library = cache_dir() / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.so"
    if not library.exists():
        with _lock(library.with_suffix(".lock")):
            if not library.exists():
                _compile(command, openmp, source, library)
    return library


def _compile(command: list[str], openmp: list[str], source: Path, library: Path) -> None:
    """Compile beside the final place and rename, so that a reader never sees half a file."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built_object, built = f"{folder}/{source.stem}.o", f"{folder}/{source.stem}.so"
        _run([*command, "-c", str(source), "-o", built_object])
        # With torch's runtime named as a file, -fopenmp must not add the compiler's own at link time.
        link = [flag for flag in command if not (openmp and flag == "-fopenmp")]
        _run([*link, "-shared", built_object, *openmp, "-o", built])
        os.replace(built, library)


def _compiler() -> list[str]:
    if os.environ.get("CXX"):
        command = shlex.split(os.environ["CXX"])
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(f"CXX={os.environ['CXX']} is not a program")
        return command
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise FileNotFoundError("no C++ compiler found")


@functools.cache
def _version_of(command: tuple[str, ...]) -> str:
    return _run([*command, "--version"])


def _version(command: list[str]) -> str:
    return _version_of(tuple(command))


def _torch_openmp(clang: bool) -> list[str]:
    """Link arguments for the OpenMP runtime inside torch's wheel; empty where torch uses the system's own."""
    folder = Path(torch.__file__).parent / "lib"
    patterns = ("libomp.*", "libiomp5.*") if clang else ("libgomp.so*", "libgomp-*.so*")
    found = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return [str(found[0]), f"-Wl,-rpath,{folder}"] if found else []


@functools.cache
def _processor() -> str:
    """What -march=native depends on: model and feature flags; the home folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    import fcntl  # not on Windows, where _build has refused already

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
        return f"{shlex.join(error.cmd[:1])} failed: {lines[0] if lines else f'exit status {error.returncode}'}"
    return str(error)
