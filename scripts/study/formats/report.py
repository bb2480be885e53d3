"""docs/quality_formats.md from the results: one table of quality, one of serving."""

from pathlib import Path
from typing import Any

from study.document import gaps, origin, paragraph, table, write_document
from study.formats.cells import FLOORS, Sizes, formats, study_cells
from study.records import Records

from trainer.evaluate.quality.figures import bounds

COMMAND = "python scripts/study_formats.py"
LABELS = {
    "16bit": "16 bits",
    "int8_static": "INT8, static INT8 inputs (smoothquant), compressed-tensors",
    "int8_dynamic": "INT8, dynamic INT8 inputs, compressed-tensors",
    "awq_int4": "INT4 g32 with zero points, AWQ",
    "gptq_int4": "INT4 g32, GPTQ",
    "gguf_q4_0": "GGUF Q4_0",
    "gguf_q4_k_m": "GGUF Q4_K_M",
    "nf4_rtn": "NF4, rounded to nearest, bitsandbytes",
    "nf4_gptq": "NF4, GPTQ, bitsandbytes",
    "qat": "INT4 g32, quantization-aware training",
}
PROGRAMS = {"server": "server", "llama_cpp": "llama.cpp"}


def write_report(records: Records, sizes: Sizes, docs: Path) -> None:
    """Write the document into `docs`.

    raises  ValueError if nothing was measured
    """
    cells = study_cells(sizes)
    found = {name: many[0] for name, many in records.of(cells).items()}
    if not found:
        raise ValueError(f"{records.path} holds no result of these sizes; run {COMMAND} first")
    missing = [cell.name for cell in cells if not records.has(cell)]
    sections = [
        "# Quality of formats",
        paragraph(f"One model in every format that it is shipped in. {origin(COMMAND, list(found.values()))}"),
        paragraph(_protocol(found, sizes)),
        *(paragraph(text) for text in gaps(missing, records.failures(cells))),
        *_quality(found, sizes),
        *_load(found, sizes),
    ]
    write_document(docs / "quality_formats.md", sections)
    print(docs / "quality_formats.md")


def _protocol(found: dict[str, dict[str, Any]], sizes: Sizes) -> str:
    quality = [record for record in found.values() if record["kind"] == "quality"]
    rule = f" {quality[0]['protocol']['rule'].capitalize()}. [..] are {quality[0]['intervals']}." if quality else ""
    return (
        f"Model {sizes.model}; calibration {sizes.rows} rows of {sizes.row_len} tokens of WikiText-2's validation "
        f"text. {sizes.windows} windows of {sizes.window_len} tokens of its test text, {sizes.prompts} questions of "
        f"pydocs answered greedily with up to {sizes.answer_len} tokens.{rule} So few rows tell formats apart only "
        "where their intervals do, or the ratio's, whose draws are the same for both models. KL is from the 16-bit "
        "model in our server to the format in its program, in nats a token. The floor is the 16-bit model against "
        "itself: by the candidate's program, in other batches where that is our server, and in brackets by our module."
    )


def _quality(found: dict[str, dict[str, Any]], sizes: Sizes) -> list[str]:
    rows = []
    for name in formats(sizes):
        for path, program in PROGRAMS.items():
            record = found.get(f"{name}@{path}")
            if record is not None:
                floors = next((found[cell]["floors"] for cell in FLOORS if cell in found and cell.endswith(path)), [])
                rows.append([LABELS[name], program, *_quality_row(record, floors)])
    if not rows:
        return []
    header = ["format", "computed by", "MB on disk", "perplexity", "times the original's", "KL", "KL, 99 %", "KL floor"]
    header += ["same token %", "exact answers %"]
    return ["## Quality", f"`{COMMAND}`", table(header, rows)]


def _quality_row(record: dict[str, Any], floors: list[dict[str, Any]]) -> list[str]:
    return [
        "-" if record["bytes_on_disk"] is None else f"{record['bytes_on_disk'] / 1e6:.1f}",
        bounds(record["perplexity"], ".2f"),
        bounds(record["perplexity_ratio"], ".3f"),
        bounds(record["kl"], ".4f"),
        bounds(record["kl_99"], ".2f"),
        _floor(floors),
        bounds(record["same_token"], ".1f", scale=100),
        bounds(record["prompts"]["exact"], ".0f", scale=100),
    ]


def _floor(floors: list[dict[str, Any]]) -> str:
    values = [f"{floor['kl']['value']:.4f}" if "kl" in floor else "-" for floor in floors]
    return values[0] if len(values) == 1 else f"{values[0]} ({values[1]})" if values else ""


def _load(found: dict[str, dict[str, Any]], sizes: Sizes) -> list[str]:
    rows = []
    for name in formats(sizes):
        record = found.get(f"{name}@load")
        if record is not None:
            rows.append([LABELS[name], *_load_row(record)])
    if not rows:
        return []
    header = ["format", "requests answered", "output tokens/s", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms"]
    header += ["peak KV, MB", "resident, MB", "tokens/s, all at once", "price of a million output tokens"]
    text = (
        f"{sizes.requests} requests of {sizes.input_len} tokens with {sizes.output_len} to answer, {sizes.rate:g} a "
        f"second as a Poisson process (`scripts/bench_load.py`); our server, one thread. Resident: the server's memory "
        f"after it opened the model, with {_KV_MB} MB of KV cache that fill as they are used. Then the same requests "
        f"all at once: what the server makes where it is never idle, and what a million of its output tokens cost on a "
        f"machine at {sizes.price_per_hour:g} an hour."
    )
    return ["## Under load", paragraph(text), table(header, rows)]


_KV_MB = 268


def _load_row(record: dict[str, Any]) -> list[str]:
    at_once = record["at_once"]
    price = at_once["price_per_million_output_tokens"]
    sizes = [record[key] for key in ("kv_peak_bytes", "resident_bytes")]
    megabytes = ["-" if size is None else f"{size / 1e6:.1f}" for size in sizes]
    return [
        f"{record['completed']} of {record['requests']}",
        f"{record['output_tokens_per_s']:.1f}",
        *(f"{record['ttft_ms'][share]:.0f}" for share in ("p50", "p99")),
        f"{record['tpot_ms']['p50']:.0f}",
        *megabytes,
        f"{at_once['output_tokens_per_s']:.1f}",
        "-" if price is None else f"{price:.2f}",
    ]
