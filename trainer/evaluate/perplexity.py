"""Held-out loss: the mean over target tokens, not the mean of means; perplexity is its exponential."""

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn

from trainer.data.loader import eval_batches


@torch.inference_mode()
def held_out_loss(objective: nn.Module, dataset: Dataset, accelerator: Accelerator, *, batch_size: int) -> float:
    """Mean cross-entropy over the target tokens of `dataset`, in nats; processes share the batches.

    objective  maps a batch of its `collate` to a sum that its `count` divides; left in eval mode
    dataset    rows of input_ids and labels, -100 where there is no target
    """
    objective.eval()
    batches_of = accelerator.unwrap_model(objective)
    lengths = [len(row) for row in dataset["input_ids"]]
    batches = eval_batches(len(dataset), lengths, batch_size)[accelerator.process_index :: accelerator.num_processes]
    sums = torch.zeros(2, dtype=torch.float64)  # loss, target tokens
    for rows in batches:
        batch = batches_of.collate([dataset[row] for row in rows], accelerator.device)
        sums += torch.tensor([objective(**batch).item(), batches_of.count(batch)], dtype=torch.float64)
    loss, count = accelerator.reduce(sums.to(accelerator.device), "sum").tolist()
    return loss / count
