"""`model.*`: where the model comes from."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from trainer.config.errors import UserError, require


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
    add_tokens: list[str] = field(default_factory=list)
    """Tokens to add to the vocabulary, such as `['<a>','</a>']`: matched whole, trained, saved with the adapter."""

    def __post_init__(self) -> None:
        key = f"model.path={self.path}"
        require(
            all(token.strip() for token in self.add_tokens) and len(set(self.add_tokens)) == len(self.add_tokens),
            f"model.add_tokens={self.add_tokens}; give each token once, none empty or of blanks alone",
        )
        require(
            self.revision is None or self.source is ModelSource.hub,
            f"model.revision={self.revision} has no effect with a {self.source.value} model; use model=hub",
        )
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


def named_model(model: str, dtype: DType = DType.auto) -> ModelConfig:
    """Where the model that a command's `model=...` names comes from.

    model   a Hugging Face folder, a .gguf file, org/name on the hub, smollm2_135m or tiny
    raises  UserError if it is none of them
    """
    path = Path(model).expanduser()
    if model in ("smollm2_135m", "bundled"):
        return ModelConfig(ModelSource.bundled, dtype=dtype)
    if model == "tiny":
        return ModelConfig(ModelSource.tiny, dtype=dtype)
    if path.is_dir():
        require(
            (path / "config.json").is_file(),
            f"model={model} holds no config.yaml (a run), adapter_config.json (an adapter) or config.json (a model)",
        )
        return ModelConfig(ModelSource.folder, str(path), dtype=dtype)
    if path.suffix == ".gguf":
        return ModelConfig(ModelSource.gguf, str(path), dtype=dtype)
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return ModelConfig(ModelSource.hub, model, dtype=dtype)
    raise UserError(
        f"model={model} is no folder; give a run folder, an export folder, a Hugging Face folder, a .gguf file, "
        "org/name on the hub, smollm2_135m or tiny"
    )


def short_name(config: ModelConfig) -> str:
    """What a model is called where there is no path: smollm2_135m, tiny, the folder's or file's own name."""
    if config.source is ModelSource.bundled:
        return "smollm2_135m"
    return "tiny" if config.source is ModelSource.tiny else Path(config.path).stem
