"""`model.*`: where the model comes from."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from trainer.config.errors import require


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
