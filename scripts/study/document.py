"""A study's document: text, tables, and the part that is written by hand.

What stands above `BY_HAND` is written anew by each --report; what stands below it is kept.
"""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from study.records import mean_deviation

BY_HAND = "<!-- What stands below this line is written by hand; --report keeps it. -->"
Finding = tuple[str, str, bool]
"""A claim, the figures, and whether they bear it out."""


def write_document(path: Path, sections: Sequence[str]) -> None:
    """Write the document, its part by hand as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = path.read_text(encoding="utf-8").partition(BY_HAND)[2] if path.is_file() else "\n"
    path.write_text("\n\n".join([*sections, BY_HAND]) + kept, encoding="utf-8")


def origin(command: str, records: Sequence[dict[str, Any]]) -> str:
    """By what and where the records were made."""
    dates = sorted({record["date"] for record in records})
    machines = sorted({record["machine"] for record in records})
    versions = sorted({", ".join(f"{k} {v}" for k, v in record["versions"].items()) for record in records})
    days = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
    return f"Written by `{command} --report` from results of {days}; {'; '.join(machines)}; {'; '.join(versions)}."


def gaps(missing: Sequence[str], failures: Sequence[dict[str, Any]]) -> list[str]:
    """What was not measured, and what failed; empty where all is there."""
    failed = "; ".join(f"{record['name']} seed {record['seed']}: {record['error']}" for record in failures)
    return [
        f"**{what}:** {names}." for what, names in (("Not measured", ", ".join(missing)), ("Failed", failed)) if names
    ]


def paragraph(text: str) -> str:
    """Lines of up to 150 characters, as the other documents have them."""
    return textwrap.fill(" ".join(text.split()), width=150, break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """A Markdown table; columns after the first are aligned right if they hold numbers."""
    rule = ["---", *["---:" if numbers else "---"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def spread(values: Sequence[float], form: str, deviation_form: str) -> str:
    """Mean and deviation, or the one value."""
    mean, deviation = mean_deviation(values)
    return f"{mean:{form}} ± {deviation:{deviation_form}}" if len(values) > 1 else f"{mean:{form}}"


def verdicts(title: str, claim: str, found: Sequence[Finding]) -> list[str]:
    """A section of claims, empty without any."""
    rows = [[text, figures, "yes" if holds else "**no**"] for text, figures, holds in found]
    return [f"## {title}", table((claim, "figures", "reached"), rows, numbers=False)] if rows else []
