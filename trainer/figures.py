"""What the end of a run says of base and tuned model: the rows of the report's table and of the model cards."""

import math
from typing import Any, NamedTuple

from trainer.config.preference import Method
from trainer.config.schema import Config

UNITS = {
    Method.none: "loss, nats a target token",
    Method.dpo: "loss a pair",
    Method.orpo: "loss: next token and odds ratio",
    Method.kto: "loss a row",
}
MEASURED = {
    "accuracy": "accuracy of the reward",
    "margin": "margin of the reward",
    "prefers_chosen": "chosen answer likelier a token",
    "kl": "KL to the base, nats",
}


class Figure(NamedTuple):
    label: str
    base: float | None
    """None where the base has none: its reward is 0 by definition."""
    tuned: float | None
    """None for what the base alone has: its weights rounded to nearest."""


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float64 cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def figures(metrics: dict[str, Any], config: Config) -> list[Figure]:
    """Rows of base against tuned.

    metrics  the content of metrics.json
    """
    return figures_of(metrics, config.preference.method)


def figures_of(metrics: dict[str, Any], method: Method) -> list[Figure]:
    """The same, where the method is all that is known of the config."""
    rows = [Figure(UNITS[method], metrics["eval_loss_base"], metrics["eval_loss"])]
    if method is Method.none:
        rows.append(Figure("perplexity", metrics["perplexity_base"], metrics["perplexity"]))
        if "qat" in metrics:
            rows.append(Figure("  rounded to nearest, loss", metrics["qat"]["eval_loss_rounded"], None))
            rows.append(Figure("  exported codes, loss", None, metrics["qat"]["eval_loss_packed"]))
        if "eval_kl" in metrics:
            # what is compared with: in quantization-aware training the base rounded to nearest, else the base
            rounded = "eval_kl_rounded" in metrics
            base = metrics.get("eval_kl_rounded" if rounded else "eval_kl_base")
            label = "KL to the teacher (base: rounded), nats" if rounded else "KL to the teacher, nats"
            rows.append(Figure(label, base, metrics["eval_kl"]))
        return rows
    for name, label in MEASURED.items():
        if f"eval_{name}" in metrics:
            of_reward = method.has_reference and name in ("accuracy", "margin")
            base = None if of_reward else metrics.get(f"eval_{name}_base")
            rows.append(Figure(label, base, metrics[f"eval_{name}"]))
    return rows


def markdown_table(metrics: dict[str, Any], config: Config, *, tuned: str = "tuned") -> str:
    """The rows as a table of a model card."""
    lines = [f"| held-out, {metrics['eval_rows']} rows | base | {tuned} |", "|---|---|---|"]
    for label, base, value in figures(metrics, config):
        cells = ("" if cell is None else f"{cell:.4f}" for cell in (base, value))
        lines.append(f"| {label.strip()} | {' | '.join(cells)} |")
    return "\n".join(lines)
