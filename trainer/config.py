"""The configuration: a dataclass schema, its validation, and the Hydra groups that fill it.

A recipe is one file in `conf/`, chosen with `conf=<name>`; `model=` and `data=` choose from `conf/model` and
`conf/data`. Hydra composes them over the schema, `load_config` and the command line turn the result into plain
dataclasses at once, and `__post_init__` answers a mistake before torch is imported. Past this file nobody sees
a DictConfig.

Recipes are registered as group `conf` in Hydra's ConfigStore, so the folder stays flat and option listing,
errors, overrides and sweeps are Hydra's own.
"""

import ast
import difflib
import re
import textwrap
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

PACKAGE_DIR = Path(__file__).parent
CONF_DIR = PACKAGE_DIR / "conf" if (PACKAGE_DIR / "conf").is_dir() else PACKAGE_DIR.parent / "conf"


class UserError(ValueError):
    """A mistake that the user can mend. Its text names the key, the value, what is accepted and the next step."""


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)


class ModelSource(StrEnum):
    bundled = "bundled"
    hub = "hub"
    folder = "folder"
    gguf = "gguf"
    tiny = "tiny"


class DType(StrEnum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"


class DataSource(StrEnum):
    pydocs = "pydocs"
    jsonl = "jsonl"


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class OptimizerName(StrEnum):
    adamw = "adamw"
    adamw_8bit = "adamw_8bit"


class Codebook(StrEnum):
    nf4 = "nf4"


class Tracker(StrEnum):
    none = "none"
    wandb = "wandb"
    tensorboard = "tensorboard"


EXPORT_FORMATS = ("adapter",)


@dataclass
class ModelConfig:
    source: ModelSource = ModelSource.bundled
    """Where the model comes from: bundled, hub, folder, gguf or tiny; `model=<name>` sets it."""
    path: str | None = None
    """hub: `org/name`; folder: a Hugging Face folder; gguf: a .gguf file; bundled and tiny need none."""
    revision: str | None = None
    """hub only: branch, tag or commit."""
    dtype: DType = DType.auto
    """Compute dtype. auto takes bfloat16 where the processor or GPU multiplies it natively, else float32."""

    def __post_init__(self) -> None:
        key = f"model.path={self.path}"
        match self.source:
            case ModelSource.hub:
                require(bool(self.path), "model.path is not set; model=hub needs model.path=org/name")
            case ModelSource.folder:
                require(bool(self.path), "model.path is not set; model=folder needs model.path=<Hugging Face folder>")
                require(Path(self.path).is_dir(), f"{key} is not a folder; give one that holds config.json and weights")
                require(
                    (Path(self.path) / "config.json").is_file(),
                    f"{key} holds no config.json; give the folder that save_pretrained wrote",
                )
            case ModelSource.gguf:
                require(bool(self.path), "model.path is not set; model=gguf needs model.path=<file>.gguf")
                require(Path(self.path).is_file(), f"{key} is not a file; give the path of a .gguf file")
            case ModelSource.bundled | ModelSource.tiny:
                require(
                    self.path is None,
                    f"{key} has no effect with a {self.source.value} model; use model=hub, model=folder or model=gguf",
                )


@dataclass
class ColumnsConfig:
    messages: str | None = None
    """The file's field with a list of `{role, content}`."""
    prompt: str | None = None
    """The file's field with the user's side."""
    completion: str | None = None
    """The file's field with the answer."""
    text: str | None = None
    """The file's field with plain text."""


@dataclass
class DataConfig:
    source: DataSource = DataSource.pydocs
    """pydocs: questions about the running Python's standard library; jsonl: a file of yours. `data=<name>` sets it."""
    path: str | None = None
    """jsonl: the training file, one JSON object a line."""
    eval_path: str | None = None
    """jsonl: the held-out file. Without it the last `eval_rows` rows of a seeded shuffle are held out."""
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    """jsonl: what the file calls our fields, e.g. `data.columns.prompt=question data.columns.completion=answer`."""
    max_rows: int | None = None
    """Use the first rows only; null for all."""
    eval_rows: int = 64
    """Rows held out for evaluation, at most."""
    max_seq_len: int = 512
    """Longest row in tokens. Longer rows are cut at the end."""
    packing: bool = False
    """Several documents in one row. Not available yet: only false is accepted."""

    def __post_init__(self) -> None:
        if self.source is DataSource.jsonl:
            require(bool(self.path), "data.path is not set; data=jsonl needs data.path=<file>.jsonl")
            for key, path in (("data.path", self.path), ("data.eval_path", self.eval_path)):
                require(path is None or Path(path).is_file(), f"{key}={path} is not a file; give a JSON Lines file")
        else:
            require(self.path is None, f"data.path={self.path} has no effect with data=pydocs; use data=jsonl")
            require(self.eval_path is None, f"data.eval_path={self.eval_path} has no effect with data=pydocs")
            mapped = [f"{name}={value}" for name, value in vars(self.columns).items() if value]
            require(not mapped, f"data.columns.{mapped} has no effect with data=pydocs; use data=jsonl")
        require(self.max_rows is None or self.max_rows > 0, f"data.max_rows={self.max_rows}; give at least 1, or null")
        require(self.eval_rows > 0, f"data.eval_rows={self.eval_rows}; give at least 1")
        require(self.max_seq_len >= 8, f"data.max_seq_len={self.max_seq_len}; give at least 8 tokens")
        require(not self.packing, "data.packing=true is not available yet; use data.packing=false")


@dataclass
class TrainConfig:
    max_steps: int | None = None
    """Optimizer steps; null for as many as `epochs` needs."""
    epochs: float = 1.0
    """Passes over the data, when `max_steps` is null."""
    batch_size: int = 8
    """Sequences a process takes in one micro-step."""
    grad_accum_steps: int = 1
    """Micro-steps in one optimizer step. The loss is the mean over all their target tokens."""
    max_pass_tokens: int | None = None
    """Most tokens, padding counted, that go through the model at once: a micro-step's rows are grouped by length into
    passes, which changes memory and speed but not the gradient. null for 1024 on a CPU and 16384 on a GPU."""
    eval_every: int = 0
    """Steps between evaluations while training; 0 for before and after only."""
    eval_batch_size: int = 16
    """Sequences in one evaluation batch."""
    save_every: int = 50
    """Steps between checkpoints; 0 for the last step only."""
    keep_checkpoints: int = 2
    """How many checkpoints stay; the newest ones."""
    max_grad_norm: float = 1.0
    """Gradient norm is clipped to this; 0 switches clipping off."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in backward: about a third slower, much less memory."""
    log_row_ids: bool = False
    """Write the ids of each step's rows to metrics.jsonl."""

    def __post_init__(self) -> None:
        require(self.max_steps is None or self.max_steps > 0, f"train.max_steps={self.max_steps}; give >= 1, or null")
        require(self.epochs > 0, f"train.epochs={self.epochs}; give a number above 0")
        for name in ("batch_size", "grad_accum_steps", "max_pass_tokens", "eval_batch_size", "keep_checkpoints"):
            require(
                getattr(self, name) is None or getattr(self, name) > 0,
                f"train.{name}={getattr(self, name)}; give at least 1",
            )
        for name in ("eval_every", "save_every", "max_grad_norm"):
            require(getattr(self, name) >= 0, f"train.{name}={getattr(self, name)}; give 0 or more")


@dataclass
class OptimConfig:
    name: OptimizerName = OptimizerName.adamw
    """adamw, or adamw_8bit (bitsandbytes, arXiv:2110.02861: optimizer state in 8 bits)."""
    lr: float | None = None
    """Peak learning rate; null for 5e-4 * (2000 / hidden_size)^0.781, LoRA's best for Llamas of that width (Schulman et
    al., LoRA Without Regret, 2025): 1.3e-3 at 576, 2.9e-4 at 4096."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    schedule: Schedule = Schedule.cosine
    """constant, linear or cosine, after the warm-up."""
    warmup_ratio: float = 0.03
    """Share of all steps in which the learning rate rises from 0."""
    min_lr_ratio: float = 0.0
    """Where linear and cosine end, as a share of `lr`."""

    def __post_init__(self) -> None:
        require(self.lr is None or self.lr > 0, f"optim.lr={self.lr}; give a number above 0, such as 2e-4, or null")
        require(self.eps > 0, f"optim.eps={self.eps}; give a number above 0")
        require(self.weight_decay >= 0, f"optim.weight_decay={self.weight_decay}; give 0 or more")
        for name in ("beta1", "beta2", "warmup_ratio"):
            require(0 <= getattr(self, name) < 1, f"optim.{name}={getattr(self, name)}; give a number in [0, 1)")
        require(0 <= self.min_lr_ratio <= 1, f"optim.min_lr_ratio={self.min_lr_ratio}; give a number in [0, 1]")


@dataclass
class QuantConfig:
    codebook: Codebook = Codebook.nf4
    """The 16 values that a 4-bit code stands for: nf4 (arXiv:2305.14314, appendix E)."""
    block_size: int = 64
    """Weights that share one absmax; a power of two in 32..4096."""
    double_quant: bool = True
    """Store each absmax in 8 bits too: 4.127 instead of 4.5 bits a weight."""

    def __post_init__(self) -> None:
        sizes = [2**k for k in range(5, 13)]
        require(self.block_size in sizes, f"quant.block_size={self.block_size}; use one of {sizes}")


@dataclass
class LoraConfig:
    rank: int = 16
    """Rank of the update B A."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout on the adapter's input."""
    target_modules: Any = "all-linear"
    """all-linear (each quantized layer), or a list of module names such as `[q_proj,v_proj]`."""

    def __post_init__(self) -> None:
        require(self.rank > 0, f"lora.rank={self.rank}; give at least 1")
        require(self.alpha > 0, f"lora.alpha={self.alpha}; give a number above 0")
        require(0 <= self.dropout < 1, f"lora.dropout={self.dropout}; give a number in [0, 1)")
        names = [self.target_modules] if isinstance(self.target_modules, str) else self.target_modules
        require(
            isinstance(names, list) and bool(names) and all(isinstance(name, str) and name for name in names),
            f"lora.target_modules={self.target_modules}; use all-linear or a list of names such as [q_proj,v_proj]",
        )
        if names != ["all-linear"]:
            self.target_modules = names


@dataclass
class EvaluateConfig:
    samples: int = 3
    """Held-out prompts that base and tuned model answer side by side at the end; 0 for none."""
    max_new_tokens: int = 48
    """Longest sample answer in tokens."""

    def __post_init__(self) -> None:
        require(self.samples >= 0, f"evaluate.samples={self.samples}; give 0 or more")
        require(self.max_new_tokens > 0, f"evaluate.max_new_tokens={self.max_new_tokens}; give at least 1")


@dataclass
class ExportConfig:
    formats: list[str] = field(default_factory=lambda: ["adapter"])
    """What to write at the end of the run: adapter (PEFT)."""

    def __post_init__(self) -> None:
        for name in self.formats:
            require(name in EXPORT_FORMATS, f"export.formats has {name!r}; accepted: {', '.join(EXPORT_FORMATS)}")


@dataclass
class Config:
    """Everything a run needs. `config.yaml` in the run folder is this, resolved."""

    seed: int = 0
    """Seeds data order, adapter initialisation and dropout."""
    output_dir: str | None = None
    """The run folder; null for `outputs/<recipe>/<date>_<time>`."""
    resume: str | None = None
    """Go on with a run: its folder, or `latest` for the newest one below `outputs/`."""
    tracker: Tracker = Tracker.none
    """Where metrics go besides metrics.jsonl: none, wandb or tensorboard."""
    project: str = "lowbit"
    """wandb: the project's name."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, f"seed={self.seed}; give a whole number in 0..{2**32 - 1}")


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
    then = _read_config(run_dir / "config.yaml", [])
    now = _compose(others) if named else _read_config(run_dir / "config.yaml", others)
    now.output_dir = then.output_dir = str(run_dir)
    for key, (old, new) in _differences(then, now).items():
        require(
            key.startswith(CHANGEABLE_ON_RESUME),
            f"{key}={new} differs from the run's {key}={old}, so resuming {run_dir} would not continue it; "
            "leave the key (and conf=) out, or start a new run without resume",
        )
    now.resume = str(run_dir)
    return now


CHANGEABLE_ON_RESUME = (
    *("tracker", "project", "evaluate.", "export.", "train.max_steps", "train.epochs", "train.eval_every"),
    *("train.eval_batch_size", "train.save_every", "train.keep_checkpoints", "train.log_row_ids"),
)
"""Keys that leave the trained function's path alone, or lengthen it."""


def find_run(resume: str) -> Path:
    """The folder that `resume` names; `latest` is the run below outputs/ that was last written to."""
    if resume != "latest":
        require((Path(resume) / "config.yaml").is_file(), f"resume={resume} is not a run folder: no config.yaml in it")
        return Path(resume)
    runs = [path.parent for path in Path("outputs").glob("**/config.yaml")]
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
        keys = list(_flat(to_dict(Config())))
        close = difflib.get_close_matches(unknown[1], keys, n=2, cutoff=0.7)
        return f"{unknown[1]} is not a key; {'did you mean ' + ' or '.join(close) if close else 'see --help'}?"
    cause = str(error.__cause__ or "").splitlines()
    return " ".join(" ".join([text, *cause[:1]]).split())


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain values (enums by value), for YAML and trackers."""
    return {key: _plain(value) for key, value in asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else value


def save_config(config: Config, path: Path) -> None:
    """Write the resolved config as YAML."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(to_dict(config))), encoding="utf-8")


def _read_config(path: Path, overrides: list[str]) -> Config:
    """Read a resolved config and apply `key=value` overrides to it."""
    try:
        saved = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
        return to_config(OmegaConf.merge(saved, OmegaConf.from_dotlist(overrides)))
    except OmegaConfBaseException as error:
        raise UserError(f"{path} with {overrides}: {str(error).splitlines()[0]}") from None


def _differences(left: Config, right: Config) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, as `section.key`, with both values."""
    a, b = _flat(to_dict(left)), _flat(to_dict(right))
    return {key: (a[key], b[key]) for key in a if a[key] != b[key]}


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


def describe() -> str:
    """Every key of the schema with its default and its docstring, for --help."""
    docs = _field_docs(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    lines = []
    for key, default in _flat(to_dict(Config())).items():
        owner = Config()
        for name in key.split(".")[:-1]:
            owner = getattr(owner, name)
        doc = " ".join(docs[type(owner).__name__, key.rpartition(".")[2]].split())
        head = f"{key} = {'null' if default is None else str(default).lower() if default in (True, False) else default}"
        lines += textwrap.wrap(doc, 120, initial_indent=f"  {head:<38} ", subsequent_indent=" " * 41)
    return "\n".join(lines)


def _field_docs(tree: ast.Module) -> dict[tuple[str, str], str]:
    """(class, field) -> the string that stands below the field."""
    docs = {}
    for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field_, doc in zip(node.body, node.body[1:], strict=False):
            if isinstance(field_, ast.AnnAssign) and isinstance(doc, ast.Expr):
                docs[node.name, field_.target.id] = ast.literal_eval(doc.value)
    return docs


_HYDRA = {
    "run": {"dir": "${lowbit_run_dir:${output_dir},${resume},${hydra.runtime.choices.conf}}"},
    "sweep": {
        "dir": "${lowbit_run_dir:${output_dir},${resume},${hydra.runtime.choices.conf}}",
        "subdir": "${hydra.job.num}",
    },
    "output_subdir": None,
    "job": {"name": "train", "chdir": False},
    "help": {"app_name": "lowbit", "template": _HELP % describe()},
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
