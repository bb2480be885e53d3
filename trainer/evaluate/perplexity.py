"""Held-out loss: the mean over target tokens or pairs, not the mean of means; perplexity is its exponential."""

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn

from trainer.data.loader import eval_batches, row_len
from trainer.metrics import mean_over_processes


@torch.inference_mode()
def held_out_figures(
    objective: nn.Module, dataset: Dataset, accelerator: Accelerator, *, batch_size: int
) -> dict[str, float]:
    """The objective on `dataset`: `loss`, each of its sums over its count, and what else it measures.

    objective   see objective.py; left in eval mode
    dataset     rows as the objective collates them
    batch_size  rows of a batch; processes share the batches
    """
    objective.eval()
    unwrapped = accelerator.unwrap_model(objective)
    rows = list(dataset)
    groups = eval_batches(len(rows), [row_len(row) for row in rows], batch_size)
    groups = groups[accelerator.process_index :: accelerator.num_processes] or [[]]
    batches = [unwrapped.collate([rows[row] for row in group], device=accelerator.device) for group in groups]
    unwrapped.look_ahead(batches, accelerator.reduce)
    sums, counts = [], []
    for batch in batches:
        sums.append(objective(**batch).double().reshape(-1))
        counts.append(unwrapped.count(batch))
    totals = torch.stack([torch.stack(sums).sum(0), torch.tensor(counts).to(sums[0]).sum(0)])
    loss, count = accelerator.reduce(totals, "sum").tolist()
    means = {"loss": sum(total / number for total, number in zip(loss, count, strict=True))}
    return means | mean_over_processes(unwrapped.drain_metrics(), accelerator)


def held_out_loss(objective: nn.Module, dataset: Dataset, accelerator: Accelerator, *, batch_size: int) -> float:
    """`held_out_figures`' loss: for the next token, the mean cross-entropy over target tokens, in nats."""
    return held_out_figures(objective, dataset, accelerator, batch_size=batch_size)["loss"]
