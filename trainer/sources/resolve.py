"""Where a model comes from: each source becomes something that `from_pretrained` takes.

The way from `model.source` and `model.path` to `trainer/model.py`, which loads what stands here. The sources are
imported when they are asked for: a run on a folder of its own never touches the download or the converters.
"""

from pathlib import Path

from trainer.config.model import ModelConfig, ModelSource


def resolve_model(config: ModelConfig) -> str:
    """A Hugging Face folder, or the hub's `org/name` as given (loading it is the loader's, errors included).

    raises  UserError if the model cannot be fetched, read or cached
    """
    match config.source:
        case ModelSource.bundled:
            from trainer.sources.bundled import bundled_model

            return str(bundled_model())
        case ModelSource.tiny:
            from trainer.sources.tiny import tiny_model

            return str(tiny_model())
        case ModelSource.gguf:
            from trainer.sources.gguf_file import gguf_model

            return str(gguf_model(Path(config.path)))
        case ModelSource.folder | ModelSource.hub:
            return config.path
