"""The study of adapters: LoRA over 16, 4, 3 and 2 bits, LoftQ and other starting points, on SmolLM2-135M.

python scripts/study_adapters.py [--work DIR]                 about 80 minutes on two quiet cores; resumable
python scripts/study_adapters.py --only loftq5_nf2,start      cells by name, or by the beginning of it
python scripts/study_adapters.py --only cost                  time and memory, on a machine that does nothing else
python scripts/study_adapters.py --only long                  16 bits and NF4 with eight times the steps
python scripts/study_adapters.py --report                     writes docs/quality_adapters.md and docs/plots/
python scripts/study_adapters.py --quick                      a tiny random model: proves this script
"""

import json
import random
from pathlib import Path
from typing import Any

from study.adapters.cells import FULL, QUICK, TEST_FILE, TEXT_FILE, TRAIN_FILE, chosen_cells
from study.command import Study

SOURCES = {
    TRAIN_FILE: "github.com/openai/grade-school-math, grade_school_math/data/train.jsonl",
    TEST_FILE: "github.com/openai/grade-school-math, grade_school_math/data/test.jsonl",
    TEXT_FILE: "WikiText-2, word level, for example github.com/pytorch/examples, word_language_model/data/wikitext-2",
}


def make_data(folder: Path) -> None:
    """Sums as GSM8K writes them, and words."""
    draw = random.Random(0)
    for name, num_rows in ((TRAIN_FILE, 64), (TEST_FILE, 16)):
        pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(num_rows)]
        rows = [{"question": f"What is {a} + {b}?", "answer": f"<<{a}+{b}={a + b}>>\n#### {a + b}"} for a, b in pairs]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / TEXT_FILE).write_text(" ".join(draw.choice(["a", "of", "robe", "film"]) for _ in range(2000)))


def say(figures: dict[str, Any]) -> str:
    shown = {
        "start_loss": ".4f",
        "loss": ".4f",
        "perplexity": ".5g",
        "right": "d",
        "setup_s": ".0f",
        "tokens_per_s": ".0f",
    }
    texts = [f"{name} {figures[name]:{form}}" for name, form in shown.items() if name in figures]
    texts += [f"{loss:.4f} at step {step}" for step, loss in figures.get("curve", [])]
    texts += [f"alpha {point['alpha']}: perplexity {point['perplexity']:.5g}" for point in figures.get("points", [])]
    return "; ".join(texts)


STUDY = Study(Path(__file__), "study.adapters", FULL, QUICK, chosen_cells, SOURCES, make_data, say)

if __name__ == "__main__":
    STUDY.main(__doc__)
