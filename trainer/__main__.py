"""The command line: `python train.py conf=qlora key=value ...`, `python -m trainer` or `lowbit` from a wheel.

Hydra owns parsing, sweeps and help. The overrides of a single run are composed once before Hydra starts, so that a
mistake is one line in the first second and leaves no folder behind.
"""

import logging
import os
import shutil
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from trainer.compose import CONF_DIR, find_run, load_config, recipes, register_configs, to_config
from trainer.config.errors import UserError

log = logging.getLogger("trainer")


def main() -> None:
    """Run the command line; exits with 2 after a user's mistake, 1 after a failed run, 130 after Ctrl-C."""
    overrides = sys.argv[1:]
    if not overrides:
        sys.exit(_recipes())
    if not any(item.startswith("-") for item in overrides):
        try:
            load_config(*overrides)
        except UserError as error:
            sys.exit(_fail(error))
    register_configs()
    OmegaConf.register_new_resolver("lowbit_run_dir", _run_dir, use_cache=True, replace=True)
    hydra.main(config_path=str(CONF_DIR), config_name="config", version_base="1.3")(_run)()


def _run(composed: DictConfig) -> None:
    """One run: compose, fine-tune, and one clear line when it ends early."""
    hydra_config = HydraConfig.get()
    logging.captureWarnings(True)
    try:
        if composed.resume and hydra_config.mode is RunMode.MULTIRUN:
            raise UserError(f"resume={composed.resume} cannot be swept; resume one run at a time, without --multirun")
        config = load_config(*hydra_config.overrides.task) if composed.resume else to_config(composed)
        config.output_dir = os.path.relpath(hydra_config.runtime.output_dir)
        from trainer.loop import Interrupted, TrainingDiverged
        from trainer.run import finetune  # here, so that a mistake is answered before torch loads

        try:
            finetune(config)
        except TrainingDiverged as error:
            log.error("%s", error)
            sys.exit(1)
        except Interrupted as stop:
            log.warning(
                "stopped; %s is saved. Go on with: %s resume=%s", stop.checkpoint, _command(), config.output_dir
            )
            sys.exit(130)
        except KeyboardInterrupt:
            begun = Path(config.output_dir, "config.yaml").is_file()
            next_step = f"go on with: {_command()} resume={config.output_dir}" if begun else "no step was taken"
            log.warning("stopped outside a step; %s", next_step)
            sys.exit(130)
    except UserError as error:
        code = _fail(error)
        _discard_unstarted(Path(hydra_config.runtime.output_dir))
        sys.exit(code)


def _run_dir(output_dir: str | None, resume: str | None, recipe: str | None) -> str:
    """Where Hydra puts the run: the resumed folder, `output_dir`, or outputs/<recipe>/<date>_<time>."""
    if int(os.environ.get("RANK", "0")) > 0:  # only the first of several processes has a say; run.py broadcasts it
        return tempfile.mkdtemp(prefix="lowbit-")
    if resume:
        return str(find_run(resume))
    if output_dir:
        return output_dir
    stamp = Path("outputs", str(recipe), datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    names = (stamp.name, *(f"{stamp.name}_{n}" for n in range(2, 1000)))
    return str(next(path for name in names if not (path := stamp.with_name(name)).exists()))


def _recipes() -> int:
    console = Console(highlight=False, soft_wrap=True)
    console.print("Fine-tune a language model in 4 bits:  python train.py conf=<recipe> \\[key=value ...]\n")
    for name, header in recipes().items():
        console.print(f"  conf={name:<12} {header}")
    console.print("\nEvery key and its default: python train.py --help")
    return 2


def _fail(error: UserError) -> int:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", markup=False, style="red")
    return 2


def _command() -> str:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    script = "train.py" if Path(sys.argv[0]).name == "train.py" else "-m trainer"
    return f"python {script}" if processes == 1 else f"torchrun --standalone --nproc_per_node={processes} {script}"


def _discard_unstarted(folder: Path) -> None:
    """Remove the folder of a run that never began: it holds no more than the log of the mistake."""
    logging.shutdown()
    if {path.name for path in folder.iterdir()} <= {"train.log", ".lock"}:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
