"""docs/quality_adapters.md from the results: each table under the command that made it, bars, papers against figures.

Nothing is measured here.
"""

import statistics
from pathlib import Path
from typing import Any

from study.adapters.cells import START_ALPHAS, Sizes
from study.adapters.findings import bars, expectations
from study.adapters.plots import draw
from study.adapters.results import LABELS, Results, start_label, start_parts
from study.document import gaps, origin, paragraph, spread, table, verdicts, write_document
from study.records import Records, wilson

COMMAND = "python scripts/study_adapters.py"


def write_report(records: Records, sizes: Sizes, docs: Path) -> None:
    """Write the document and its plots into `docs`.

    raises  ValueError if there are no results
    """
    results = Results(records, sizes)
    if not results.all:
        raise ValueError(f"{records.path} has no results of this study; run {COMMAND} first, with the same --work")
    path = docs / "quality_adapters.md"
    plots = draw(results, docs / "plots")
    sections = [
        *_head(results, sizes),
        *_trained(results),
        *(f"![{title}](plots/{name})" for name, title in plots.items()),
        *_starts(results),
        *_unscaled(results),
        *_curves(results),
        *_costs(results, sizes),
        *verdicts("Bars", "bar", bars(results)),
        *verdicts("The papers and these figures", "expected", expectations(results)),
    ]
    write_document(path, sections)
    print(f"wrote {path} and {len(plots)} plots from {len(results.all)} cells")


# ---- sections


def mean_error(point: dict[str, Any]) -> str:
    """The mean over layers of ||W - (Q + s B A)|| / ||W||."""
    return f"{statistics.mean(point['layer_errors'].values()):.4f}"


def _head(results: Results, sizes: Sizes) -> list[str]:
    text = [
        "# Quality of adapters",
        f"""What quantization costs a fine-tuned model, and what LoftQ and the relatives of LoRA give back.
        {origin(COMMAND, results.all)}""",
        f"""Model {sizes.model}; rank 16 on all linear layers, alpha 32 (s = 2) unless said; {sizes.steps} steps of
        {sizes.batch_size} rows of GSM8K's training file (at most {sizes.max_seq_len} tokens, AdamW, the default
        learning rate, cosine). Seeds {", ".join(map(str, sizes.seeds))} choose rows and random factors; ± is the
        standard deviation over them. Held-out loss: nats a target token over the first {sizes.eval_rows} rows of the
        test file, with the adapter on, also before the first step. Perplexity: the first {sizes.windows} windows of
        {sizes.window_len} tokens of WikiText-2's test text. Answers: the {sizes.questions} test questions after the
        held-out rows, greedy, {sizes.answer_tokens} new tokens, through our server over the live module (DoRA, which it
        does not serve: over its 16-bit merge). An answer is right if the first number after its last `####`, or without
        one its last number, is the reference's; the interval is Wilson's for 95 %, over the seeds together.""",
        f"""NF4, FP4, NF3 and NF2 have blocks of 64 whose scales take 0.127 bits a weight; INT4 has groups of
        {sizes.int4_group_size} with bfloat16 scales, {16 / sizes.int4_group_size:g} bits a weight. rsLoRA has alpha 16,
        so s = 16 / sqrt(16) = 4; with alpha 8 it would be QLoRA NF4 itself.""",
    ]
    return [paragraph(part) for part in [*text, *gaps(results.missing, results.failures)]]


def _trained(results: Results) -> list[str]:
    header = ("method", "loss at start", "loss", "above 16-bit", "WikiText-2 perplexity", "right answers", "seeds")
    exact = results.losses("lora_16bit")
    rows = [_trained_row(name, records, exact) for name, records in results.trained.items()]
    return ["## After training", f"`{COMMAND}`", table(header, rows)] if rows else []


def _trained_row(name: str, records: list[dict[str, Any]], exact: list[float]) -> list[str]:
    losses = [record["loss"] for record in records]
    right, total = sum(record["right"] for record in records), sum(record["questions"] for record in records)
    low, high = wilson(right, total)
    return [
        LABELS[name],
        f"{statistics.mean(record['start_loss'] for record in records):.4f}",
        spread(losses, ".4f", ".4f"),
        f"{100 * (statistics.mean(losses) / statistics.mean(exact) - 1):+.2f} %" if exact else "",
        spread([record["perplexity"] for record in records], ".5g", ".2g"),
        f"{right} of {total} ({100 * low:.1f} to {100 * high:.1f} %)",
        str(len(records)),
    ]


