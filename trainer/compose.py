"""From recipes and overrides to a Config: the Hydra groups behind the command line and `load_config`.

A recipe is one file in `conf/`, chosen with `conf=<name>`; `model=` and `data=` choose from folders in there.
Recipes are registered as group `conf` in Hydra's ConfigStore, so the folder stays flat and option listing, errors,
overrides and sweeps are Hydra's own. A resumed run takes its config from its folder instead.
"""

import difflib
import re
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.errors import UserError, require
from trainer.config.schema import Config, to_dict
from trainer.settings import describe

PACKAGE_DIR = Path(__file__).parent
CONF_DIR = PACKAGE_DIR / "conf" if (PACKAGE_DIR / "conf").is_dir() else PACKAGE_DIR.parent / "conf"


def recipes() -> dict[str, str]:
    """Recipe name -> its first header line, in the order of the folder."""
    return {path.stem: _header(path) for path in sorted(CONF_DIR.glob("*.yaml"))}


def _header(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def register_configs() -> None:
    """Put the schema, the recipes and the front page into Hydra's ConfigStore. Safe to call twice."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for path in CONF_DIR.glob("*.yaml"):
        store.store(group="conf", name=path.stem, node=OmegaConf.load(path), package="_global_")
    # Only a defaults list (and Hydra's own settings): a key here would beat the recipe's.
    defaults = ["_self_", "schema", {"model": "smollm2_135m"}, {"data": "pydocs"}, {"conf": None}]
    store.store(name="config", node={"defaults": defaults, "hydra": _HYDRA})


def to_config(composed: Any) -> Config:
    """Turn Hydra's DictConfig into the validated dataclass; raises UserError."""
    unknown = _flat(OmegaConf.to_container(composed)).keys() - _flat(to_dict(Config())).keys()
    require(not unknown, "; ".join(_unknown_key(key) for key in sorted(unknown)))
    try:
        return OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        cause = error.__cause__ or error.__context__
        raise (cause if isinstance(cause, UserError) else UserError(str(error).splitlines()[0])) from None


def load_config(*overrides: str) -> Config:
    """Compose a config as the command line does: `load_config("conf=qlora", "model=tiny", "train.max_steps=5")`.

    overrides  `key=value` each, as on the command line. With `resume=<run folder>` and no `conf=`, the config is that
               run's and the other overrides apply to it.
    raises     UserError for an unknown recipe, key or value
    """
    resume = next((item.removeprefix("resume=") for item in overrides if item.startswith("resume=")), "null")
    others = [item for item in overrides if not item.startswith("resume=")]
    named = any(item.startswith("conf=") for item in overrides)
    if resume in ("null", ""):
        require(named, f"conf is not set; use conf=<recipe>, one of: {', '.join(recipes())}")
        return _compose(others)
    run_dir = find_run(resume)
    then = _flat(OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml")))
    now = _compose(others) if named else _read_config(run_dir / "config.yaml", others)
    now.data.date = now.data.date or then.get("data.date")  # of the run's first day
    for key, value in _flat(to_dict(now)).items():
        require(
            value == then.get(key) or key.startswith(CHANGEABLE_ON_RESUME),
            f"{key}={value} differs from the run's {key}={then.get(key)}, so resuming {run_dir} would not continue it; "
            "leave the key (and conf=) out, or start a new run without resume",
        )
    now.output_dir = now.resume = str(run_dir)
    return now


CHANGEABLE_ON_RESUME = (
    *("output_dir", "resume", "tracker", "project", "evaluate.", "export.", "train.max_steps", "train.epochs"),
    *("train.eval_every", "train.eval_batch_size", "train.save_every", "train.keep_checkpoints", "train.log_row_ids"),
    *("data.path", "data.eval_path", "data.num_workers", "model.path"),
)
"""Keys that leave the path of training alone or lengthen it; files may have moved, hashes guard what is in them."""


def find_run(resume: str) -> Path:
    """The folder that `resume` names; `latest` is the run below outputs/ that was last written to."""
    if resume != "latest":
        require((Path(resume) / "config.yaml").is_file(), f"resume={resume} is not a run folder: no config.yaml in it")
        return Path(resume)
    runs = [path.parent for path in Path("outputs").glob("**/config.yaml") if "wandb" not in path.parts]
    require(bool(runs), "resume=latest found no run below outputs/; give the run folder: resume=<folder>")
    return max(runs, key=lambda run: max(path.stat().st_mtime for path in (run, *run.glob("*"))))


def _compose(overrides: list[str]) -> Config:
    register_configs()
    try:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            return to_config(compose("config", overrides))
    except HydraException as error:
        raise UserError(_explain(error)) from None


def _explain(error: HydraException) -> str:
    """Hydra's message in one line, with the keys that come close to an unknown one."""
    text = str(error).split("\nConfig search path")[0]
    if unknown := re.match(r"Could not override '([^']+)'", text):
        return _unknown_key(unknown[1])
    if group := re.search(r"Could not find '(model|data)/(\S+)'", text):
        text += f". A {group[1]} of your own: {_OWN[group[1]]}{group[2]}"
    cause = str(error.__cause__ or "").splitlines()
    return " ".join(" ".join([text, *cause[:1]]).split())


_OWN = {"model": "model=hub (or folder, gguf) model.path=", "data": "data=file data.path="}


def _unknown_key(key: str) -> str:
    keys = list(_flat(to_dict(Config())))
    close = [name for name in keys if name.endswith(f".{key}")]
    close = close or difflib.get_close_matches(key, keys, n=2, cutoff=0.7)
    hint = f"did you mean {' or '.join(close)}?" if close else "see python train.py --help"
    return f"{key} is not a key; {hint}"


def save_config(config: Config, path: Path) -> None:
    """Write the resolved config as YAML."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(to_dict(config))), encoding="utf-8")


def read_run_config(run: Path) -> Config:
    """The config that the run in folder `run` was trained with."""
    return _read_config(run / "config.yaml", [])


def _read_config(path: Path, overrides: list[str]) -> Config:
    """Read a resolved config and apply `key=value` overrides to it."""
    keys = [item.partition("=")[0] for item in overrides]
    groups = [key for key in keys if key in ("model", "data")]
    require(not groups, f"{groups} cannot change on resume; leave it out, or repeat the run's whole command with conf=")
    unknown = [key for key in keys if key not in _flat(to_dict(Config()))]
    require(not unknown, "; ".join(_unknown_key(key) for key in unknown))
    try:
        saved = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
        return to_config(OmegaConf.merge(saved, OmegaConf.from_dotlist(overrides)))
    except OmegaConfBaseException as error:
        raise UserError(f"{path} with {overrides}: {str(error).splitlines()[0]}") from None


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        nested = _flat(value) if isinstance(value, dict) else {}
        flat.update({f"{key}.{name}": item for name, item in nested.items()} if nested else {key: value})
    return flat


_HELP = """lowbit: fine-tune a language model in 4 bits.

    python train.py conf=<recipe> [model=<model>] [data=<data>] [key=value ...]

$APP_CONFIG_GROUPS
Go on with a stopped run:   python train.py resume=latest     (or resume=<run folder>)
Sweep:                      python train.py --multirun conf=qlora seed=1,2

Every key with its default:

%s
"""


_HYDRA = {
    "run": {"dir": "${lowbit_run_dir:${output_dir},${resume},${hydra.runtime.choices.conf}}"},
    "sweep": {
        "dir": "${lowbit_run_dir:${output_dir},${resume},${hydra.runtime.choices.conf}}",
        "subdir": "${hydra.job.num}",
    },
    "output_subdir": None,
    "job": {"name": "train", "chdir": False},
    "help": {"app_name": "lowbit", "template": _HELP % describe(Config())},
    "job_logging": {
        "version": 1,
        "formatters": {
            "short": {"format": "%(message)s"},
            "long": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"},
        },
        "handlers": {
            "console": {"class": "logging.StreamHandler", "formatter": "short", "stream": "ext://sys.stdout"},
            "file": {
                "class": "logging.FileHandler",
                "formatter": "long",
                "filename": "${hydra.runtime.output_dir}/train.log",
                "delay": True,
            },
        },
        "root": {"level": "WARNING", "handlers": ["console", "file"]},
        "loggers": {
            "trainer": {"level": "INFO"},
            "py.warnings": {"handlers": ["file"], "propagate": False},
            "bitsandbytes": {"level": "ERROR"},  # it tells of optional kernels each time it is imported
        },
        "disable_existing_loggers": False,
    },
}
