"""What the figures say: the study's bars, and what the papers let one expect against what was found."""

import statistics

from study.adapters.results import Results
from study.document import Finding
from study.records import mean_deviation

DEVIATIONS = 2
"""Two means differ if they are more than so many standard deviations of a difference of two runs apart."""
SMALL = 2.0
"""Percent of the held-out loss by which methods of one codebook may differ and the difference is still called small."""


def bars(results: Results) -> list[Finding]:
    """The bars whose cells are there."""
    found = [*_lower_at_every_alpha(results, "nf3"), *_lower_at_every_alpha(results, "nf2")]
    low, plain = results.losses("loftq5_nf2"), results.losses("qlora_nf2")
    if _has_deviations(low, plain):
        lower, deviation = _difference(plain, low)
        claim = f"LoftQ (T=5) at 2 bits ends below QLoRA at 2 bits by more than {DEVIATIONS} deviations"
        figures = f"{_mean(low)} against {_mean(plain)}: {_change(lower, deviation)}"
        found.append((claim, figures, lower > DEVIATIONS * deviation))
    if (exact := results.losses("lora_16bit")) and (nf4 := results.losses("qlora_nf4")):
        above = 100 * (statistics.mean(nf4) / statistics.mean(exact) - 1)
        claim = "QLoRA NF4 ends within 2 % of the held-out loss of 16-bit LoRA"
        found.append((claim, f"{_mean(nf4)} against {_mean(exact)}: {above:+.2f} %", above <= 2))
    return found


def _lower_at_every_alpha(results: Results, codebook: str) -> list[Finding]:
    plain, found = results.starts.get(f"start_{codebook}_plain"), []
    for method, label in (("loftq1", "T=1"), ("loftq5", "T=5"), ("loftq5c", "T=5, calibrated,")):
        points = results.starts.get(f"start_{codebook}_{method}")
        if plain and points:
            before, after = plain[0]["perplexity"], [point["perplexity"] for point in points]
            claim = f"LoftQ {label} lowers the initial perplexity at {codebook[2]} bits at every alpha"
            found.append((claim, f"{before:.5g} to {min(after):.5g} .. {max(after):.5g}", max(after) < before))
    return found


def expectations(results: Results) -> list[Finding]:
    """What the papers let one expect, where the cells are there."""
    found = _ranking_of_formats(results)
    for codebook in ("nf4", "nf3", "nf2"):
        for iterations in (1, 5):
            found += _loftq(results, codebook, iterations)
    plain = results.losses("qlora_nf4")
    relatives = {"pissa": "PiSSA", "eva": "EVA", "dora": "DoRA", "rslora": "rsLoRA"}
    relatives |= {"pissa_slow": "PiSSA at lr / 4", "eva_slow": "EVA at lr / 4"}
    for name, label in relatives.items():
        if _has_deviations(plain, other := results.losses(f"{name}_nf4")):
            lower, deviation = _difference(plain, other)
            percent = 100 * lower / statistics.mean(plain)
            figures = f"{_change(lower, deviation)} ({-percent:+.2f} %)"
            found.append((f"{label} differs from QLoRA NF4 by less than {SMALL:g} %", figures, abs(percent) < SMALL))
    return found


def _ranking_of_formats(results: Results) -> list[Finding]:
    names = ("qlora_nf4", "qlora_fp4", "qlora_int4")
    if not all(name in results.trained for name in names):
        return []
    first = [results.trained[name][0] for name in names]
    measures = {
        "error of the weights": [statistics.mean(record["layer_errors"].values()) for record in first],
        "initial perplexity": [record["start_perplexity"] for record in first],
        "held-out loss at start": [record["start_loss"] for record in first],
        "held-out loss after training": [statistics.mean(results.losses(name)) for name in names],
    }
    return [
        (f"NF4 below FP4 below INT4: {what}", " / ".join(f"{value:.4g}" for value in values), values == sorted(values))
        for what, values in measures.items()
    ]


def _loftq(results: Results, codebook: str, iterations: int) -> list[Finding]:
    plain, other = results.losses(f"qlora_{codebook}"), results.losses(f"loftq{iterations}_{codebook}")
    if not _has_deviations(plain, other):
        return []
    lower, deviation = _difference(plain, other)
    bits = int(codebook[2])
    expected = "within noise of QLoRA" if bits == 4 else "below QLoRA"
    holds = abs(lower) <= DEVIATIONS * deviation if bits == 4 else lower > DEVIATIONS * deviation
    return [(f"LoftQ T={iterations} at {bits} bits ends {expected}", _change(lower, deviation), holds)]


def _has_deviations(*losses: list[float]) -> bool:
    return all(len(each) > 1 for each in losses)


def _mean(losses: list[float]) -> str:
    return f"{statistics.mean(losses):.4f}"


def _change(lower: float, deviation: float) -> str:
    return f"{abs(lower):.4f} {'lower' if lower > 0 else 'higher'}, deviation of the difference {deviation:.4f}"


def _difference(first: list[float], second: list[float]) -> tuple[float, float]:
    """Mean of first - second, and the standard deviation of the difference of two runs, taken as independent.

    Runs of one seed share their rows, so differences seed by seed vary less; independence is the stricter reading.
    """
    (mean, deviation), (other_mean, other_deviation) = mean_deviation(first), mean_deviation(second)
    return mean - other_mean, (deviation**2 + other_deviation**2) ** 0.5