def _starts(results: Results) -> list[str]:
    header = ("start", *(f"alpha {alpha}" for alpha in START_ALPHAS), "mean error", "largest error")
    rows = []
    for name, points in results.starts.items():
        perplexities = {point["alpha"]: f"{point['perplexity']:.5g}" for point in points}
        if len(points) == 1:  # without an update alpha has no effect
            perplexities = dict.fromkeys(START_ALPHAS, f"{points[0]['perplexity']:.5g}")
        errors = mean_error(points[0]), f"{max(points[0]['layer_errors'].values()):.4f}"
        rows.append([start_label(name), *(perplexities[alpha] for alpha in START_ALPHAS), *errors])
    text = f"""Perplexity on WikiText-2 with base and adapter as training would find them, and the relative error
    ||W - (Q + s B A)|| / ||W|| of the linear layers, computed from the modules and not read from LoftQ's report.
    r = 16, so alpha {START_ALPHAS[0]} to {START_ALPHAS[-1]} is r/2 to 4r; without an update it has no effect."""
    found = [f"`{COMMAND} --only start`", paragraph(text), table(header, rows)] if rows else []
    others = [
        [LABELS[name], f"{records[0]['start_perplexity']:.5g}", mean_error(records[0])]
        for name, records in results.trained.items()
        if "start_perplexity" in records[0]  # the first seed only
    ]
    if others:
        found += [
            "The methods above, first seed:",
            f"`{COMMAND}`",
            table(("start", "perplexity", "mean error"), others),
        ]
    return ["## Before training", *found] if found else []


def _unscaled(results: Results) -> list[str]:
    rows = []
    for name, points in results.starts.items():
        codebook, method = start_parts(name)
        plain = results.starts.get(f"start_{codebook}_plain")
        if method == "loftq1" and plain:
            theirs = (f"{point['unscaled_mean_error']:.4f} ({point['unscaled_perplexity']:.4g})" for point in points)
            rows.append([codebook.upper(), mean_error(plain[0]), mean_error(points[0]), *theirs])
    text = """The same with factors that leave s out, as LoftQ's reference and PEFT write them (T=1): mean error, and
    perplexity in brackets. At alpha = 2r the error is that of plain QLoRA, above it larger."""
    header = ("", "plain", "ours, every alpha", *(f"theirs, alpha {alpha}" for alpha in START_ALPHAS))
    return [paragraph(text), f"`{COMMAND} --only start`", table(header, rows)] if rows else []


def _curves(results: Results) -> list[str]:
    if not results.curves:
        return []
    steps = [str(step) for step, _ in next(iter(results.curves.values()))]
    rows = [[LABELS[name], *(f"{loss:.4f}" for _, loss in curve)] for name, curve in results.curves.items()]
    if len(rows) == 2:
        (_, first), (_, second) = results.curves.items()
        pairs = zip(first, second, strict=True)
        rows.append(["distance", *(f"{100 * (other / loss - 1):+.2f} %" for (_, loss), (_, other) in pairs)])
    text = "Held-out loss by step, one seed, the schedule stretched to all steps:"
    return ["## With more steps", f"`{COMMAND} --only long`", text, table(("method", *steps), rows)]


def _costs(results: Results, sizes: Sizes) -> list[str]:
    header = ("method", "set-up, s", "tokens/s", "median step, s", "peak after set-up, GiB", "peak, GiB")
    rows = [
        [
            LABELS[name],
            f"{cost['setup_s']:.1f}",
            f"{cost['tokens_per_s']:.0f}",
            f"{statistics.median(cost['step_s']):.2f}",
            f"{cost['setup_peak_bytes'] / 2**30:.2f}",
            f"{cost['peak_memory_bytes'] / 2**30:.2f}",
        ]
        for name, cost in results.costs.items()
    ]
    if not rows:
        return []
    threads = " or ".join(sorted({str(cost["threads"]) for cost in results.costs.values()}))
    text = f"""A process a method, one after the other, threads: {threads}; {sizes.cost_steps} steps of
    {sizes.batch_size} rows, the first not timed, the same rows for all. Set-up: loading, tokenizing, packing and the
    starting point."""
    return ["## Costs", f"`{COMMAND} --only cost`", paragraph(text), table(header, rows)]
