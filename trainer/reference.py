"""Log-probabilities of the model before training, computed once and kept in the run folder.

`preference.precompute=true` trades one pass over all rows for the reference's share of each step, and lets DPO and KTO
train every weight, where no model before training is left. A resumed run reads them; where they are missing, or belong
to another base or other data, they are computed again, before a checkpoint is put into the model.
"""

import logging
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset, Features, List, Value
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.data.loader import group_by_length
from trainer.preference import KtoLoss, PairLoss

logger = logging.getLogger(__name__)

FILE_NAME = "reference_log_probs.safetensors"


def with_reference(
    objective: PairLoss | KtoLoss,
    datasets: dict[str, Dataset],
    run_dir: Path,
    accelerator: Accelerator,
    *,
    max_pass_tokens: int,
    hashes: dict[str, str],
) -> dict[str, Dataset]:
    """The datasets with a column `reference`, two float64 a row: what `objective.reference` gives.

    objective  over the model as it is before training
    datasets   by name, such as train and held_out; the names are the tensors' in the file
    hashes     what the numbers depend on; a file with others is computed anew
    """
    path = run_dir / FILE_NAME
    found = _load(path, hashes)
    if found is None:
        found = {
            name: _log_probs(objective, rows, accelerator, max_pass_tokens=max_pass_tokens)
            for name, rows in datasets.items()
        }
        if accelerator.is_main_process:
            partial = path.with_suffix(".partial")
            save_file({name: values.contiguous() for name, values in found.items()}, partial, metadata=hashes)
            partial.rename(path)
        accelerator.wait_for_everyone()
        logger.info("reference log-probabilities of %s rows: %s", sum(map(len, found.values())), path)
    return {name: _with_column(rows, found[name]) for name, rows in datasets.items()}


def _load(path: Path, hashes: dict[str, str]) -> dict[str, Tensor] | None:
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        if file.metadata() != hashes:
            return None
        return {name: file.get_tensor(name) for name in file.keys()}


def _log_probs(
    objective: PairLoss | KtoLoss, dataset: Dataset, accelerator: Accelerator, *, max_pass_tokens: int
) -> Tensor:
    """[len(dataset), 2] float64 on the CPU; processes share the passes."""
    rows = [{**row, "number": number} for number, row in enumerate(dataset)]
    passes = group_by_length(rows, max_pass_tokens)[accelerator.process_index :: accelerator.num_processes]
    values = torch.zeros(len(rows), 2, dtype=torch.float64, device=accelerator.device)
    for some in passes:
        batch = objective.collate(some, device=accelerator.device)
        values[[row["number"] for row in some]] = objective.reference(batch)
    return accelerator.reduce(values, "sum").cpu()


def _with_column(dataset: Dataset, values: Tensor) -> Dataset:
    features = Features({**dataset.features, "reference": List(Value("float64"))})
    return Dataset.from_dict({**dataset.to_dict(), "reference": values.tolist()}, features=features)
