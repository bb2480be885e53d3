"""What became of the model: figures before and after, fidelity with intervals, answers side by side."""

from collections.abc import Iterator
from typing import Any

from trainer.evaluate.report.answers import compared, shared_words
from trainer.evaluate.report.charts import interval
from trainer.evaluate.report.gather import RunStory
from trainer.evaluate.report.scales import number
from trainer.figures import Figure, figures_of
from trainer.page.text import escaped

FIDELITY = {
    "kl": "KL from the original, nats a token",
    "kl_99": "  what 1 % of the tokens exceed",
    "kl_max": "  the largest",
    "same_token": "share with the same likeliest token",
    "right_to_wrong": "share that became wrong",
    "wrong_to_right": "share that became right",
    "flips": "share that changed sides",
    "loss_added": "loss added, nats a token",
    "perplexity_ratio": "perplexity, of the original's",
    "perplexity_original": "perplexity of the original",
    "perplexity": "perplexity",
}
_ONE_IF_EQUAL = ("same_token", "perplexity_ratio")
"""Of two models that are one these figures are 1, and the others 0."""


def figures_or_none(story: RunStory) -> list[Figure]:
    """Rows of base against tuned; none of a run that did not end, or that an older version wrote."""
    try:
        return figures_of(story.metrics, story.method)
    except KeyError:
        return []


def outcome(story: RunStory) -> Iterator[str]:
    """The table of base against tuned, and what quantization did."""
    rows = figures_or_none(story)
    if rows:
        metrics = story.metrics
        heading = f"Before and after: {metrics.get('eval_rows', 0):,} held-out rows"
        head = "".join(f"<th{_right(name)}>{name}</th>" for name in ("", "base", "tuned", "change"))
        body = "".join(map(_figure, rows))
        yield f"<h2>{escaped(heading)}</h2>"
        yield f'<div class="panel"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    yield from fidelity(story.metrics.get("fidelity"))
    yield from _codes(story.metrics.get("qat"), story.merged)


def _right(name: str) -> str:
    return ' class="number"' if name else ""


def _figure(figure: Figure) -> str:
    label, base, tuned = figure
    change = ""
    if base is not None and tuned is not None:
        change = f"{100 * (tuned / base - 1):+.1f} %" if label == "perplexity" and base else f"{tuned - base:+.4f}"
    lower_is_better = label == "perplexity" or label.startswith("loss")
    kind = f" {'better' if change.startswith('-') else 'worse'}" if change and lower_is_better and tuned != base else ""
    cells = "".join(f'<td class="number">{"" if each is None else number(each)}</td>' for each in (base, tuned))
    return f'<tr><td>{escaped(label.strip())}</td>{cells}<td class="number{kind}">{change}</td></tr>'


def fidelity(found: Any) -> Iterator[str]:
    """Figures of a model against the one that it was made from, with their intervals where they have some.

    found  what metrics.json has as `fidelity`: name -> value, or value, low and high; `compared`, `tokens` or `skipped`
    """
    if not isinstance(found, dict):
        return
    title = "Fidelity"
    if isinstance(found.get("skipped"), str):
        yield f'<h2>{title}</h2>\n<p class="panel muted">Not measured: {escaped(found["skipped"])}</p>'
        return
    rows = "".join(_fidelity_row(name, value) for name, value in found.items() if name not in ("compared", "tokens"))
    if not rows:
        return
    told = ", ".join(
        part
        for part in (str(found.get("compared", "")), f"{found['tokens']:,} tokens" if "tokens" in found else "")
        if part
    )
    note = "with 95 % intervals where they are given; the thin line is where nothing would differ"
    yield f'<h2>{title}</h2>\n<p class="muted legend">{escaped(told)}; {note}.</p>'
    yield f'<div class="panel"><table><tbody>{rows}</tbody></table></div>'


def _fidelity_row(name: str, value: Any) -> str:
    low = high = None
    if isinstance(value, dict):
        value, low, high = (value.get(key) for key in ("value", "low", "high"))
    if not isinstance(value, int | float):
        return ""
    label, drawn, ends = FIDELITY.get(name, name.replace("_", " ")).strip(), "", ""
    if isinstance(low, int | float) and isinstance(high, int | float):
        drawn = interval(low, value, high, reference=float(name in _ONE_IF_EQUAL))
        ends = f"{number(low)} to {number(high)}"
    return f'<tr><td>{escaped(label)}</td><td class="number">{number(value)}</td><td>{ends}</td><td>{drawn}</td></tr>'


def _codes(qat: Any, merged: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Quantization-aware training: which codes, and how far the programs that compute them are apart; merges."""
    rows: list[tuple[str, str]] = []
    if isinstance(qat, dict):
        rows = [("quantized", f"{qat.get('schemes')}, {number(qat.get('bits_per_weight'))} bits a weight")]
        if qat.get("recovered") is not None:
            rows.append(("recovered of what rounding lost", f"{100 * qat['recovered']:.0f} %"))
        for name, apart in (qat.get("agreement") or {}).items():
            said = apart if isinstance(apart, str) else f"{number(apart['mean'])} mean, {number(apart['max'])} at most"
            rows.append((f"{name} from the trained model, nats a token", said))
        rows.append(("exported codes, SHA-256", str(qat.get("packed_sha256"))))
    for name, merge in merged.items():
        if isinstance(left := merge.get("update_survived"), float):
            rows.append((f"update that is left in {name}", f"{100 * left:.2f} %"))
    if rows:
        body = "".join(f"<tr><td>{escaped(name)}</td><td>{escaped(said)}</td></tr>" for name, said in rows)
        yield f'<h2>What is exported</h2>\n<div class="panel"><table><tbody>{body}</tbody></table></div>'


def answers(story: RunStory) -> Iterator[str]:
    """Held-out prompts with the answers of base and tuned model, differences marked."""
    samples = story.record.get("answers") or []
    if not samples:
        return
    yield (
        '<h2>Answers to held-out prompts</h2>\n<p class="muted legend">Greedy. Marked is what only '
        '<mark class="gone">the base</mark> or only <mark class="new">the tuned model</mark> says.</p>'
    )
    yield from map(_sample, samples)


def _sample(sample: dict[str, Any]) -> str:
    base, tuned = sample.get("base"), str(sample.get("tuned", ""))
    columns = [("held-out answer", escaped(sample.get("reference", "")))]
    tag = ""
    if base is None:
        columns.append(("tuned", escaped(tuned)))
    else:
        left, right = compared(base, tuned)
        columns += [("base", left), ("tuned", right)]
        shared = shared_words(base, tuned)
        parts = f"part after {shared} words" if shared != 1 else "part after 1 word"
        tag = f'<span class="tag">{"equal" if base == tuned else parts}</span>'
    body = "".join(
        f'<div><p class="side">{name}</p><div class="text" dir="auto">{text}</div></div>' for name, text in columns
    )
    prompt = f'<div class="text prompt" dir="auto">{escaped(sample.get("prompt", ""))}</div>'
    return f'<article class="panel"><header>{tag}</header>{prompt}<div class="columns">{body}</div></article>'
