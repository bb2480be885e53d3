"""docs/quality_ptq.md from the results: each table under the command that made it, and the bars."""

from pathlib import Path
from typing import Any

from study.document import Finding, gaps, origin, paragraph, table, verdicts, write_document
from study.ptq.cells import Sizes, formats, gguf_files, methods, peers, study_cells
from study.records import Records

COMMAND = "python scripts/study_ptq.py"
FORMATS = {
    "int4_g32": "INT4 g32",
    "int4_g64": "INT4 g64",
    "int4_g32_asymmetric": "INT4 g32, asymmetric",
    "nf4": "NF4",
    "int8": "INT8 a row",
}
METHODS = {
    "rtn": "rounded to nearest",
    "gptq": "method=gptq",
    "awq": "method=awq",
    "hqq": "method=hqq",
    "gptq-original": "method=gptq match=original",
    "gptq-awq": "method=gptq fold=awq",
    "gptq-plain": "method=gptq search_scales=false refit_scales=false",
    "gptq-groups": "method=gptq act_order=groups",
    "gptq-pydocs": "method=gptq data=pydocs",
    "gptq-5bits": "method=gptq bits_budget=4.5",
}
PEERS = {"gptqmodel": "GPTQModel", "llmcompressor": "llm-compressor"}
PEER_METHODS = {
    "gptqmodel": "GPTQ",
    "llmcompressor-gptq": "GPTQ",
    "llmcompressor-awq": "AWQ",
    "gptqmodel-mse": "GPTQ, mse=2.4",
    "gptqmodel-order": "GPTQ, mse=2.4 desc_act=True",
}
INT8 = {
    "rtn_int8": "INT8 weights, rounded to nearest",
    "int8_dynamic-plain": "method=int8_dynamic fold=none: inputs with a scale a token, no calibration",
    "int8_dynamic": "method=int8_dynamic: inputs with a scale a token, smoothed",
    "smoothquant": "method=smoothquant: static inputs",
}
MAKERS = {"ours": "lowbit", "imatrix": "lowbit, with an importance matrix", "llama.cpp": "llama.cpp"}
INT4_BARS = {"int4_g32": 23.2, "int4_g64": 24.0, "int4_g32_asymmetric": 23.5, "nf4": 23.2}


class Results:
    """Records of the cells that were measured, by name."""

    def __init__(self, records: Records, sizes: Sizes) -> None:
        cells = study_cells(sizes)
        self.by_name = {name: found[0] for name, found in records.of(cells).items()}
        self.missing = [cell.name for cell in cells if not records.has(cell)]
        self.failures = records.failures(cells)
        self.gguf = {name: entry for name, entry in gguf_files(sizes).items() if name in self.by_name}
        self.methods = [name for name in methods(sizes) if name in self.by_name]
        self.peers = [name for name in peers(sizes) if name in self.by_name]
        self.formats = formats(sizes)

    def perplexity(self, name: str) -> float | None:
        """None where the cell was not measured."""
        return self.by_name[name]["perplexity"] if name in self.by_name else None

    def recovered(self, name: str) -> float | None:
        """Of the perplexity that rounding to nearest adds, the share that is gone."""
        exact, nearest = self.perplexity("16bit"), self.perplexity(f"rtn_{format_of(name)}")
        if exact is None or nearest is None or name.startswith("rtn_"):
            return None
        return (nearest - self.by_name[name]["perplexity"]) / (nearest - exact)


def format_of(name: str) -> str:
    """The grid of a cell: what stands behind the method."""
    return name.partition("_")[2]


def write_report(records: Records, sizes: Sizes, docs: Path) -> None:
    """Write the document into `docs`.

    raises  ValueError if there are no results
    """
    results = Results(records, sizes)
    if not results.by_name:
        raise ValueError(f"{records.path} has no results of this study; run {COMMAND} first, with the same --work")
    sections = [*_head(results, sizes), *_four_bits(results), *_eight_bits(results), *_gguf(results)]
    path = docs / "quality_ptq.md"
    write_document(path, [*sections, *verdicts("Bars", "bar", bars(results))])
    print(f"wrote {path} from {len(results.by_name)} cells")


