"""The end of quantization-aware training: from layers that round to layers of codes, to a folder, to the server.

The pair of `prepare.py` for a QAT run. Each of the four stages is compared with the trained model, by the hash of its
codes and by what it answers to held-out tokens; where one of them is another function, the run fails and says which.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from trainer.agreement import (
    Difference,
    cut_rows,
    following_logprobs,
    int8_cache_logprobs,
    require_agreement,
    served_logprobs,
)
from trainer.architecture import base_model
from trainer.convert import convert
from trainer.export.layouts import write_dense
from trainer.export.merged import merged_dtype
from trainer.export.quantized import describe_schemes, write_quantized
from trainer.prepare import PreparedRun
from trainer.qat.packed_model import packed_layers, packed_sha256
from trainer.resident import release_free_memory

log = logging.getLogger(__name__)


@dataclass
class QatEnd:
    """What a QAT run leaves besides its weights; `metrics.json` has it as `qat`.

    schemes            which layers are quantized how
    packed_sha256      of the codes that training multiplied, that are in memory, and that are on disk
    eval_loss_rounded  held-out loss before training, rounded to nearest; nats a target token
    eval_loss_packed   after training, by the layers of codes
    recovered          of the loss that rounding added, the share that is gone; None if it added none. Above 1 the
                       trained model is better than the 16-bit one was before, since training also taught it the data
    bits_per_weight    of the quantized layers, scales included
    agreement          packed, exported, served -> Difference from the trained model, or why it was not compared
    """

    schemes: str
    packed_sha256: str
    eval_loss_rounded: float
    eval_loss_packed: float
    recovered: float | None
    bits_per_weight: float
    agreement: dict[str, Difference | str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def finish_qat(run: PreparedRun, folders: dict[str, Path], provenance: dict[str, Any], eval_loss: float) -> QatEnd:
    """Convert the trained model in place, write `quantized` and `merged`, and compare.

    folders    format -> folder, of those two that are asked for
    eval_loss  held-out loss of the trained model
    raises     RuntimeError if a stage computes another function than the one that was trained
    """
    training, state = run.training, run.state
    rows = cut_rows(run.data.held_out["input_ids"], training.config.qat.compare_tokens)
    kv_cache = training.config.qat.kv_cache
    trained, trained_sha256 = following_logprobs(run.model, rows), packed_sha256(run.model)
    through_cache = int8_cache_logprobs(run.model, rows) if kv_cache else trained
    convert(run.model)
    release_free_memory()  # what training took, before models are read back and served
    if packed_sha256(run.model) != trained_sha256:
        raise RuntimeError(f"converting changed the codes {trained_sha256[:12]} that training multiplied")
    causal_lm = base_model(run.model)
    end = QatEnd(
        schemes=describe_schemes(causal_lm),
        packed_sha256=trained_sha256,
        eval_loss_rounded=state.eval_loss_rounded,
        eval_loss_packed=training.evaluate()["loss"],
        recovered=_recovered(state.eval_loss_base, state.eval_loss_rounded, eval_loss),
        bits_per_weight=_bits_per_weight(causal_lm),
    )

    def compare(what: str, logprobs: Tensor, reference: Tensor = trained) -> None:
        end.agreement[what] = Difference.of(logprobs, reference)
        require_agreement(f"the {what} model", end.agreement[what], causal_lm)

    compare("packed", following_logprobs(causal_lm, rows))
    if training.accelerator.is_main_process:
        exported = _write(run, folders, {**provenance, "schemes": end.schemes}, trained_sha256, compare, rows)
        served = served_logprobs(exported, run.tokenizer, rows, kv_cache_dtype="int8" if kv_cache else "auto")
        if isinstance(served, str):
            end.agreement["served"] = served
            log.warning("served   not compared: %s", served)
        else:
            compare("served", served, through_cache)
    return end


def _write(
    run: PreparedRun,
    folders: dict[str, Path],
    provenance: dict[str, Any],
    trained_sha256: str,
    compare: Callable[[str, Tensor], None],
    rows: list[list[int]],
) -> PreTrainedModel:
    """Write the folders; returns the model that was read from disk, or the packed one if none was written."""
    causal_lm = base_model(run.model)
    if "merged" in folders:
        dtype = merged_dtype(run.training.config.export)
        write_dense(causal_lm, run.tokenizer, folders["merged"], dtype=dtype, provenance=provenance)
    if "quantized" not in folders:
        return causal_lm
    kv_cache = run.training.config.qat.kv_cache
    settings = {"trained_sha256": trained_sha256, "kv_cache": kv_cache, "provenance": provenance}
    exported = write_quantized(causal_lm, run.tokenizer, folders["quantized"], **settings)
    exported.to(run.training.accelerator.device)
    compare("exported", following_logprobs(exported, rows))
    return exported


def _recovered(base: float, rounded: float, trained: float) -> float | None:
    return (rounded - trained) / (rounded - base) if rounded > base else None


def _bits_per_weight(model: PreTrainedModel) -> float:
    quantized = [layer.quantized for layer in packed_layers(model).values()]
    return 8 * sum(q.nbytes for q in quantized) / sum(q.shape[0] * q.shape[1] for q in quantized)
