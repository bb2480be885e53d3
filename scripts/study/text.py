"""WikiText-2 as the studies read it."""

from pathlib import Path

import torch
from study.cell import Cell
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trainer.config.errors import UserError


def text_windows(cell: Cell, path: Path, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """[windows, window_len] int64, from the start of a text; each is read without what stands before it.

    raises  UserError if the text is too short for the cell's sizes
    """
    count, length = cell.sizes["windows"], cell.sizes["window_len"]
    text = path.read_text(encoding="utf-8")[: 16 * count * length]  # no token of text has 16 characters
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) < count * length:
        raise UserError(f"{path} has {len(ids)} tokens; {count} windows need {count * length}")
    return torch.tensor(ids[: count * length]).view(count, length)
