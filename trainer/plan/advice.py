"""What to do, in words: which methods fit, and what helps where one does not.

The order is that of a decision: training on hardware that is small wants 4 bits (QLoRA); quality with some headroom
wants 8; a device without room wants INT4 and mapped weights; and a server's throughput is bought with KV cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.plan.estimate import Estimate, Verdict
from trainer.plan.serving import sequences_that_fit

GB = 1e9
_FULL, _PACKED = ("full", "qat"), ("qlora", "loftq")
_SMALLER = {
    "activations": "train.gradient_checkpointing=true or a lower train.max_pass_tokens",
    "optimizer": "optim.name=adamw_8bit",
    "masters": "an adapter: conf=lora, or conf=qlora",
    "gradients": "an adapter: conf=lora, or conf=qlora",
    "weights": "weights in 4 bits: conf=qlora",
    "teacher": "distill.top_k, which keeps the teacher's answers on disk",
}
"""The largest part of what does not fit -> what makes it smaller."""


@dataclass(frozen=True)
class Load:
    """What a server is planned for."""

    num_seqs: int
    length: int


def advise(training: Sequence[Estimate], serving: Sequence[Estimate], available: int, load: Load) -> list[str]:
    """Sentences for people, the summary first."""
    lines = [_summary(training, available)] if training else []
    lines += [line for estimate in training if (line := _smaller(estimate, available))]
    lines += _of_training(training, available)
    return lines + _of_serving(serving, available, load)


def _summary(estimates: Sequence[Estimate], available: int) -> str:
    names = {verdict: [e.name for e in estimates if e.verdict(available) is verdict] for verdict in Verdict}
    words = {Verdict.fits: "fits", Verdict.tight: "tight", Verdict.does_not_fit: "will not fit"}
    return "; ".join(f"{words[verdict]}: {', '.join(found)}" for verdict, found in names.items() if found)


def _smaller(estimate: Estimate, available: int) -> str:
    """What to change about a method that does not fit for sure."""
    if estimate.verdict(available) is Verdict.fits:
        return ""
    parts = {name: size for name, size in estimate.parts.items() if name in _SMALLER}
    if not parts:
        return ""
    largest = max(parts, key=parts.__getitem__)
    return (
        f"{estimate.name} needs {estimate.peak / GB:.1f} of {available / GB:.1f} GB, {parts[largest] / GB:.1f} of them "
        f"{largest}: {_SMALLER[largest]}"
    )


def _of_training(estimates: Sequence[Estimate], available: int) -> list[str]:
    fits = {e.name for e in estimates if e.verdict(available) is Verdict.fits}
    asked = {e.name for e in estimates}
    lines = []
    if asked & set(_FULL) and not fits & set(_FULL) and fits & set(_PACKED):
        lines.append(
            "limited hardware: fine-tune in 4 bits, conf=qlora; conf=loftq starts closer to the 16-bit weights"
        )
    if "qat" in fits:
        lines.append("best quality in few bits: conf=qat with distill.weight=1")
    elif "qat" in asked and fits & {"qat_lora", "qat_blocks"}:
        best = "qat_blocks" if "qat_blocks" in fits else "qat_lora"
        lines.append(f"best quality in few bits that fits: conf={best}")
    return lines


def _of_serving(estimates: Sequence[Estimate], available: int, load: Load) -> list[str]:
    if not estimates:
        return []
    fitting = [e for e in estimates if e.verdict(available) is Verdict.fits]
    names = {e.name for e in fitting}
    lines = [_throughput(fitting, load)] if fitting else [_no_room(estimates, available, load)]
    if "16 bit" not in names and names & {"INT4", "NF4"}:
        lines.append(
            "16 bits do not fit: serve quantization=int4 or nf4; files are mapped, and no weight is held twice"
        )
    elif "INT8" in names:
        lines.append("quality-critical with headroom: 16 bits, or quantization=int8_dynamic")
    if {"INT4", "INT8"} & names:
        lines.append(
            "quantize with calibration rows (gptq, awq) and validate quality after it; nearest rounding has none"
        )
    if load.num_seqs == 1:
        lines.append("one sequence at a time leaves the server idle: batches of 16 cost its KV cache only")
    return lines


def _throughput(fitting: Sequence[Estimate], load: Load) -> str:
    best = min(fitting, key=lambda e: e.parts["weights"])  # a decode step reads the weights once for all sequences
    cache = best.parts["KV cache"]
    return (
        f"throughput on this machine: {best.name}, {load.num_seqs} sequences of {load.length} tokens in "
        f"{cache / GB:.2g} GB of cache (kv_cache_memory_bytes={cache}, max_model_len={load.length})"
    )


def _no_room(estimates: Sequence[Estimate], available: int, load: Load) -> str:
    best = max(estimates, key=lambda e: sequences_that_fit(e, available, num_seqs=load.num_seqs))
    count = sequences_that_fit(best, available, num_seqs=load.num_seqs)
    if count < 1:
        return (
            f"not one sequence of {load.length} tokens fits beside the weights: a smaller model, or shorter sequences"
        )
    return (
        f"the KV cache decides: {load.num_seqs} sequences of {load.length} tokens do not fit, {count} do with "
        f"{best.name}; set max_num_seqs={count}, a lower max_model_len, or kv_cache_dtype=int8"
    )