def bars(results: Results) -> list[Finding]:
    """The bars whose cells are there."""
    found: list[Finding] = []
    exact = results.perplexity("16bit")
    for grid, bar in INT4_BARS.items():
        measured = {
            name: results.by_name[name]["perplexity"]
            for name in results.methods
            if format_of(name) == grid and name.partition("_")[0] in ("gptq", "awq")
        }
        if measured:
            best = min(measured, key=measured.get)
            figures = f"{measured[best]:.2f} ({METHODS[best.partition('_')[0]]})"
            found.append((f"{FORMATS[grid]}: GPTQ or AWQ at most {bar}", figures, measured[best] <= bar))
    for name, share in (("smoothquant", 0.01), ("int8_dynamic", 0.005)):
        value = results.perplexity(name)
        if value is not None and exact is not None:
            claim = f"method={name} within {100 * share:g} % of 16 bits"
            found.append((claim, f"{100 * (value / exact - 1):+.2f} %", value <= exact * (1 + share)))
    for name, (kind, maker) in results.gguf.items():
        theirs = results.perplexity(f"gguf-llama.cpp_{kind}")
        if maker == "ours" and theirs is not None:
            ours = results.by_name[name]["perplexity"]
            claim = f"GGUF {kind}: no worse than llama.cpp's own quantizer, in llama.cpp"
            found.append((claim, f"{ours:.4f} against {theirs:.4f}", ours <= theirs * 1.0001))
    return found


# ---- sections


def _head(results: Results, sizes: Sizes) -> list[str]:
    text = [
        "# Quality of post-training quantization",
        f"""What rounding a trained model to few bits costs, by method.
        {origin(COMMAND, list(results.by_name.values()))}""",
        f"""Model {sizes.model}, whose channels are shuffled (`trainer/sources/shuffle.py`: the same function, without
        the order that its source's quantizer left). All linear layers but the output head are quantized; scales are
        float16. Calibration: {sizes.rows} rows of {sizes.row_len} tokens of WikiText-2's **validation** text, unless
        said otherwise. Perplexity, KL from the 16-bit model to the quantized one (nats a token, and what 1 % of the
        tokens exceed), same token (how often both have the same likeliest token) and flips (how often one of them has
        the text's token as its likeliest and the other has not): {sizes.windows} windows of {sizes.window_len} tokens
        from the start of WikiText-2's test text. Common: the mean share of a greedy answer of {sizes.answer_len} tokens
        that equals the 16-bit model's before the first difference, over {sizes.prompts} questions of pydocs. Figures
        are of the folder that quantize.py wrote, opened again. Recovered: of the perplexity that rounding to nearest
        adds, the share that is gone. Minutes and memory are of the whole command with one thread, beside other work on
        the machine.""",
    ]
    return [paragraph(part) for part in [*text, *gaps(results.missing, results.failures)]]


def _row(results: Results, name: str, label: str) -> list[str]:
    record = results.by_name[name]
    share = results.recovered(name)
    return [
        label,
        f"{record['perplexity']:.2f}",
        "" if share is None else f"{100 * share:.0f} %",
        f"{record['kl']:.4f}",
        f"{record['kl_99']:.2f}",
        f"{100 * record['same_token']:.1f} %",
        f"{100 * (record['right_to_wrong'] + record['wrong_to_right']):.1f} %",
        f"{100 * record['mean_common']:.0f} %",
        *_costs(record),
    ]


def _costs(record: dict[str, Any]) -> list[str]:
    if "seconds" not in record:
        return ["16.00", "", ""]
    peak = f"{record['peak_memory_bytes'] / 2**30:.2f}"
    return [f"{record['bits_per_weight']:.2f}", f"{record['seconds'] / 60:.1f}", peak]


