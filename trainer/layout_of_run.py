"""What a run trained or quantized, in a layout that other engines load: `python scripts/export.py run=... format=gptq`.

Codes are taken from the run's `quantized` folder, which is written first where it is not there. A run without codes has
16-bit weights, which GGUF holds too; its adapter can be a GGUF file of its own.
"""

import json
from pathlib import Path

import torch

from trainer.compose import find_run, read_run_config
from trainer.config.errors import require
from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.ptq import EXPORTS, REPORT
from trainer.export.layouts import Provenance, write_layout
from trainer.formats.gguf_lora import write_gguf_adapter
from trainer.formats.gguf_weights import AS_TRAINED
from trainer.formats.gguf_write import write_gguf
from trainer.model import load_model
from trainer.run import export_run

LAYOUTS = (*(name for name in EXPORTS if name not in ("quantized", "merged")), "gguf_adapter")


def export_layout(
    run: str,
    name: str,
    *,
    dtype: torch.dtype | None = None,
    gguf_type: str | None = None,
    allow_rounded_scales: bool = False,
) -> Path:
    """Write one layout of a run; nothing is trained and no code is chosen.

    run                   a run folder, `latest`, or what quantize.py wrote
    name                  one of LAYOUTS
    dtype                 of what is dense; None: what holds the scales
    gguf_type             gguf: as_trained for codes, F16 for 16-bit weights, or another type to round to
    allow_rounded_scales  gptq, awq, compressed_tensors: round scales that the layout does not hold; it is measured
    returns               the folder or file
    raises                UserError naming what the layout cannot hold, and what can be done
    """
    folder = Path(run)
    quantized = (folder / REPORT).is_file()
    folder = folder if quantized else find_run(run)
    target = folder / "export" / name
    if name == "gguf_adapter":
        require(not quantized, f"run={run} is a quantized model, which has no adapter; give a LoRA run")
        return _write_adapter(folder, target)
    if quantized or read_run_config(folder).qat.enabled:
        return _write_codes(folder, target, name, dtype, gguf_type or AS_TRAINED, allow_rounded_scales)
    require(
        name == "gguf",
        f"{folder} has 16-bit weights and no codes, which {name} is for; export merged, and then "
        f"python scripts/quantize.py model={folder}/export/merged formats=[{name}]",
    )
    merged = _exported(folder, "merged")
    model, tokenizer = load_model(ModelConfig(ModelSource.folder, str(merged)))
    path = target / f"{folder.name}-{gguf_type or 'F16'}.gguf"
    target.mkdir(parents=True, exist_ok=True)
    write_gguf(model, tokenizer, path, gguf_type=gguf_type or "F16")
    return path


def _exported(folder: Path, name: str) -> Path:
    """The run's export in one of our own formats, written if it is not there."""
    export = folder / "export" / name
    return export if (export / "config.json").is_file() else export_run(str(folder), f"export.formats=[{name}]")[name]


def _quantized_here(folder: Path) -> Path:
    """What quantize.py wrote as `quantized`.

    raises  UserError if it did not, or the codes there are not those of quantize.json
    """
    source, report = folder / "export" / "quantized", json.loads((folder / REPORT).read_text())
    again = f"python scripts/quantize.py with the same settings, output_dir={folder} and formats=[quantized] writes it"
    require("packed_sha256" in report, f"{folder} holds a GGUF file and no codes that other layouts have")
    require(
        (source / "lowbit.json").is_file(), f"{folder} holds no export/quantized, from which codes are taken; {again}"
    )
    sha256 = json.loads((source / "lowbit.json").read_text())["quantized"]["packed_sha256"]
    require(sha256 == report["packed_sha256"], f"{source} holds other codes than {folder / REPORT} is about; {again}")
    return source


def _write_codes(
    folder: Path, target: Path, name: str, dtype: torch.dtype | None, gguf_type: str, allow_rounded_scales: bool
) -> Path:
    source = _quantized_here(folder) if (folder / REPORT).is_file() else _exported(folder, "quantized")
    model, tokenizer = load_model(ModelConfig(ModelSource.folder, str(source), dtype=DType.auto))
    identity = json.loads((source / "lowbit.json").read_text())["quantized"]
    provenance = Provenance(
        base=str(identity["base"]),
        method=str(identity["method"]),
        data=str(identity.get("data", "")),
        packed_sha256=str(identity["packed_sha256"]),
    )
    options = {"gguf_type": gguf_type, "allow_rounded_scales": allow_rounded_scales}
    return write_layout(name, model, tokenizer, target, provenance, dtype=dtype, **options)


def _write_adapter(folder: Path, target: Path) -> Path:
    adapter = folder / "export" / "adapter"
    if not (adapter / "adapter_config.json").is_file():
        adapter = export_run(str(folder), "export.formats=[adapter]")["adapter"]
    model, _ = load_model(read_run_config(folder).model)
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"{folder.name}.gguf"
    write_gguf_adapter(adapter, path, config=model.config, name=folder.name)
    return path
