"""What is evaluated: from a word on the command line to something that can be opened, with its size on disk.

a run folder             its best export: quantized, merged, or the adapter over its base
what quantize.py wrote   its codes, or its .gguf file
a folder of codes        lowbit's, GPTQ, AWQ, compressed-tensors or bitsandbytes, by our reader
a .gguf file, a Hugging Face folder, org/name, smollm2_135m, tiny
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.compose import read_run_config
from trainer.config.errors import UserError, require
from trainer.config.model import DType, ModelConfig, ModelSource, named_model, short_name
from trainer.config.ptq import REPORT
from trainer.formats.empty_model import quantization_config
from trainer.sources.resolve import resolve_model

FULL_EXPORTS = ("quantized", "merged", "gptq", "awq", "compressed_tensors", "bnb")
"""Exports that are whole models, the best first."""


@dataclass(frozen=True)
class Subject:
    """A model and by what it is computed.

    name        for people
    model       what LLM takes: a folder, a .gguf file or a name
    kind        what was found there
    path        server, module, transformers or llama_cpp
    dtype       auto, bfloat16 or float32
    adapter     folder of a PEFT adapter that is part of it; `model` opens with it in the server
    """

    name: str
    model: str
    kind: str
    path: str
    dtype: str = "auto"
    adapter: Path | None = None

    @classmethod
    def of(cls, given: str, path: str, *, dtype: str = "auto") -> "Subject":
        """raises  UserError if there is nothing to open, or nothing that `path` computes"""
        folder = Path(given).expanduser()
        if folder.is_dir() and (folder / REPORT).is_file():
            found = _of_quantization(folder, path)
        elif folder.is_dir() and (folder / "config.yaml").is_file():
            found = _of_run(folder, path)
        elif folder.is_dir() and (folder / "adapter_config.json").is_file():
            found = cls(folder.name, str(folder), "adapter over its base", path, adapter=folder)
        else:
            found = _of_model(given, path)
        return replace(found, name=_named(given), dtype=dtype)

    def at(self, path: str) -> "Subject":
        """The same model, computed another way."""
        return replace(self, path=path)

    @property
    def source(self) -> ModelConfig:
        """Where the weights come from, without the adapter."""
        if self.adapter is None:
            return named_model(self.model, DType(self.dtype))
        run = Path(self.model)
        if (run / "config.yaml").is_file():
            return replace(read_run_config(run).model, dtype=DType(self.dtype))
        base = json.loads((self.adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
        return named_model(base, DType(self.dtype))

    @property
    def bytes_on_disk(self) -> int | None:
        """Of the weights, and of the adapter beside its base's; None for a model on the hub."""
        source = self.source
        if source.source is ModelSource.hub:
            return None
        path = Path(source.path if source.source is ModelSource.gguf else resolve_model(source))
        return _weight_bytes(path) + (0 if self.adapter is None else _weight_bytes(self.adapter))


def made_from(given: str) -> str:
    """The original of a run, of what quantize.py wrote, or of an export.

    raises  UserError if the folder does not say
    """
    folder = Path(given).expanduser()
    if (folder / REPORT).is_file():
        return json.loads((folder / REPORT).read_text())["settings"]["model"]
    if (folder / "config.yaml").is_file():
        source = read_run_config(folder).model
        return source.path or short_name(source)
    for parent in folder.parents[:2]:  # <run>/export/<format>
        if (parent / REPORT).is_file() or (parent / "config.yaml").is_file():
            return made_from(str(parent))
    raise UserError(f"against is not set, and {given} does not say what it was made from; give against=<16-bit model>")


def _of_run(run: Path, path: str) -> Subject:
    adapter, files = run / "export" / "adapter", sorted((run / "export" / "gguf").glob("*.gguf"))
    if path == "llama_cpp":
        require(bool(files), f"{run} has no export/gguf; write it: python scripts/export.py run={run} format=gguf")
        return Subject("", str(files[-1]), f"run: gguf/{files[-1].name}", path)
    trained = read_run_config(run)
    for name in FULL_EXPORTS:
        # Beside an adapter, merged weights are the same function rounded once more; after QAT, what was trained.
        best = trained.qat.enabled or name != "merged" or not adapter.exists()
        if best and (run / "export" / name / "config.json").is_file():
            return Subject("", str(run / "export" / name), f"run: {name}", path)
    require(
        (adapter / "adapter_config.json").is_file(),
        f"run={run} holds no export; let the run finish (python train.py resume={run}), or write one: "
        f"python scripts/export.py run={run} format=merged",
    )
    return Subject("", str(run), "run: adapter over its base", path, adapter=adapter)


def _of_quantization(folder: Path, path: str) -> Subject:
    files = sorted((folder / "export").glob("gguf/*.gguf")) + sorted((folder / "export").glob("*.gguf"))
    if path != "llama_cpp":
        for name in FULL_EXPORTS:
            if (folder / "export" / name / "config.json").is_file():
                return Subject("", str(folder / "export" / name), f"quantized: {name}", path)
    require(
        bool(files), f"run={folder} holds no {'.gguf file' if path == 'llama_cpp' else 'export'}; write one: "
        f"python scripts/export.py run={folder} format={'gguf' if path == 'llama_cpp' else 'quantized'}"
    )  # fmt: skip
    return Subject("", str(files[-1]), f"quantized: {files[-1].name}", path)


def _of_model(given: str, path: str) -> Subject:
    source = named_model(given)
    if source.source is ModelSource.gguf:
        return Subject("", given, "gguf", path)
    config = quantization_config(source.path) if source.source is ModelSource.folder else None
    return Subject("", given, "dense" if config is None else str(config.get("quant_method", "codes")), path)


def _named(given: str) -> str:
    """The folder's name, with its run's where it is an export: `<run>/quantized`."""
    path = Path(given)
    if not path.exists():
        return given
    parts = [part for part in path.resolve().parts if part != "export"]
    return "/".join(parts[-2:]) if path.resolve().parent.name == "export" else parts[-1]


def _weight_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    files = [*path.glob("*.safetensors"), *path.glob("*.bin")]
    return sum(file.stat().st_size for file in files)
