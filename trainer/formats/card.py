"""README.md of a folder of codes: what it is made of, its figures, how it is loaded here and elsewhere."""

import json
from pathlib import Path

from trainer.config.errors import require
from trainer.formats.empty_model import quantization_config

FORMATS = {
    "quantized": "lowbit's own layout",
    "merged": "16 bits",
    "gptq": "GPTQ's layout",
    "awq": "AWQ's GEMM layout",
    "compressed-tensors": "the layout of compressed-tensors",
    "bitsandbytes": "bitsandbytes' 4 bits",
}
"""What the card calls the format."""
_NEEDS = {
    "gptq": "`pip install gptqmodel optimum`",
    "awq": "`pip install gptqmodel`",
    "compressed-tensors": "`pip install compressed-tensors`",
    "bitsandbytes": "`pip install bitsandbytes`",
}


def write_card(
    folder: Path,
    *,
    base: str,
    method: str,
    data: str,
    figures: dict[str, float | int | str],
    format_name: str,
) -> None:
    """Write the card of a folder that one of trainer/export/layouts.py wrote.

    base         the 16-bit model, org/name where it has one
    method       how codes were chosen, as the beginning of a sentence
    data         what they were chosen on; empty where nothing was looked at
    figures      label -> figure
    format_name  one of FORMATS
    raises       UserError for another format
    """
    require(format_name in FORMATS, f"format={format_name}; cards are written for {', '.join(FORMATS)}")
    identity = json.loads((folder / "lowbit.json").read_text())[format_name]
    (folder / "README.md").write_text(
        _CARD.format(
            base=base,
            method=f"{method}, on {data}" if data else method,
            layout=FORMATS[format_name],
            library="lowbit" if format_name == "quantized" else "transformers",
            tag=format_name,
            layers=_layers_text(format_name, identity),
            table=_table(figures),
            elsewhere="" if format_name == "quantized" else _elsewhere(folder, format_name),
        ),
        encoding="utf-8",
    )


def _elsewhere(folder: Path, format_name: str) -> str:
    """How transformers and vLLM load it; what they do not read of a format is said."""
    config = quantization_config(folder) or {}
    # transformers 5.24 dequantizes all layers by the first config group.
    one_scheme = format_name == "compressed-tensors" and len(config["config_groups"]) == 1
    zeros_or_order = format_name == "gptq" and (config["desc_act"] or not config["sym"])
    return _ELSEWHERE.format(
        needs=_NEEDS.get(format_name, "`pip install transformers`"),
        load=_DEQUANTIZE if one_scheme else _LOAD,
        vllm="vLLM 0.32 reads GPTQ without zero points and without act-order only, and not this folder.\n"
        if zeros_or_order
        else _VLLM,
    )


def _layers_text(format_name: str, identity: dict[str, object]) -> str:
    if format_name == "merged":
        return "Each weight has the value that its code stands for."
    if format_name == "quantized":
        return f"The hash of its codes is `{identity['packed_sha256']}`."
    return f"{identity['num_packed_layers']} layers are codes. {_rounded_text(identity)}"


def _rounded_text(identity: dict[str, object]) -> str:
    if "largest_change" not in identity:
        return "The weights are those that were quantized, bit for bit."
    return (
        f"Scales were rounded to {identity['scales_rounded_to']}, which this layout stores: weights changed by up to "
        f"{identity['largest_change']:.2g} of themselves, {identity['mean_change']:.2g} on average."
    )


def _table(figures: dict[str, float | int | str]) -> str:
    if not figures:
        return ""
    cells = {label: f"{value:.4f}" if isinstance(value, float) else str(value) for label, value in figures.items()}
    return "\n".join(["| | |", "|---|---|", *(f"| {label} | {cell} |" for label, cell in cells.items())]) + "\n"


_LOAD = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("<this folder>", dtype="auto")"""
_DEQUANTIZE = """from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

config = CompressedTensorsConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained("<this folder>", dtype="auto", quantization_config=config)"""
_VLLM = """With vLLM:

```
vllm serve <this folder>
```
"""
_ELSEWHERE = """With transformers ({needs}):

```python
{load}
tokenizer = AutoTokenizer.from_pretrained("<this folder>")
```

{vllm}
"""
_CARD = """---
library_name: {library}
base_model: {base}
base_model_relation: quantized
tags: [lowbit, {tag}]
---
# {base}, quantized

{method}, with lowbit, in {layout}. {layers}

{table}
{elsewhere}Here:

```
python -m trainer.serve model=<this folder>
```
"""
