"""The quantized model: the codes that training multiplied, in a folder that `trainer/qat/packed_model.py` opens.

    config.json, packed.safetensors, generation_config.json   see packed_model.py
    tokenizer files, chat template                            what training used
    lowbit.json                                               where it comes from
    README.md                                                 model card

The folder is complete or absent, and it is read back before the run goes on: hashes of the codes in training, in memory
and on disk are equal, or there is no export.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.architecture import base_model
from trainer.config.model import ModelSource
from trainer.config.schema import Config
from trainer.export.merged import whole_folder
from trainer.export.method import describe_scheme
from trainer.figures import markdown_table
from trainer.qat.packed_linear import PackedEmbedding
from trainer.qat.packed_model import WEIGHTS, describe_packed, open_packed, packed_layers
from trainer.qat.scheme import Scheme
from trainer.vocabulary import is_tied


def write_quantized(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    trained_sha256: str,
    kv_cache: bool = False,
    provenance: dict[str, Any] | None = None,
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
    tensors = _tensors(causal_lm)
    needs_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with whole_folder(folder, needs_bytes=needs_bytes) as partial:
        save_torch_state_dict(tensors, partial, filename_pattern=WEIGHTS + "{suffix}.safetensors")
        _write_config(causal_lm, partial, entry)
        tokenizer.save_pretrained(partial)
        identity = {**(provenance or {}), "packed_sha256": trained_sha256, "dtype": entry["dtype"]}
        (partial / "lowbit.json").write_text(json.dumps({"quantized": identity}, indent=2) + "\n", encoding="utf-8")
        opened = open_packed(partial, dtype)  # compares the hashes
    opened.name_or_path = str(folder)
    return opened


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What the file holds: each tensor once."""
    tensors = model.state_dict()
    if _ties(model):
        head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
        del tensors[f"{head}.weight"]
    # Copies: codes can be views of a larger tensor, which safetensors refuses.
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _ties(model: PreTrainedModel) -> bool:
    """Whether embedding and output head are one dense tensor."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    packed = packed_layers(model).values()
    if head is None or not is_tied(model) or head in packed or embedding in packed:
        return False
    return head.weight is embedding.weight or torch.equal(head.weight, embedding.weight)


def _write_config(model: PreTrainedModel, folder: Path, entry: dict[str, Any]) -> None:
    config = copy.deepcopy(model.config)
    vars(config).pop("_name_or_path", None)
    config.dtype, config.architectures = getattr(torch, entry["dtype"]), [type(model).__name__]
    config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = _ties(model)
    config.quantization_config = entry
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.to_json_file(folder / "generation_config.json")


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
