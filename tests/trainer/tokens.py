"""Rows of tokens for tests that begin behind the files."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trainer.config.data import DataConfig
from trainer.data.dataset import trained_on
from trainer.data.rows import Example
from trainer.data.table import as_dataset
from trainer.data.tokenizing import ExampleTokenizer


def tokens_of(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Dataset:
    """Rows, pairs or labelled answers as `load_data` gives them, in memory; settings: keys of `data.*`."""
    tokenize = ExampleTokenizer(tokenizer, DataConfig(**settings))
    return trained_on(as_dataset([row for example in examples for row in tokenize(example)]))
