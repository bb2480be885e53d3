"""Held-out loss: the mean over target tokens, not the mean of means; perplexity is its exponential."""

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn

from trainer.data.loader import collate, eval_batches
from trainer.objective import num_targets


@torch.inference_mode()
def held_out_loss(objective: nn.Module, dataset: Dataset, accelerator: Accelerator, *, batch_size: int) -> float:
    """Mean cross-entropy over the target tokens of `dataset`, in nats; processes share the batches.

    objective  maps the batches of `collate` to the summed loss; left in eval mode
    dataset    rows of input_ids and labels, -100 where there is no target
    """
    objective.eval()
    lengths = [len(row) for row in dataset["input_ids"]]
    batches = eval_batches(len(dataset), lengths, batch_size)[accelerator.process_index :: accelerator.num_processes]
    sums = torch.zeros(2, dtype=torch.float64)  # loss, target tokens
    for rows in batches:
        batch = collate([dataset[row] for row in rows], device=accelerator.device)
        sums += torch.tensor([objective(**batch).item(), num_targets(batch["labels"])], dtype=torch.float64)
    loss, count = accelerator.reduce(sums.to(accelerator.device), "sum").tolist()
    return loss / count
