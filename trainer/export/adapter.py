"""The PEFT adapter: what plain PEFT, transformers and vLLM load over the same base.

adapter_config.json, adapter_model.safetensors   as PEFT writes them
tokenizer files, chat template                   what training used
lowbit.json                                      the base's identity: its packed weights' hash and quantizer
README.md                                        model card with figures and how to load it
"""

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from trainer.config import Config, ModelSource, UserError
from trainer.linear import QuantLinear, weights_sha256
from trainer.lora import LoraQuantLinear
from trainer.quantizer import Quantizer


def write_adapter(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    quantizer: Quantizer,
    base_sha256: str,
) -> None:
    """Write the adapter into `folder` and read it back: the file must hold what was trained, bit for bit.

    raises  RuntimeError if the file differs from the model
    """
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    identity = {"base_sha256": base_sha256, "quantizer": asdict(quantizer)}
    (folder / "lowbit.json").write_text(json.dumps(identity, indent=2) + "\n")
    written, trained = load_file(folder / "adapter_model.safetensors"), get_peft_model_state_dict(model)
    if written.keys() != trained.keys() or any(not torch.equal(written[k], trained[k].cpu()) for k in trained):
        raise RuntimeError(f"{folder}/adapter_model.safetensors differs from the trained adapter")


def read_adapter(model: nn.Module, folder: Path) -> PeftModel:
    """Put a written adapter over `model`, whose layers are packed; frozen, in eval mode.

    raises  UserError if the adapter was trained over another base
    """
    check_base(folder, weights_sha256(model))
    config = PeftLoraConfig.from_pretrained(folder)
    config._register_custom_module({QuantLinear: LoraQuantLinear})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unsupported layer type")  # said of every custom module
        return PeftModel.from_pretrained(model, folder, config=config).eval()


def check_base(folder: Path, base_sha256: str) -> None:
    """Refuse an adapter over another base than it was trained on.

    raises  UserError if lowbit.json in `folder` names another hash; an adapter without the file passes
    """
    path = folder / "lowbit.json"
    if not path.is_file():
        return
    trained_on = json.loads(path.read_text())["base_sha256"]
    if trained_on != base_sha256:
        raise UserError(
            f"{folder} was trained on a base whose packed weights have sha256 {trained_on[:12]}, this one has "
            f"{base_sha256[:12]}; use the base and the quant settings that its config.yaml names"
        )


def write_model_card(folder: Path, config: Config, metrics: dict[str, Any]) -> None:
    """README.md in the export: what this is, its figures, how to load it."""
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    data = config.data.path and Path(config.data.path).name or config.data.source.value
    quant = config.quant
    (folder / "README.md").write_text(
        _CARD.format(
            base=base,
            base_name=base if config.model.source is ModelSource.hub else Path(base).name,
            targets="all packed layers" if config.lora.target_modules == "all-linear" else config.lora.target_modules,
            data=data,
            rank=config.lora.rank,
            alpha=config.lora.alpha,
            double=" with double quantisation" if quant.double_quant else "",
            double_flag=quant.double_quant,
            block_size=quant.block_size,
            **metrics,
        ),
        encoding="utf-8",
    )


_CARD = """---
library_name: peft
base_model: {base_name}
tags: [lora, qlora, 4-bit, lowbit]
---
# QLoRA adapter for {base_name}

LoRA of rank {rank}, alpha {alpha}, on {targets} of an NF4 base (blocks of {block_size}{double}), trained on
{data} for {steps} steps ({tokens} tokens) with lowbit.

| held-out, {eval_rows} rows | base | tuned |
|---|---|---|
| loss, nats a target token | {eval_loss_base:.4f} | {eval_loss:.4f} |
| perplexity | {perplexity_base:.3f} | {perplexity:.3f} |

```python
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

base = AutoModelForCausalLM.from_pretrained(
    "{base}",
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant={double_flag}
    ),
)
model = PeftModel.from_pretrained(base, "<this folder>")
tokenizer = AutoTokenizer.from_pretrained("<this folder>")
```

bitsandbytes packs blocks of 64 when it loads a model this way; the figures above hold for blocks of {block_size}.
`lowbit.json` holds the hash of the packed weights that the adapter was trained on.
"""
