"""What a person reads: the protocol, a table of all candidates, and the prompts where answers part first."""

from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trainer.evaluate.quality.divergence import MARK, WORST
from trainer.evaluate.quality.figures import bounds

Report = dict[str, Any]
_CONTEXT = 60  # characters that are shown of what is the same, before answers part


def print_evaluation(report: Report, console: Console) -> None:
    """report  what `evaluate` returned"""
    protocol = report["protocol"]
    console.print()
    console.print(
        f"{protocol['text']}: {protocol['windows']} windows of {protocol['window']} tokens, "
        f"{'with' if protocol['bos'] else 'without'} a first token; {protocol['rule']}. "
        f"[..] are {report['intervals']}.",
        markup=False,
    )
    console.print(_figures(report))
    for candidate in report["candidates"]:
        for line in _lines(candidate):
            console.print(line, markup=False)
    for candidate in report["candidates"]:
        for pair in _worst(candidate):
            console.print(_side_by_side(candidate["name"], pair))


def _figures(report: Report) -> Table:
    table = Table()
    table.add_column("")
    names = ["MB", "perplexity", "a word", "ratio", "KL", "KL 99 %", "KL max", "floor", "same token %", "recovered %"]
    optional = [name for name in ("prompts", "choices", "gsm8k") if any(name in c for c in report["candidates"])]
    titles = {"prompts": "exact answers %", "choices": "choices right %", "gsm8k": "GSM8K %"}
    for name in [*names, *(titles[name] for name in optional)]:
        table.add_column(name, justify="right")
    original = report["original"]
    label = f"{original['name']} @{original['path']}\n(original)"
    table.add_row(label, *_original_row(original), *(_original_share(report, name) for name in optional))
    for candidate in report["candidates"]:
        label = f"{candidate['name']} @{candidate['path']}"
        if "skipped" in candidate:
            table.add_row(label, "skipped")
            continue
        table.add_row(label, *_row(candidate), *(_share(candidate.get(name), name) for name in optional))
    return table


def _original_row(original: Report) -> list[str]:
    return [
        _megabytes(original["bytes_on_disk"]),
        _cell(original["perplexity"], ".2f"),
        _short(original["perplexity_word"]),
        *([""] * 7),
    ]


def _row(candidate: Report) -> list[str]:
    recovered = candidate["recovered"]
    return [
        _megabytes(candidate["bytes_on_disk"]),
        _cell(candidate["perplexity"], ".2f"),
        _short(candidate["perplexity_word"]),
        _cell(candidate["perplexity_ratio"], ".3f"),
        _cell(candidate["kl"], ".4f"),
        _cell(candidate["kl_99"], ".2f"),
        f"{candidate['kl_max']['value']:.2f}",
        _floor(candidate),
        _cell(candidate["same_token"], ".1f", scale=100),
        "-" if recovered is None else _cell(recovered, ".0f", scale=100),
    ]


def _cell(figure: dict[str, float | None], form: str, *, scale: float = 1.0) -> str:
    """The interval below the figure."""
    return bounds(figure, form, scale=scale).replace(" [", "\n[")


def _short(figure: dict[str, float | None]) -> str:
    return "-" if figure["value"] is None else f"{figure['value']:.4g}"


def _floor(candidate: Report) -> str:
    """The largest of what the original differs from itself."""
    found = [floor["kl"]["value"] for floor in candidate["floors"] if "kl" in floor]
    return f"{max(found):.1e}" if found else "-"


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.1f}"


_MAIN = {"prompts": "exact", "choices": "accuracy", "gsm8k": "exact_match"}


def _share(figures: Report | None, name: str) -> str:
    return "-" if figures is None else _cell(figures[_MAIN[name]], ".1f", scale=100)


def _original_share(report: Report, name: str) -> str:
    """What the original scores, as the first candidate that was compared has it."""
    key = f"{_MAIN[name]}_original"
    found = [c[name][key] for c in report["candidates"] if name in c and key in c[name]]
    return _cell(found[0], ".1f", scale=100) if found else ""


def _lines(candidate: Report) -> list[str]:
    """What the table has no place for."""
    if "skipped" in candidate:
        return [f"{candidate['name']} is skipped: {candidate['skipped']}"]
    lines = [f"{candidate['name']}: {candidate['kind']}, {candidate['computed_by']}"]
    lines += [f"  floor, {floor['how']}: {_floor_text(floor)}" for floor in candidate["floors"]]
    if candidate["recovered"] is not None:
        lines.append(f"  recovered: of the loss that is added by {candidate['recovered_against']}")
    else:
        lines.append(f"  recovered: nothing to compare with; {candidate['recovered_against']}")
    flips = {"prompts": None, "choices": "questions", "gsm8k": "questions"}
    for name in (name for name, unit in flips.items() if unit and name in candidate):
        own = candidate[name]
        if "right_to_wrong" in own:
            both = [bounds(own[key], ".1f", scale=100) for key in ("right_to_wrong", "wrong_to_right")]
            lines.append(f"  {name}: of {own['questions']}, right to wrong {both[0]} %, wrong to right {both[1]} %")
    if "prompts" in candidate:
        own = candidate["prompts"]
        parted = own["first_divergence_shares"]
        where = ", ".join(f"{share} by token {place:.0f}" for share, place in parted.items())
        common = bounds(own["common"], ".0f", scale=100)
        lines.append(f"  prompts: common beginning {common} % of an answer; of those that part, {where or 'none'}")
    for task, metrics in candidate.get("tasks", {}).items():
        lines += [f"  {task}, {name}: {_task(figures)}" for name, figures in metrics.items()]
    return lines


def _floor_text(floor: Report) -> str:
    if "skipped" in floor:
        return f"not measured: {floor['skipped']}"
    exact = f", exact answers {bounds(floor['exact'], '.0f', scale=100)} %" if "exact" in floor else ""
    same = bounds(floor["same_token"], ".2f", scale=100)
    return f"KL {bounds(floor['kl'], '.2g')}, same token {same} %{exact} ({floor['computed_by']})"


def _task(figures: Report) -> str:
    if "interval" not in figures:
        return f"{figures['value']:.4f}, the original {figures['original']:.4f}"
    own, theirs = (bounds(figures[name], ".3f") for name in ("interval", "interval_original"))
    return f"{own}, the original {theirs}, difference {bounds(figures['difference'], '+.3f')}"


def _worst(candidate: Report) -> list[Report]:
    if "prompts" not in candidate:
        return []
    parted = [pair for pair in candidate["prompts"]["pairs"] if pair["divergence"] is not None]
    return sorted(parted, key=lambda pair: (pair["divergence"], pair["common"]))[:WORST]


def _side_by_side(name: str, pair: Report) -> Panel:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    table.add_row(Text("original", "bold"), Text(name, "bold"))
    table.add_row(_marked(pair["same"], pair["original"]), _marked(pair["same"], pair["candidate"]))
    title = f"parts at token {pair['divergence']}: {' '.join(pair['prompt'].split())[:90]}"
    return Panel(Group(table), title=Text(title), title_align="left")


def _marked(same: str, rest: str) -> Text:
    """What is the same in grey, the mark, and the rest."""
    same = same if len(same) <= _CONTEXT else "…" + same[-_CONTEXT:]
    return Text.assemble((same, "dim"), (MARK, "bold red"), (rest, "bold"))
