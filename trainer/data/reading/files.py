"""Which files a path names: itself, or of a folder those of one split.

Splits are told from names as the hub tells them: `train-00000-of-00002.parquet`, `test.jsonl`, `data/validation/a.csv`.
Beside files of several splits, files of none are left aside; else they are taken to be of `train`. Nothing is left
aside without being named in the log.
"""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.config.data import SourceConfig
from trainer.config.errors import UserError, require

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLITS = {word: split for split, words in _KEYWORDS.items() for word in words}
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}\b")
_ABOUT_DATA = re.compile(r"(readme|license)(\.\w+)?|(dataset_infos?|dataset_dict|state)\.json", re.IGNORECASE)
"""What lies beside data and describes it, by its name."""
_SHOWN = 8

logger = logging.getLogger(__name__)


def find_files(source: SourceConfig) -> list[Path]:
    """The files of `source.path`: at least one, sorted by path.

    raises   UserError when a folder has none, or none of source.split; or a file is no regular one
    """
    path = Path(source.path)
    if path.is_dir():
        return _of_split(_supported(path), source)
    require(
        path.is_file(),
        f"{path} is no regular file, which can be read more than once; give one, or data.path=- for standard input",
    )
    require(
        canonical(source.split) == "train",
        f"split={source.split}: {path} is one file and has no splits; give a folder of files named by their split",
    )
    return [path]


def layout_suffix(path: Path) -> str:
    """`.jsonl` of `a.jsonl` and of `a.jsonl.gz`, in small letters."""
    return Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def _supported(folder: Path) -> list[Path]:
    found = sorted(_walk(folder))
    taken = [path for path in found if layout_suffix(path) in SUFFIXES and not _ABOUT_DATA.fullmatch(path.name)]
    holds = names([path.relative_to(folder) for path in found]) or "nothing"
    require(bool(taken), f"{folder} has no files of rows ({', '.join(SUFFIXES)}); it holds {holds}")
    _log_left(folder, found, taken, "no files of rows")
    return taken


def _walk(folder: Path) -> Iterator[Path]:
    """Files below a folder that are not hidden, also behind links to folders, but to those that the link lies in."""
    for root, folders, files in os.walk(folder, followlinks=True):
        here = Path(root).resolve()
        shown = (name for name in folders if not _is_hidden(name))
        folders[:] = [name for name in shown if not here.is_relative_to((here / name).resolve())]
        yield from (Path(root, name) for name in files if not _is_hidden(name) and Path(root, name).is_file())


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__"))


def _of_split(files: list[Path], source: SourceConfig) -> list[Path]:
    folder, wanted = Path(source.path), canonical(source.split)
    splits = {path: split_of(path.relative_to(folder)) for path in files}
    known = {split for split in splits.values() if split}
    rest = None if len(known) > 1 else "train"
    taken = [path for path, split in splits.items() if (split or rest) == wanted]
    if not taken:
        there = ", ".join(sorted({split or rest for split in splits.values() if split or rest}))
        raise UserError(f"data.split={source.split} is not in {folder}; its files are of {there}; name one of these")
    logger.info("%s: %d files: %s", folder, len(taken), names([path.relative_to(folder) for path in taken]))
    _log_left(folder, files, taken, f"not of split {wanted}")
    return taken


def _log_left(folder: Path, files: list[Path], taken: list[Path], why: str) -> None:
    if left := sorted(set(files) - set(taken)):
        logger.info("%s: left aside, %s: %s", folder, why, names([path.relative_to(folder) for path in left]))


def canonical(split: str) -> str:
    return _SPLITS.get(split.lower(), split)


def split_of(path: Path) -> str | None:
    """The split that a file's name says, or else the nearest folder's.

    path     relative to the folder of all files, so that names above it do not count
    returns  train, validation, test; or another that a shard is named by: `train_sft-00000-of-00001.parquet`
    """
    for part in reversed(path.parts):
        words = re.split(r"[^a-z]+", part.lower())
        if split := next((_SPLITS[word] for word in words if word in _SPLITS), None):
            shard = _SHARD.match(part)
            return canonical(shard[1]) if shard else split
    return None


def names(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(str(path) for path in paths[:_SHOWN]) + more
