"""The study of post-training quantization: every method on SmolLM2-135M, against the 16-bit model and other projects.

python scripts/study_ptq.py [--work DIR]              about two hours on two cores; resumable
python scripts/study_ptq.py --only gptq,rtn           cells by name, or by the beginning of it
python scripts/study_ptq.py --report                  writes docs/quality_ptq.md
python scripts/study_ptq.py --quick                   a tiny random model: proves this script

GPTQModel and llm-compressor are measured where LOWBIT_STUDY_GPTQMODEL and LOWBIT_STUDY_LLMCOMPRESSOR name a Python that
has them; each wants an environment of its own. llama.cpp comes with the `bench` extra.
"""

import random
from pathlib import Path
from typing import Any

from study.command import Study
from study.ptq.cells import CALIBRATION_FILE, FULL, QUICK, TEST_FILE, chosen_cells

_SOURCE = "WikiText-2, word level, for example github.com/pytorch/examples, word_language_model/data/wikitext-2"
SOURCES = {CALIBRATION_FILE: f"{_SOURCE}, valid.txt", TEST_FILE: f"{_SOURCE}, test.txt"}


def make_data(folder: Path) -> None:
    """Words in an order that can be learned."""
    draw = random.Random(0)
    for name in SOURCES:
        words = " ".join(draw.choice(["a b c d", "robe film", "of the"]) for _ in range(2000))
        (folder / name).write_text(words)


def say(figures: dict[str, Any]) -> str:
    shown = {"perplexity": ".5g", "kl": ".4f", "same_token": ".3f", "exact": ".3f", "seconds": ".0f"}
    return "; ".join(f"{name} {figures[name]:{form}}" for name, form in shown.items() if name in figures)


STUDY = Study(Path(__file__), "study.ptq", FULL, QUICK, chosen_cells, SOURCES, make_data, say)

if __name__ == "__main__":
    STUDY.main(__doc__)
