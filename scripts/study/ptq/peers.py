"""Another project's quantizer on the study's model and rows: a script for a Python that has this project.

`measure.py` runs it with a folder that holds job.json, and reads what it leaves there:

    job.json      in   peer, method, settings, model (a Hugging Face folder), rows (token ids)
    export/       out  what the peer's users would ship
    figures.json  out  version, seconds, cpu_s, peak_memory_bytes, and all settings that the result depends on

Nothing of lowbit is imported: the peer's Python has other versions of torch and transformers. What the job does not set
is the peer's default. Seconds count loading, quantizing and writing, as those of quantize.py do, and no imports.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def gptqmodel(job: dict[str, Any], export: Path) -> Callable[[], dict[str, Any]]:
    """GPTQModel's GPTQ, on the CPU."""
    # Its default is half of the cores, and 7.7 does not start with 1.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import GPTQModel, QuantizeConfig

    def quantize() -> dict[str, Any]:
        config = QuantizeConfig(**job["settings"])
        model = GPTQModel.load(job["model"], config, device="cpu")
        model.quantize(_examples(job["rows"]))
        model.save(str(export))
        names = ("bits", "group_size", "sym", "desc_act", "act_group_aware", "static_groups", "damp_percent", "mse")
        return {name: getattr(config, name) for name in names}

    return quantize


def llmcompressor(job: dict[str, Any], export: Path) -> Callable[[], dict[str, Any]]:
    """llm-compressor's GPTQ, or its AWQ before rounding to nearest; the output head stays as it is."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not torch.accelerator.is_available():
        # 0.14's AWQ pins memory for an accelerator without asking whether there is one, and torch refuses.
        IntermediatesCache.pin_memory = lambda *_: None

    def quantize() -> dict[str, Any]:
        weights = QuantizationArgs(type="int", strategy="group", **job["settings"])
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        layers = {"ignore": ["lm_head"], "config_groups": {"group_0": scheme}}
        gptq, awq, rounding = GPTQModifier(**layers), AWQModifier(), QuantizationModifier(**layers)
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(job["model"])
        oneshot(
            model=model,
            tokenizer=tokenizer,
            dataset=Dataset.from_list(_examples(job["rows"])),
            recipe=[gptq] if job["method"] == "gptq" else [awq, rounding],
            num_calibration_samples=len(job["rows"]),
            max_seq_length=max(map(len, job["rows"])),
        )
        model.save_pretrained(export, save_compressed=True)
        tokenizer.save_pretrained(export)
        used = {**job["settings"], "observer": scheme.weights.observer}
        if job["method"] == "gptq":
            return {**used, **{name: str(getattr(gptq, name)) for name in ("block_size", "dampening_frac", "actorder")}}
        return {**used, "duo_scaling": awq.duo_scaling, "n_grid": awq.n_grid}

    return quantize


PEERS = {"gptqmodel": gptqmodel, "llmcompressor": llmcompressor}


def _examples(rows: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]


def _peak_memory_bytes() -> int:
    """Of this program alone: before exec a child counts as large as its parent, and ru_maxrss remembers it."""
    status = Path("/proc/self/status")
    if status.is_file():
        return next(int(line.split()[1]) * 1024 for line in status.open() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def main(folder: Path) -> None:
    """Do the job in `folder`."""
    job = json.loads((folder / "job.json").read_text())
    quantize = PEERS[job["peer"]](job, folder / "export")
    began, cpu_began = time.monotonic(), time.process_time()
    settings = quantize()
    figures = {
        "version": version(job["peer"]),
        "seconds": time.monotonic() - began,
        "cpu_s": time.process_time() - cpu_began,
        "peak_memory_bytes": _peak_memory_bytes(),
        "settings": settings,
    }
    (folder / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
