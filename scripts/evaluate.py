"""What did quantization and training cost? Some models beside the one that they were made from.

    python scripts/evaluate.py run=outputs/ptq/mine against=smollm2_135m
    python scripts/evaluate.py run=<run folder>                                 against what it was made from
    python scripts/evaluate.py run=mine.gguf,mine.gguf@llama_cpp against=org/name text=wiki.txt windows=24 window=1024
    python scripts/evaluate.py run=<run folder> against=org/name gsm8k=test.jsonl shots=4 shots_from=train.jsonl
    python scripts/evaluate.py run=<run folder> tasks=shipped task_data=['gsm8k=test.jsonl']
    python scripts/evaluate.py --help                                           every key

Perplexity and divergence token by token, greedy answers, multiple choice, GSM8K, tasks of lm-evaluation-harness; each
figure with its interval, and with what the original differs from itself. The last line of the output is JSON. Exits
with 2 after a user's mistake.
"""

import json
import logging
import os
import sys
from pathlib import Path

# lm-eval imports Hugging Face's `evaluate`, which this file is called like: its folder is not searched for modules.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]

from rich.console import Console  # noqa: E402

from trainer.config.errors import UserError  # noqa: E402
from trainer.config.evaluation import EvaluationConfig  # noqa: E402
from trainer.settings import describe, read_settings  # noqa: E402

_EXAMPLE = "tiny"
_HELP = """lowbit evaluate: what did quantization and training cost?

    python scripts/evaluate.py run=<model>,... against=<original> [key=value ...]

Every key with its default:

%s
"""


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_HELP % describe(EvaluationConfig(run=_EXAMPLE)).replace(f"run = {_EXAMPLE}", "run = <required>", 1))
        return
    _quiet()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        config = read_settings(EvaluationConfig, arguments)
        from trainer.evaluate.quality.evaluation import (
            evaluate,  # here, so that a mistake is answered before torch loads
        )
        from trainer.evaluate.quality.files import compact, write_evaluation
        from trainer.evaluate.quality.tables import print_evaluation

        report = evaluate(config, say=lambda text: console.print(text, markup=False, style="dim"))
        print_evaluation(report, Console(highlight=False, width=None if sys.stdout.isatty() else 200))
        if config.out is not None:
            print(write_evaluation(report, Path(config.out)))
        print(json.dumps(compact(report)), flush=True)
    except UserError as error:
        console.print(f"error: {error}", markup=False, style="red")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _quiet() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.captureWarnings(True)
    for name in ("py.warnings", "bitsandbytes", "torchao", "torch.utils._pytree"):  # told of at each import
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
