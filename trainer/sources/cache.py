"""The cache folder, and how a model gets into it exactly once.

`$LOWBIT_CACHE`, or `~/.cache/lowbit`:

    models/<name>/              a finished Hugging Face folder; prepared.json lists its files and their bytes
    models/.<name>.lock         held while <name> is built
    models/.<name>.xxxxxxxx/    a build under way, or what a killed one left; the next build removes it
    data/<key>/                 a table of tokens, in the same way
    wheels/                     wheels that the user puts here are taken instead of a download

A folder appears under its name by one atomic rename, after its files are on disk. So a killed build is never
taken for a model, and a folder that has lost files since (cache cleaners do that) is built again.
"""

import errno
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from trainer.config.errors import UserError, require

log = logging.getLogger(__name__)

MANIFEST = "prepared.json"


def cache_dir() -> Path:
    """The cache folder, absolute; it need not exist yet."""
    return Path(os.environ.get("LOWBIT_CACHE") or "~/.cache/lowbit").expanduser().absolute()


def prepare_once(name: str, build: Callable[[Path], None], needs_bytes: int, *, room: str = "models") -> Path:
    """Return the cached folder `<room>/<name>`, built first if it is not there.

    name         folder name; give it another one when `build` writes something else
    build        fills the empty folder that it gets with files; runs in one process at a time
    needs_bytes  the most that `build` has on disk at a time
    returns      the folder; other processes may read it, nobody writes to it
    raises       UserError if the cache cannot be written or its disk is too full; whatever `build` raises
    """
    rooms = cache_dir() / room
    folder = rooms / name
    if _is_complete(folder):
        return folder
    with _explained(rooms, needs_bytes):
        rooms.mkdir(parents=True, exist_ok=True)
        with _locked(rooms / f".{name}.lock", name):
            if not _is_complete(folder):
                _build(folder, build, needs_bytes)
    return folder


def _build(folder: Path, build: Callable[[Path], None], needs_bytes: int) -> None:
    _remove_leftovers(folder)
    free = shutil.disk_usage(folder.parent).free
    require(free >= needs_bytes, _disk_full(folder.parent, needs_bytes, free))
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        build(unfinished)
        (unfinished / MANIFEST).write_text(json.dumps(_file_bytes(unfinished), indent=2) + "\n")
        for path in unfinished.iterdir():
            path.chmod(0o644)  # temporary files come as 0600; a cache may be shared
            _fsync(path)
        unfinished.chmod(0o755)
        _fsync(unfinished)
        unfinished.rename(folder)
        _fsync(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Under the lock nobody else builds, so each unfinished folder is one that a killed build left."""
    for path in folder.parent.glob(f".{folder.name}.????????"):
        shutil.rmtree(path)
    if folder.exists():
        log.warning("cache    %s has lost files; it is built again", folder)
        shutil.rmtree(folder)


def _is_complete(folder: Path) -> bool:
    """Whether it has what was built; libraries that map its files may put others of their own beside them."""
    try:
        return json.loads((folder / MANIFEST).read_text()).items() <= _file_bytes(folder).items()
    except (OSError, ValueError):
        return False


def _file_bytes(folder: Path) -> dict[str, int]:
    """Name -> size of every file in the folder but the manifest."""
    return {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if p.name != MANIFEST}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=1)
    except Timeout:
        log.info("cache    another process prepares %s; waiting for it", name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _explained(room: Path, needs_bytes: int) -> Iterator[None]:
    """Turn what the file system says about the cache into a UserError; errors elsewhere pass through."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(_disk_full(room, needs_bytes, shutil.disk_usage(_existing(room)).free)) from error
        if error.filename is None or not _concerns_cache(Path(os.fsdecode(error.filename))):
            raise
        raise UserError(
            f"the cache folder {cache_dir()} cannot be written ({error.strerror}: {error.filename}); "
            "give one that can: LOWBIT_CACHE=<folder>"
        ) from error


def _concerns_cache(path: Path) -> bool:
    return path.is_relative_to(cache_dir()) or cache_dir().is_relative_to(path)


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _disk_full(folder: Path, needs_bytes: int, free: int) -> str:
    return (
        f"{folder} needs {needs_bytes / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free; "
        "free some, or move the cache to another disk: LOWBIT_CACHE=<folder>"
    )
