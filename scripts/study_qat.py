"""The study of quantization-aware training: INT4 and NF4, whole models, adapters and blocks, on SmolLM2-135M.

python scripts/study_qat.py [--work DIR]              some hours on two cores; resumable
python scripts/study_qat.py --only qad_g32,rounded    cells by name, or by the beginning of it
python scripts/study_qat.py --only cost               time and memory of a step, on a machine that does nothing else
python scripts/study_qat.py --report                  writes docs/quality_qat.md
python scripts/study_qat.py --quick                   a tiny random model: proves this script
"""

import random
from pathlib import Path
from typing import Any

from study.command import Study
from study.qat.cells import FULL, QUICK, TEST_FILE, TRAIN_FILE, chosen_cells

_SOURCE = "WikiText-2, word level, for example github.com/pytorch/examples, word_language_model/data/wikitext-2"
SOURCES = {TRAIN_FILE: f"{_SOURCE}, valid.txt", TEST_FILE: f"{_SOURCE}, test.txt"}


def make_data(folder: Path) -> None:
    """Words in an order that can be learned."""
    draw = random.Random(0)
    for name in SOURCES:
        words = " ".join(draw.choice(["a b c d", "robe film", "of the"]) for _ in range(2000))
        (folder / name).write_text(words)


def say(figures: dict[str, Any]) -> str:
    shown = {"perplexity": ".5g", "kl": ".4f", "same_token": ".3f", "run_s": ".0f", "tokens_per_s": ".0f"}
    texts = [f"{name} {figures[name]:{form}}" for name, form in shown.items() if name in figures]
    texts += [f"{name} {loss:.4f}" for name, loss in figures.get("gain", {}).items()]
    return "; ".join(texts)


STUDY = Study(Path(__file__), "study.qat", FULL, QUICK, chosen_cells, SOURCES, make_data, say)

if __name__ == "__main__":
    STUDY.main(__doc__)
