"""The quantized model: the codes that training multiplied, in a folder that `trainer/formats/lowbit.py` opens.

    config.json, packed.safetensors, generation_config.json   see formats/lowbit.py
    tokenizer files, chat template                            what training used
    lowbit.json                                               where it comes from
    README.md                                                 model card

The folder is complete or absent, and it is read back before the run goes on: hashes of the codes in training, in memory
and on disk are equal, or there is no export.
"""

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.architecture import base_model
from trainer.config.model import ModelSource
from trainer.config.schema import Config
from trainer.export.method import describe_scheme
from trainer.figures import markdown_table
from trainer.formats.hf_folder import SHARD_BYTES, whole_folder, write_identity, write_model
from trainer.formats.lowbit import WEIGHTS, describe_packed, open_packed
from trainer.qat.packed_linear import PackedEmbedding
from trainer.qat.packed_model import packed_layers
from trainer.qat.scheme import Scheme


def write_quantized(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    trained_sha256: str,
    kv_cache: bool = False,
    provenance: dict[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> PreTrainedModel:
    """Write a converted model and read it back.

    model           every quantized layer holds codes (`convert`)
    trained_sha256  `packed_sha256` of the model as it was trained
    kv_cache        it was trained for an INT8 KV cache
    provenance      goes into lowbit.json
    returns         the model that was read from the folder
    raises          RuntimeError if the codes are not those that were trained, UserError if the disk is too full
    """
    causal_lm = base_model(model)
    dtype = causal_lm.dtype
    entry = describe_packed(causal_lm, dtype, kv_cache=kv_cache)
    if entry["packed_sha256"] != trained_sha256:
        raise RuntimeError(
            f"the packed model holds codes {entry['packed_sha256'][:12]} and training multiplied "
            f"{trained_sha256[:12]}; nothing was exported"
        )
    needs_bytes = sum(tensor.nbytes for tensor in causal_lm.state_dict().values())
    with whole_folder(folder, needs_bytes=needs_bytes) as partial:
        options = {"dtype": dtype, "shard_bytes": shard_bytes, "stem": WEIGHTS, "quantization_config": entry}
        write_model(causal_lm, tokenizer, partial, _codes, **options)
        identity = {**(provenance or {}), "packed_sha256": trained_sha256, "dtype": entry["dtype"]}
        write_identity(partial, "quantized", identity)
        opened = open_packed(partial, dtype)  # compares the hashes
    opened.name_or_path = str(folder)
    return opened


def _codes(name: str, layer: nn.Module) -> dict[str, Tensor]:
    """The tensors of a packed layer, as they are."""
    tensors = {**layer.quantized.tensors, "input_scale": getattr(layer, "input_scale", None)}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


def describe_schemes(model: nn.Module) -> str:
    """What was quantized how, as part of a sentence."""
    counts: dict[str, int] = {}
    for layer in packed_layers(model).values():
        what = describe_scheme(getattr(layer, "scheme", None) or Scheme(layer.quantized.quantizer))
        what = f"{what}, an embedding" if isinstance(layer, PackedEmbedding) else what
        counts[what] = counts.get(what, 0) + 1
    return "; ".join(f"{count} layers {what}" for what, count in counts.items())


def write_quantized_card(folder: Path, config: Config, metrics: dict[str, Any]) -> None:
    """README.md of the folder that `write_quantized` wrote; metrics: the content of metrics.json."""
    identity = json.loads((folder / "lowbit.json").read_text())["quantized"]
    base = str(identity["base"])
    share = metrics["qat"]["recovered"]
    (folder / "README.md").write_text(
        _CARD.format(
            base_name=base if config.model.source is ModelSource.hub else Path(base).name,
            data=config.data.path and Path(config.data.path).name or config.data.source.value,
            recovered="" if share is None else f"Of what rounding to nearest lost, {100 * share:.0f} % came back.",
            table=markdown_table(metrics, config, tuned="trained"),
            **identity,
            **metrics,
        ),
        encoding="utf-8",
    )


_CARD = """---
library_name: lowbit
base_model: {base_name}
tags: [lowbit, quantization-aware-training]
---
# {base_name}, quantized in training

{method}, trained on {data} for {steps} steps ({tokens} tokens) with lowbit. The files hold the codes that the last step
multiplied, {schemes}; their hash is `{packed_sha256}`.

{table}

{recovered}

```
python -m trainer.serve model=<this folder>
```

```python
from trainer.config.model import ModelConfig, ModelSource
from trainer.model import load_model

model, tokenizer = load_model(ModelConfig(ModelSource.folder, "<this folder>"))
```
"""
