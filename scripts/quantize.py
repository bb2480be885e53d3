"""Quantize a model after training: INT4, INT8, NF4 or GGUF's blocks, by several methods, for several engines.

    python scripts/quantize.py model=smollm2_135m                              GPTQ, INT4 in groups of 32
    python scripts/quantize.py model=org/name method=awq data=mine.jsonl formats=[quantized,awq]
    python scripts/quantize.py model=<folder> method=smoothquant formats=[compressed_tensors]
    python scripts/quantize.py model=<folder> method=gguf gguf_type=Q4_K_M
    python scripts/quantize.py --help                                          every key

Stopped, the same command goes on from the last finished block. Exits with 2 after a user's mistake, 130 after Ctrl-C.
"""

import logging
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.config.errors import UserError
from trainer.config.ptq import PtqConfig
from trainer.settings import describe, read_settings

_HELP = """lowbit quantize: post-training quantization.

    python scripts/quantize.py model=<model> method=<method> [key=value ...]

Every key with its default:

%s
"""


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_HELP % describe(PtqConfig()))
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("trainer").setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of optional kernels each time it is imported
    try:
        config = read_settings(PtqConfig, arguments)
        from trainer.ptq.run import quantize  # here, so that a mistake is answered before torch loads

        console = Console(stderr=True)
        with _bar(console) as bar:
            task = bar.add_task("blocks", total=None, visible=False)

            def progress(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total, visible=True)

            result = quantize(config, progress=progress)
        _say(result)
    except UserError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", markup=False, style="red")
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last finished block", file=sys.stderr)
        sys.exit(130)


def _bar(console: Console) -> Progress:
    """Shown on a terminal only; elsewhere each block has a line in the log."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _say(result) -> None:
    """The figures on held-out rows, and where things are."""
    figures = result.fidelity
    report = result.report
    print(
        f"held-out {figures.tokens} tokens: perplexity {figures.perplexity_original:.3f} -> {figures.perplexity:.3f}, "
        f"KL {figures.kl:.4f} nats, same likeliest token {100 * figures.same_token:.1f} %, flips "
        f"{100 * figures.flips:.1f} %"
    )
    print(
        f"{report['bits_per_weight']:.2f} bits a weight, {report['seconds']:.0f} s, peak "
        f"{report['peak_memory_bytes'] / 2**30:.1f} GiB; {result.output_dir}/quantize.json has a line a layer"
    )
    for name, path in result.exports.items():
        print(f"{name:<20} {path}")


if __name__ == "__main__":
    main()
