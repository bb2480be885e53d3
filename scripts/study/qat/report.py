"""docs/quality_qat.md from the results: each table under the command that made it, and the bars."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study.document import Finding, gaps, origin, paragraph, spread, table, verdicts, write_document
from study.qat.cells import Sizes, cost_cells, formats, methods, study_cells
from study.records import Records

COMMAND = "python scripts/study_qat.py"
FORMATS = {
    "16bit": "16-bit",
    "g32": "INT4 g32",
    "g32_asymmetric": "INT4 g32, asymmetric",
    "g64": "INT4 g64",
    "g192": "INT4 g192",
    "nf4": "NF4",
    "int4_int8": "INT4 g32, INT8 inputs",
    "int8": "INT8, INT8 inputs",
    "fp8": "FP8 e4m3, FP8 inputs",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
}
METHODS = {
    "qat": "conf=qat, next-token loss",
    "qad": "conf=qat, distill.weight=1",
    "lora": "conf=qat_lora, distill.weight=1",
    "naive": "conf=qlora, distill.weight=1, merged and rounded",
    "blocks": "conf=qat_blocks, distill.weight=1",
    "full": "conf=full, next-token loss",
}


class Results:
    """Records of the cells that were measured.

    rounded  format -> its record
    trained  method_format -> a record for each seed
    costs    method_format -> its record
    """

    def __init__(self, records: Records, sizes: Sizes) -> None:
        cells, costs = study_cells(sizes), cost_cells(sizes)
        found = records.of([*cells, *costs])
        self.rounded = {name: found[f"rounded_{name}"][0] for name in formats(sizes) if f"rounded_{name}" in found}
        self.trained = {name: found[name] for name in methods(sizes) if name in found}
        self.costs = {name: found[f"cost_{name}"][0] for name in methods(sizes) if f"cost_{name}" in found}
        self.missing = [f"{cell.name} (seed {cell.seed})" for cell in [*cells, *costs] if not records.has(cell)]
        self.failures = records.failures([*cells, *costs])
        self.all = [record for many in found.values() for record in many]

    def recovered(self, name: str) -> list[float]:
        """Of the perplexity that rounding to nearest adds, the share that is gone, by seed."""
        exact, nearest = self.rounded.get("16bit"), self.rounded.get(name.partition("_")[2])
        if not exact or not nearest or exact is nearest:
            return []
        gap = nearest["perplexity"] - exact["perplexity"]
        return [(nearest["perplexity"] - record["perplexity"]) / gap for record in self.trained.get(name, [])]

    def kept(self, name: str) -> list[float]:
        """Of what an adapter gained in training, the share that is left in what ships, by seed."""
        gains = [record["gain"] for record in self.trained.get(name, []) if "gain" in record]
        return [
            (gain["nearest"] - gain["shipped"]) / (gain["nearest"] - gain["trained"])
            for gain in gains
            if gain["nearest"] > gain["trained"]
        ]


def write_report(records: Records, sizes: Sizes, docs: Path) -> None:
    """Write the document into `docs`.

    raises  ValueError if there are no results
    """
    results = Results(records, sizes)
    if not results.all:
        raise ValueError(f"{records.path} has no results of this study; run {COMMAND} first, with the same --work")
    path = docs / "quality_qat.md"
    write_document(
        path,
        [
            *_head(results, sizes),
            *_rounded(results),
            *_trained(results),
            *_merged(results),
            *_costs(results, sizes),
            *verdicts("Bars", "bar", bars(results)),
        ],
    )
    print(f"wrote {path} from {len(results.all)} cells")


def bars(results: Results) -> list[Finding]:
    """The bars whose cells are there."""
    found = []
    least = {"qad_g32": 0.6, "blocks_g32": 0.6, "lora_g32": 0.5}
    for name, bar in least.items():
        if shares := results.recovered(name):
            claim = f"{_method(name)} recovers at least {100 * bar:.0f} % of what INT4 g32 lost"
            found.append(
                (claim, f"{_percent(shares)}, {len(shares)} seed{'s' * (len(shares) > 1)}", min(shares) >= bar)
            )
    minutes = [record["run_s"] / 60 for name in least for record in results.trained.get(name, [])]
    if minutes:
        found.append(("a run takes at most 45 minutes", f"at most {max(minutes):.1f}", max(minutes) <= 45))
    if kept := results.kept("lora_g32"):
        naive = results.kept("naive_g32")
        beside = f"; the usual way {_percent(naive)}" if naive else ""
        claim = "merge-aware LoRA keeps at least 95 % of its gain in what ships"
        found.append((claim, f"{_percent(kept)}{beside}", min(kept) >= 0.95))
    if (plain := results.costs.get("full_16bit")) and (qat := results.costs.get("qat_g32")):
        ratio = plain["tokens_per_s"] / qat["tokens_per_s"]
        claim = "a step of conf=qat takes at most 1.25 times that of conf=full"
        found.append((claim, f"{ratio:.2f}", ratio <= 1.25))
    return found


# ---- sections


def _head(results: Results, sizes: Sizes) -> list[str]:
    text = [
        "# Quality of quantization-aware training",
        f"""What rounding to few bits costs, what training through the rounding gives back, and what it takes.
        {origin(COMMAND, results.all)}""",
        f"""Model {sizes.model}, whose channels are shuffled (`trainer/sources/shuffle.py`: the same function, without
        the order that its source's quantizer left). All linear layers but the output head are quantized. Perplexity:
        {sizes.windows} windows of {sizes.window_len} tokens from the start of WikiText-2's test text. KL: of the 16-bit
        model to the quantized one, nats a token; same token: how often both have the same likeliest token; both over
        the same windows. Trained rows are {sizes.steps} steps of {sizes.batch_size} rows of {sizes.row_len} tokens of
        WikiText-2's **validation** text at the recipes' own settings; {sizes.block_rows} rows go through the blocks
        first. Seeds choose the rows; ± is the standard deviation over them. Figures are of the folder that the run
        wrote, opened again; minutes and memory are of a whole run up to the export, with several cells at a time.
        Recovered: (rounded - trained) / (rounded - 16-bit), of perplexity. With the next-token loss a model also learns
        the text's kind, which conf=full shows; the teacher's KL teaches no more than the
        16-bit model knows.""",
    ]
    return [paragraph(part) for part in [*text, *gaps(results.missing, results.failures)]]


def _rounded(results: Results) -> list[str]:
    rows = [
        [FORMATS[name], f"{record['perplexity']:.2f}", f"{record['kl']:.4f}", f"{100 * record['same_token']:.1f} %"]
        for name, record in results.rounded.items()
    ]
    header = ("format", "perplexity", "KL", "same token")
    return ["## Rounded to nearest", f"`{COMMAND} --only rounded`", table(header, rows)] if rows else []


def _trained(results: Results) -> list[str]:
    header = ("method", "format", "perplexity", "recovered", "KL", "same token", "minutes", "peak, GiB", "seeds")
    rows = [_trained_row(results, name, records) for name, records in results.trained.items()]
    return ["## After training", f"`{COMMAND}`", table(header, rows)] if rows else []


def _trained_row(results: Results, name: str, records: list[dict[str, Any]]) -> list[str]:
    compared = [record for record in records if "kl" in record]
    return [
        METHODS[name.partition("_")[0]],
        FORMATS[name.partition("_")[2]],
        spread([record["perplexity"] for record in records], ".2f", ".2f"),
        _percent(results.recovered(name)),
        spread([record["kl"] for record in compared], ".4f", ".4f") if compared else "",
        f"{100 * statistics.mean(record['same_token'] for record in compared):.1f} %" if compared else "",
        f"{statistics.mean(record['run_s'] for record in records) / 60:.1f}",
        f"{max(record['peak_memory_bytes'] for record in records) / 2**30:.2f}",
        str(len(records)),
    ]


def _merged(results: Results) -> list[str]:
    rows = []
    for name, records in results.trained.items():
        if gains := [record["gain"] for record in records if "gain" in record]:
            losses = [
                f"{statistics.mean(gain[key] for gain in gains):.4f}" for key in ("nearest", "trained", "shipped")
            ]
            rows.append([f"{_method(name)}, {FORMATS[name.partition('_')[2]]}", *losses, _percent(results.kept(name))])
    text = """Loss on the test windows, nats a token: of the weights rounded to nearest, of what training computed, and
    of the codes that ship. The usual way trains Q(W) x + s B A x and ships Q(W + s B A); merge-aware layers train
    Q(W + s B A) x. Kept: of the gain in training, the share that ships."""
    header = ("adapter", "nearest", "trained", "shipped", "kept")
    return ["## What the merge keeps", f"`{COMMAND}`", paragraph(text), table(header, rows)] if rows else []


def _costs(results: Results, sizes: Sizes) -> list[str]:
    plain = results.costs.get("full_16bit")
    rows = [
        [
            f"{_method(name)}, {FORMATS[name.partition('_')[2]]}",
            f"{cost['tokens_per_s']:.0f}",
            f"{plain['tokens_per_s'] / cost['tokens_per_s']:.2f}" if plain else "",
            f"{statistics.median(cost['step_s']):.2f}",
            f"{cost['peak_memory_bytes'] / 2**30:.2f}",
        ]
        for name, cost in results.costs.items()
    ]
    if not rows:
        return []
    threads = " or ".join(sorted({str(cost["threads"]) for cost in results.costs.values()}))
    text = f"""A process a method, one after the other, threads: {threads}; {sizes.cost_steps} steps of
    {sizes.batch_size} rows of {sizes.row_len} tokens, the first two not timed, the same rows for all; medians. The
    teacher's answers are on disk before the first step."""
    header = ("method", "tokens/s", "time against conf=full", "median step, s", "peak, GiB")
    return ["## Costs", f"`{COMMAND} --only cost`", paragraph(text), table(header, rows)]


def _method(name: str) -> str:
    return METHODS[name.partition("_")[0]]


def _percent(shares: Sequence[float]) -> str:
    return f"{spread([100 * share for share in shares], '.1f', '.1f')} %" if shares else ""
