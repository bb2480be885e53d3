"""Where a run comes from: its data, its settings, and how to repeat it."""

from collections.abc import Iterator
from typing import Any

from trainer.data.inspection.histogram import histogram
from trainer.evaluate.report.gather import MAX_BAD, RunStory
from trainer.page.document import table, tiles
from trainer.page.text import escaped


def data(story: RunStory) -> Iterator[str]:
    """Counts, lengths, what was left out, and rows with what is learned of them marked."""
    known = story.record.get("data") or {}
    if not known and not story.bad_rows:
        return
    yield "<h2>Data</h2>"
    if known:
        yield tiles(_counts(known))
        names = ("source", "what a row is", "rows read", "rows of tokens", "tokens", "learned", "cut", "duplicates")
        keys = (
            *("description", "source_rows", "rows", "tokens", "trained_tokens"),
            *("truncated_rows", "duplicates"),
        )
        yield table("Sources", names, [(name, *(each.get(key, "") for key in keys)) for name, each in _sources(known)])
        if bars := known.get("lengths"):
            limit = story.settings.get("data.max_seq_len") or bars[-1][1]
            yield f'<h3>Lengths, in tokens</h3><figure class="panel">{histogram(bars, limit)}</figure>'
        yield table("Left out, by reason", ("why", "rows"), list((known.get("bad") or {}).items()))
    faults = [(row.get("where", ""), row.get("kind", ""), row.get("what", "")) for row in story.bad_rows[:MAX_BAD]]
    if faults:
        more = f" (the first {MAX_BAD} of {len(story.bad_rows):,})" if len(story.bad_rows) > MAX_BAD else ""
        listed = table("", ("where", "kind", "what"), faults)
        yield f"<details><summary>Rows that were left out{more}</summary>{listed}</details>"
    yield from _examples(known.get("examples") or [])


def _sources(known: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list((known.get("sources") or {}).items())


def _counts(known: dict[str, Any]) -> Iterator[tuple[str, object, object]]:
    reports = [report for _, report in _sources(known)]
    total = {key: sum(each.get(key, 0) for each in reports) for key in ("tokens", "trained_tokens", "source_rows")}
    if known.get("streamed"):
        yield "rows", "streamed", f"{known.get('rows', 0):,} were looked at first"
    else:
        yield "rows to train on", f"{known.get('rows', 0):,}", f"of {total['source_rows']:,} read"
    copies = known.get("copies")
    yield (
        "held out",
        f"{known.get('held_out_rows', 0):,}",
        "" if copies is None else f"{copies:,} copies of them dropped",
    )
    if total["tokens"]:
        learned = f"{total['trained_tokens'] / total['tokens']:.1%} of them learned"
        yield "tokens", f"{total['tokens']:,}", learned
    yield "left out", f"{sum((known.get('bad') or {}).values()):,}", "rows that cannot be trained on"


def _examples(examples: list[dict[str, Any]]) -> Iterator[str]:
    if examples:
        yield (
            '<h3>Rows as the model reads them</h3>\n<p class="muted legend"><mark>learned</mark>, and what is only '
            "read</p>"
        )
    for example in examples:
        documents = "".join(map(_document, example.get("documents", [])))
        head = f"<b>{escaped(example.get('origin', ''))}</b>"
        yield f'<article class="panel"><header>{head}</header>{documents}</article>'


def _document(document: dict[str, Any]) -> str:
    side = f'<p class="side">{escaped(document["title"])}</p>' if document.get("title") else ""
    parts = ((escaped(part["text"]), part["is_target"]) for part in document.get("stretches", []))
    text = "".join(f"<mark>{text}</mark>" if is_target else text for text, is_target in parts)
    return f'{side}<div class="text" dir="auto">{text}</div>'


def settings(story: RunStory) -> Iterator[str]:
    """What differs from the defaults, then all of them."""
    if not story.settings:
        return
    changed = [(key, shown(value), shown(default)) for key, (value, default) in story.changed().items()]
    yield table("Settings that are not the default", ("key", "value", "default"), changed)
    every = table("", ("key", "value"), [(key, shown(value)) for key, value in story.settings.items()])
    yield f"<details><summary>All settings</summary>{every}</details>"


def shown(value: Any) -> str:
    """A setting as one writes it on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{','.join(map(shown, value))}]" if isinstance(value, list) else str(value)


def repeat(story: RunStory) -> Iterator[str]:
    """The command, and what has to be the same for the same numbers."""
    yield "<h2>How to repeat it</h2>"
    for session in story.sessions:
        where = f" from step {session['step']}" if session.get("step") else ""
        yield f'<p class="side">{escaped(session.get("began", ""))}{where}, {escaped(session.get("machine", ""))}</p>'
        yield f'<pre class="panel">{escaped(session.get("command") or _by_python())}</pre>'
    last = story.sessions[-1] if story.sessions else {}
    rows = [("seed", story.settings.get("seed", "")), *_identity(story)]
    rows += [(f"version of {name}", number) for name, number in (last.get("versions") or {}).items()]
    yield table("", ("what", "is"), [(name, str(value)) for name, value in rows if value not in ("", None)])


def _by_python() -> str:
    return "Python code started it: finetune(load_config(...)) with the settings above"


def _identity(story: RunStory) -> Iterator[tuple[str, Any]]:
    labels = {
        "data_sha256": "data, SHA-256",
        "base_sha256": "base, SHA-256",
        "dtype": "computed in",
        "device": "device",
        "kernels": "kernels",
        "world_size": "processes",
        "max_pass_tokens": "tokens of a pass",
    }
    for key, label in labels.items():
        yield label, story.state.get(key, "")