HEADER = ("perplexity", "recovered", "KL", "KL, 99 %", "same token", "flips", "common", "bits", "minutes", "peak, GiB")


def _four_bits(results: Results) -> list[str]:
    rows = [_row(results, "16bit", "16 bits")] if "16bit" in results.by_name else []
    for grid in results.formats:
        if grid != "int8":
            names = [name for name in (*results.methods, *results.peers) if format_of(name) == grid]
            rows += [_row(results, name, f"{FORMATS[grid]}: {_method(results, name)}") for name in names]
    return ["## Four bits", f"`{COMMAND}`", table(("weights: method", *HEADER), rows), *_peers(results)] if rows else []


def _method(results: Results, name: str) -> str:
    method = name.partition("_")[0]
    if name not in results.peers:
        return METHODS[method]
    record = results.by_name[name]
    return f"{PEERS[record['overrides'][0]]} {record['version']}, {PEER_METHODS[method]}"


def _peers(results: Results) -> list[str]:
    """What a reader must know of the rows of other projects; empty without any."""
    if not results.peers:
        return []
    used = []
    for name in results.peers:
        settings = ", ".join(f"{key}={value}" for key, value in results.by_name[name]["settings"].items())
        cpu_minutes = results.by_name[name]["cpu_s"] / 60
        used.append(f"{_method(results, name)}: {settings}; {cpu_minutes:.1f} minutes of processor time.")
    text = f"""Other projects' quantizers ran in a Python of their own (`scripts/study/ptq/peers.py`) on the same 16-bit
    folder and the same rows of calibration; what they exported was opened by lowbit and measured as the rest. Their
    minutes hold loading, quantizing and writing; those of quantize.py also the comparison with the 16-bit model. Scales
    are stored as each project stores them. Set was the grid, and what the row says; the rest are their defaults.
    {" ".join(used)}"""
    return [paragraph(text)]


def _eight_bits(results: Results) -> list[str]:
    rows = [_row(results, name, label) for name, label in INT8.items() if name in results.by_name]
    lines = []
    for name in [name for name in ("int8_dynamic", "smoothquant") if name in results.by_name]:
        notes = results.by_name[name]["notes"]
        tokens = sum("a scale a token: static" in note and "16 bits" not in note for note in notes)
        floats = sum("inputs in 16 bits" in note for note in notes)
        lines.append(f"method={name}: {tokens} layers fell back to a scale a token, {floats} to 16-bit inputs")
    text = f"""Where rounding its inputs leaves less of a layer's product than `min_signal` (36 dB), a static scale
    becomes a scale a token, and that 16-bit inputs. {"; ".join(lines)}."""
    return ["## Eight bits", table(("", *HEADER), rows), paragraph(text)] if rows else []


def _gguf(results: Results) -> list[str]:
    rows = []
    for name, (kind, maker) in results.gguf.items():
        record = results.by_name[name]
        size = f"{record['file_bytes'] / 1e6:.1f}"
        rows.append([kind, MAKERS[maker], f"{record['perplexity']:.4f}", size, f"{record['seconds']:.1f}"])
    versions = sorted({results.by_name[name]["llama_cpp"] for name in results.gguf})
    text = f"""Perplexity over the same tokens in llama.cpp (llama-cpp-python {", ".join(versions)}), whose products
    round inputs to 8 bits for most types. Rows of 576 weights hold no block of 256, so that most tensors of a K type
    fall back to 32-blocks, for both alike. Seconds: without the 16-bit file that llama.cpp's quantizer reads; with an
    importance matrix the calibration is part of them."""
    header = ("type", "quantized by", "perplexity", "MB", "seconds")
    return ["## GGUF", f"`{COMMAND} --only gguf`", paragraph(text), table(header, rows)] if rows else []
