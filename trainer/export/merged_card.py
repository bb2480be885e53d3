"""README.md of a merged model: what it is made of, its figures, what the merge left of the update, how to load it."""

import json
from pathlib import Path
from typing import Any

from trainer.config.model import ModelSource
from trainer.config.schema import Config
from trainer.figures import markdown_table


def write_merged_card(folder: Path, config: Config, metrics: dict[str, Any]) -> None:
    """Write the card of the merged model in `folder`, whose lowbit.json `write_merged` or `write_merged_4bit` wrote.

    metrics  the content of the run's metrics.json
    """
    identity = json.loads((folder / "lowbit.json").read_text())["merged"]
    base = str(identity["base"])
    lossy = "kl" in identity
    (folder / "README.md").write_text(
        _CARD.format(
            base_name=base if config.model.source is ModelSource.hub else Path(base).name,
            tags="[lowbit, 4-bit]" if lossy else "[lowbit]",
            method=identity["method"],
            data=config.data.path and Path(config.data.path).name or config.data.source.value,
            merge=_merge_text(identity),
            table=markdown_table(metrics, config, tuned="tuned, unmerged" if lossy else "tuned"),
            **metrics,
        ),
        encoding="utf-8",
    )


def _merge_text(identity: dict[str, Any]) -> str:
    survived = identity["update_survived"]
    if survived is None:
        return f"The weights are in {identity['dtype']}."
    if "kl" not in identity:
        return (
            "The update was added to the weights in float32 (W' = dequantize(W) + s B A) and rounded once to "
            f"{identity['dtype']}, which left {100 * survived:.1f} % of it. Base and adapter, unmerged, are exact."
        )
    worst = sorted(identity["layers"].items(), key=lambda item: item[1])[:3]
    return (
        "**This merge is lossy.** The merged weights were rounded to 4 bits again, on the grid of the base. Over "
        f"{identity['num_tokens']} held-out target tokens, against base and adapter unmerged:\n\n"
        "| of the update that was trained, left | KL(unmerged, merged), nats a token | likeliest token changed |\n"
        "|---|---|---|\n"
        f"| {100 * survived:.1f} % | {identity['kl']:.3g} | {100 * identity['flips']:.1f} % |\n\n"
        f"Least is left in {', '.join(f'{name} ({100 * share:.1f} %)' for name, share in worst)}; `lowbit.json` has "
        "all layers. Prefer the adapter over its base, or the 16-bit merge."
    )


_CARD = """---
library_name: transformers
base_model: {base_name}
tags: {tags}
---
# {base_name}, fine-tuned

{method}, trained on {data} for {steps} steps ({tokens} tokens) with lowbit, and merged into one model.

{table}

{merge}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("<this folder>", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("<this folder>")
```
"""
