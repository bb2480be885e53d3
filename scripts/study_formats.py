"""The study of formats: one model in 16 bits, INT8, INT4, NF4, GGUF and after QAT; quality, size, and under load.

python scripts/study_formats.py [--work DIR]          about an hour on two cores; resumable
python scripts/study_formats.py --only gptq,awq       cells by name, or by the beginning of it
python scripts/study_formats.py --report              writes docs/quality_formats.md
python scripts/study_formats.py --quick               a tiny random model: proves this script

QAT is measured where LOWBIT_STUDY_QAT_RUN names a finished run on the same model. llama.cpp comes with the `bench`
extra. Cells of a load want a quiet machine: --only with their names, --jobs 1.
"""

import random
from pathlib import Path
from typing import Any

from study.command import Study
from study.formats.cells import CALIBRATION_FILE, FULL, QUICK, TEST_FILE, chosen_cells

_SOURCE = "WikiText-2, word level, for example github.com/pytorch/examples, word_language_model/data/wikitext-2"
SOURCES = {CALIBRATION_FILE: f"{_SOURCE}, valid.txt", TEST_FILE: f"{_SOURCE}, test.txt"}


def make_data(folder: Path) -> None:
    """Words in an order that can be learned."""
    draw = random.Random(0)
    for name in SOURCES:
        words = " ".join(draw.choice(["a b c d", "robe film", "of the"]) for _ in range(2000))
        (folder / name).write_text(words)


def say(figures: dict[str, Any]) -> str:
    if "perplexity" in figures:
        return "; ".join(f"{name} {figures[name]['value']:.4g}" for name in ("perplexity", "kl", "same_token"))
    return f"{figures['output_tokens_per_s']:.1f} tokens/s, TTFT p50 {figures['ttft_ms']['p50']:.0f} ms"


STUDY = Study(Path(__file__), "study.formats", FULL, QUICK, chosen_cells, SOURCES, make_data, say)

if __name__ == "__main__":
    STUDY.main(__doc__)
