"""Write exports of a run that is finished or was stopped, from its newest checkpoint.

    python scripts/export.py run=outputs/qlora/... format=adapter|merged
    python scripts/export.py run=latest format=merged dtype=float32
    python scripts/export.py run=latest format=merged_4bit allow_lossy=true
    python scripts/export.py run=<QAT run, or what quantize.py wrote> format=gptq|awq|compressed_tensors|bnb|gguf
    python scripts/export.py run=latest format=gguf gguf_type=Q4_K_M        the merged model as one file for llama.cpp
    python scripts/export.py run=latest format=gguf_adapter

They lie in <run folder>/export/<format>; one that is there already is replaced when the new one is complete. `format`,
`dtype` and `allow_lossy` are `export.formats`, `export.dtype` and `export.allow_lossy` of train.py. Layouts of other
engines hold the codes of the run as they are; scales that one cannot store exactly are refused, or with
allow_rounded_scales=true rounded and measured.
"""

import logging
import sys
from typing import Any

from rich.console import Console

from trainer.compose import load_config
from trainer.config.errors import UserError, require
from trainer.config.export import EXPORT_FORMATS
from trainer.config.ptq import EXPORTS

KEYS = {"dtype": "export.dtype", "allow_lossy": "export.allow_lossy"}
LAYOUTS = (*(name for name in EXPORTS if name not in EXPORT_FORMATS), "gguf_adapter")
LAYOUT_KEYS = {
    **dict.fromkeys(("gptq", "awq", "compressed_tensors"), ("dtype", "allow_rounded_scales")),
    "bnb": ("dtype",),
    "gguf": ("gguf_type",),
    "gguf_adapter": (),
}
"""What each layout reads beside run and format."""
DTYPES = ("float16", "bfloat16", "float32")


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("trainer").setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)
    try:
        given = parse(sys.argv[1:])
        for name, path in (_layout(given) if given["format"] in LAYOUTS else _export(given)).items():
            print(f"{name:<18} {path}")
    except UserError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", markup=False, style="red")
        sys.exit(2)


def parse(arguments: list[str]) -> dict[str, str]:
    """What was given, `run` and `format` among it.

    raises  UserError for what is missing, no key, or a key of another format
    """
    given = dict(item.partition("=")[::2] for item in arguments)
    usage = f"python scripts/export.py run=<run folder> format={'|'.join((*EXPORT_FORMATS, *LAYOUTS))}"
    known = ("run", "format", *LAYOUT_KEYS.get(given.get("format", ""), tuple(KEYS)))
    unknown = [key for key in given if key not in known]
    if unknown or not given.get("run") or not given.get("format"):
        chosen = f" of format={given['format']}" if given.get("format") else ""
        missing = "format" if given.get("run") else "run"
        what = f"{unknown[0]} is not a key{chosen}" if unknown else f"{missing} is not set"
        keys = " ".join(f"[{key}=...]" for key in known[2:])
        raise UserError(f"{what}; use {usage} {keys}")
    return given


def _export(given: dict[str, str]) -> dict[str, Any]:
    """A format that training knows."""
    overrides = [f"{KEYS[key]}={value}" for key, value in given.items() if key in KEYS]
    # What the run itself was to export does not count here.
    defaults = [f"{key}={value}" for key, value in (("export.dtype", "auto"), ("export.allow_lossy", "false"))]
    overrides = [f"export.formats=[{given['format']}]", *defaults, *overrides]
    load_config(f"resume={given['run']}", *overrides)
    from trainer.run import export_run  # here, so that a mistake is answered before torch loads

    return export_run(given["run"], *overrides)


def _layout(given: dict[str, str]) -> dict[str, Any]:
    """A layout of another engine."""
    dtype, rounded = given.get("dtype"), given.get("allow_rounded_scales", "false")
    require(dtype is None or dtype in DTYPES, f"dtype={dtype}; use one of {', '.join(DTYPES)}")
    require(rounded in ("true", "false"), f"allow_rounded_scales={rounded}; use true or false")
    import torch

    from trainer.layout_of_run import export_layout

    path = export_layout(
        *(given["run"], given["format"]),
        dtype=None if dtype is None else getattr(torch, dtype),
        gguf_type=given.get("gguf_type"),
        allow_rounded_scales=rounded == "true",
    )
    return {given["format"]: path}


if __name__ == "__main__":
    main()
