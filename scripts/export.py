"""Write exports of a run that is finished or was stopped, from its newest checkpoint.

    python scripts/export.py run=outputs/qlora/... format=adapter|merged
    python scripts/export.py run=latest format=merged dtype=float32
    python scripts/export.py run=latest format=merged_4bit allow_lossy=true

They lie in <run folder>/export/<format>; one that is there already is replaced when the new one is complete. `format`,
`dtype` and `allow_lossy` are `export.formats`, `export.dtype` and `export.allow_lossy` of train.py.
"""

import logging
import sys

from rich.console import Console

from trainer.compose import load_config
from trainer.config.errors import UserError
from trainer.config.export import EXPORT_FORMATS

KEYS = {"dtype": "export.dtype", "allow_lossy": "export.allow_lossy"}


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("trainer").setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.ERROR)
    try:
        run, overrides = parse(sys.argv[1:])
        load_config(f"resume={run}", *overrides)
        from trainer.run import export_run  # here, so that a mistake is answered before torch loads

        for name, folder in export_run(run, *overrides).items():
            print(f"{name:<11} {folder}")
    except UserError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", markup=False, style="red")
        sys.exit(2)


def parse(arguments: list[str]) -> tuple[str, list[str]]:
    """The run and the overrides for `export_run`.

    raises  UserError for what is missing or no key
    """
    given = dict(item.partition("=")[::2] for item in arguments)
    usage = f"python scripts/export.py run=<run folder> format={'|'.join(EXPORT_FORMATS)}"
    unknown = [key for key in given if key not in ("run", "format", *KEYS)]
    if unknown or not given.get("run") or not given.get("format"):
        what = f"{unknown[0]} is not a key" if unknown else f"{'format' if given.get('run') else 'run'} is not set"
        raise UserError(f"{what}; use {usage} [dtype=float32] [allow_lossy=true]")
    overrides = [f"{KEYS[key]}={value}" for key, value in given.items() if key in KEYS]
    # What the run itself was to export does not count here.
    defaults = [f"{key}={value}" for key, value in (("export.dtype", "auto"), ("export.allow_lossy", "false"))]
    return given["run"], [f"export.formats=[{given['format']}]", *defaults, *overrides]


if __name__ == "__main__":
    main()
