"""README.md of a folder of codes: what it is made of, its figures, how it is loaded here and elsewhere."""

import json
from pathlib import Path

from trainer.config.errors import require

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
    elsewhere = (
        ""
        if format_name == "quantized"
        else _ELSEWHERE.format(
            needs=_NEEDS.get(format_name, "`pip install transformers`"),
            load=_DEQUANTIZE if format_name == "compressed-tensors" else _LOAD,
        )
    )
    (folder / "README.md").write_text(
        _CARD.format(
            base=base,
            method=f"{method}, on {data}" if data else method,
            layout=FORMATS[format_name],
            library="lowbit" if format_name == "quantized" else "transformers",
            tag=format_name,
            layers=_layers_text(format_name, identity),
            table=_table(figures),
            elsewhere=elsewhere,
        ),
        encoding="utf-8",
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

# dequantize=True reads one scheme for all layers; leave it out where config.json has several config groups
config = CompressedTensorsConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained("<this folder>", dtype="auto", quantization_config=config)"""
_ELSEWHERE = """With transformers ({needs}):

```python
{load}
tokenizer = AutoTokenizer.from_pretrained("<this folder>")
```

With vLLM:

```
vllm serve <this folder>
```

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
