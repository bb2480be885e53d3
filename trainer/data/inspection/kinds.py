"""The kinds of rows that one can ask for."""

from enum import StrEnum


class Only(StrEnum):
    all = "all"
    train = "train"
    held_out = "held_out"
    bad = "bad"
    long = "long"
    short = "short"
    duplicates = "duplicates"
    leaks = "leaks"
