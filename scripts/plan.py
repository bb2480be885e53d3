"""Say before anything runs what fits in this machine's memory.

    python scripts/plan.py model=smollm2_135m                                  every method, and serving
    python scripts/plan.py model=hub model.path=org/name conf=qlora            one method; reads config.json only
    python scripts/plan.py conf=full data.max_seq_len=1024 train.batch_size=4  with overrides of train.py
    python scripts/plan.py serve.max_num_seqs=16 serve.max_model_len=4096 serve.kv_cache_dtype=int8
    python scripts/plan.py available_gb=16                                     as if so much memory were free

A method is planned with the overrides that it has; one that an override does not fit says why. `tight` means within the
15 % by which an estimate may be wrong (docs/planning.md has the measurements). Last line: JSON.
"""

import json
import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from trainer.compose import load_config
from trainer.config.errors import UserError, require
from trainer.config.schema import Config
from trainer.serve.config import ServeConfig
from trainer.settings import read_settings

if TYPE_CHECKING:
    from trainer.plan.advice import Load
    from trainer.plan.estimate import Estimate
    from trainer.plan.machine import Machine

METHODS = ("qlora", "loftq", "lora", "qat_lora", "qat_blocks", "full", "qat")
NUM_SEQS, LENGTH = 16, 4096
GB = 1e9


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        print(__doc__.strip())
        return
    try:
        print(json.dumps(plan(sys.argv[1:])))
    except UserError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", markup=False, style="red")
        sys.exit(2)


def plan(arguments: list[str]) -> dict:
    """Print the table and the advice; returns what the JSON line holds.

    arguments  `key=value` each: of train.py, `serve.<key>` of the server, `available_gb`
    raises     UserError for a key, a value or a model that is not accepted
    """
    overrides = [a for a in arguments if not a.startswith(("conf=", "serve.", "available_gb="))]
    named = [a.removeprefix("conf=") for a in arguments if a.startswith("conf=")]
    serve, given = _serve_config(arguments), _available(arguments)
    first = load_config(f"conf={named[0] if named else 'qlora'}", *(overrides if named else _of_model(overrides)))
    from trainer.plan.advice import advise  # here, so that a mistake is answered before torch loads
    from trainer.plan.machine import this_machine

    machine = this_machine()
    machine = machine if given is None else replace(machine, available=given)
    training, refused = _training(named or METHODS, overrides, machine.device, alone=bool(named))
    quantizing = [] if named else _post_training(first, machine.device)
    load = _load(first, serve)
    serving = _serving(first, serve, load)
    advice = advise(training, serving, machine.available, load)
    shown = {"train": training, "quantize": quantizing, "serve": serving}
    _print_table(shown, refused, machine)
    for line in advice:
        print(f"- {line}")
    rows = [
        {"kind": kind, "name": e.name, "peak_bytes": e.peak, "when": e.when, "verdict": e.verdict(machine.available)}
        | {"parts": e.parts, "moments": e.moments, "note": e.note}
        for kind, estimates in shown.items()
        for e in estimates
    ]
    report = {"name": "plan", "model": _model_name(first), "machine": asdict(machine)}
    return report | {"load": asdict(load), "rows": rows, "refused": refused, "advice": advice}


def _model_name(config: Config) -> str:
    return config.model.path or {"bundled": "smollm2_135m"}.get(config.model.source.value, config.model.source.value)


def _of_model(overrides: list[str]) -> list[str]:
    """The overrides that every method has: those that say which model it is."""
    return [a for a in overrides if a.startswith(("model=", "model.", "data=", "data."))]


def _serve_config(arguments: list[str]) -> ServeConfig:
    given = [a.removeprefix("serve.") for a in arguments if a.startswith("serve.")]
    return read_settings(ServeConfig, given)


def _available(arguments: list[str]) -> int | None:
    """Bytes that are taken to be free, if that is said."""
    given = [a.partition("=")[2] for a in arguments if a.startswith("available_gb=")]
    if not given:
        return None
    number = given[-1].replace(".", "", 1)
    require(number.isdecimal(), f"available_gb={given[-1]}; give a number of gigabytes, such as 16")
    return int(float(given[-1]) * GB)


def _training(
    methods: Sequence[str], overrides: list[str], device: str, *, alone: bool
) -> "tuple[list[Estimate], dict[str, str]]":
    """Estimates, and why a method has none; alone: its error is the user's."""
    from trainer.plan.training import estimate_training

    estimates, refused = [], {}
    for method in methods:
        try:
            estimates.append(estimate_training(method, load_config(f"conf={method}", *overrides), device=device))
        except UserError as error:
            if alone:
                raise
            refused[method] = str(error)
    if not estimates:
        raise UserError(next(iter(refused.values())))
    return estimates, refused


def _post_training(config: Config, device: str) -> "list[Estimate]":
    from trainer.plan.post_training import estimate_post_training

    options = {"length": config.data.max_seq_len, "device": device}
    return [estimate_post_training(config.model, calibrated=calibrated, **options) for calibrated in (False, True)]


def _load(config: Config, serve: ServeConfig) -> "Load":
    """Sequences and their length: as asked for, or 16 of 4096 tokens, or of as many as the model has positions."""
    from trainer.plan.advice import Load
    from trainer.plan.sizes import meta_model, sizes_of

    positions = sizes_of(meta_model(config.model)).max_positions
    asked = serve.max_num_seqs if serve.max_num_seqs != ServeConfig().max_num_seqs else NUM_SEQS
    return Load(asked, serve.max_model_len or min(LENGTH, positions))


def _serving(config: Config, serve: ServeConfig, load: "Load") -> "list[Estimate]":
    from trainer.plan.serving import PRECISIONS, estimate_serving

    wanted = [serve.quantization] if serve.quantization else PRECISIONS
    options = {"num_seqs": load.num_seqs, "length": load.length}
    return [estimate_serving(config.model, replace(serve, quantization=name), **options) for name in wanted]


def _print_table(shown: "dict[str, list[Estimate]]", refused: dict[str, str], machine: "Machine") -> None:
    where = "of memory" if machine.device == "cpu" else f"on {machine.name}"
    table = Table(title=f"{machine.available / GB:.1f} GB {where} are free", title_justify="left", box=None)
    for name, justify in (("", "left"), ("peak GB", "right"), ("", "left"), ("when", "left"), ("parts, GB", "left")):
        table.add_column(name, justify=justify, no_wrap=name != "parts, GB")
    for kind, estimates in shown.items():
        for e in estimates:
            parts = "  ".join(f"{name} {size / GB:.2f}" for name, size in e.parts.items() if size >= 0.005 * GB)
            verdict = e.verdict(machine.available).value
            table.add_row(f"{kind} {e.name}", f"{e.peak / GB:.2f}", verdict, e.when, parts)
    for method, reason in refused.items():
        table.add_row(f"train {method}", "", "refused", "", reason)
    width = None if sys.stdout.isatty() else 180
    Console(width=width, highlight=False).print(table)


if __name__ == "__main__":
    main()
