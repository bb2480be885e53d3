"""The PEFT adapter: what plain PEFT, transformers and vLLM load over the same base.

adapter_config.json, adapter_model.safetensors   as PEFT writes them
tokenizer files, chat template                   what training used
lowbit.json                                      the base's identity: its packed weights' hash, dtype and quantizer
README.md                                        model card with figures and how to load it
"""

import hashlib
import json
import re
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model_state_dict
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trainer.config import Config, ModelSource, UserError, require
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
    dtype = str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    identity = {"base_sha256": base_sha256, "dtype": dtype, "quantizer": asdict(quantizer)}
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


@dataclass(frozen=True)
class AdapterFactors:
    """An adapter as numbers: module name under the base model, such as `layers.0.self_attn.q_proj` -> its update.

    factors  lora_A [rank, in_features], lora_B [out_features, rank], scaling
    sha256   of names, factors and scalings: adapters with equal hashes compute the same
    """

    factors: dict[str, tuple[Tensor, Tensor, float]]
    sha256: str

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max((lora_A.shape[0] for lora_A, _, _ in self.factors.values()), default=0)

    @classmethod
    def of(cls, factors: dict[str, tuple[Tensor, Tensor, float]]) -> "AdapterFactors":
        digest = hashlib.sha256()
        for name, (lora_A, lora_B, scaling) in sorted(factors.items()):
            digest.update(f"{name} {tuple(lora_A.shape)} {tuple(lora_B.shape)} {scaling!r}".encode())
            for factor in (lora_A, lora_B):
                digest.update(factor.detach().float().cpu().contiguous().numpy())
        return cls(factors, digest.hexdigest())


def read_adapter_factors(folder: Path) -> AdapterFactors:
    """Read a PEFT LoRA adapter's factors without building modules.

    raises  UserError if the folder is no adapter, or one whose update is more than scaling * B A
    """
    path = folder / "adapter_model.safetensors"
    require((folder / "adapter_config.json").is_file(), f"{folder} holds no adapter_config.json; give a PEFT adapter")
    require(path.is_file(), f"{path} is missing; save the adapter with safe_serialization=True")
    try:
        config, tensors = PeftLoraConfig.from_pretrained(folder), load_file(path)
    except (SafetensorError, ValueError, TypeError) as error:
        raise UserError(f"{folder} cannot be read: {error}; it is damaged, copy or export the adapter again") from None
    require(isinstance(config, PeftLoraConfig), f"{folder} holds a {config.peft_type} adapter; train LoRA")
    variants = [item.name for item in fields(config) if item.metadata.get("is_lora_variant")]  # DoRA, aLoRA, ...
    others = ("lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters")
    for name in (*variants, *others):
        require(not getattr(config, name, None), f"{folder}: adapters with {name} are not served; train plain LoRA")
    init = config.init_lora_weights
    changes_base = isinstance(init, str) and init.lower().startswith(("pissa", "olora", "corda", "loftq"))
    require(
        not changes_base,
        f"{folder}: init_lora_weights={init} changed the base that the adapter belongs to; convert the adapter with "
        "save_pretrained(path_initial_model_for_weight_conversion=...)",
    )
    require(config.bias == "none", f"{folder}: adapters with bias={config.bias} are not served; use bias=none")
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _FACTOR_KEY.fullmatch(key)
        require(match is not None, f"{path} has {key}; the server reads lora_A and lora_B of linear layers only")
        halves.setdefault(match["module"], {})[match["factor"]] = tensor
    factors = {}
    for module, pair in halves.items():
        require(set(pair) == {"A", "B"}, f"{path}: {module} has only one of lora_A and lora_B; the file is damaged")
        shapes = [tuple(factor.shape) for factor in pair.values()]
        require(all(len(shape) == 2 and 0 not in shape for shape in shapes), f"{path}: {module} has factors {shapes}")
        factors[module] = pair["A"], pair["B"], _scaling(config, module, pair["A"].shape[0])
    return AdapterFactors.of(factors)


_FACTOR_KEY = re.compile(r"base_model\.model\.(?:model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")


def _scaling(config: PeftLoraConfig, module: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) for rsLoRA (arXiv:2312.03732), with the module's own alpha if it has one."""
    key = get_pattern_key(config.alpha_pattern, f"model.{module}")  # PEFT's own rule: the first pattern that matches
    alpha = config.alpha_pattern.get(key, config.lora_alpha)
    return alpha / (rank**0.5 if config.use_rslora else rank)


def check_base(folder: Path, base_sha256: str) -> None:
    """Refuse an adapter over another base than it was trained on.

    raises  UserError if lowbit.json in `folder` names another hash; an adapter without the file passes
    """
    if not (folder / "lowbit.json").is_file():
        return
    trained_on = str(read_identity(folder).get("base_sha256"))
    if trained_on != base_sha256:
        raise UserError(
            f"{folder} was trained on a base whose packed weights have sha256 {trained_on[:12]}, this one has "
            f"{base_sha256[:12]}; use the base and the quant settings that its config.yaml names"
        )


def read_identity(folder: Path) -> dict[str, Any]:
    """What lowbit.json says of the base; nothing where the adapter was trained by others.

    raises  UserError if the file is damaged
    """
    path = folder / "lowbit.json"
    try:
        identity = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}; export the adapter again") from None
    require(isinstance(identity, dict), f"{path} holds no object; export the adapter again")
    return identity


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
            codebook=quant.codebook.value,
            codebook_name=quant.codebook.value.upper(),
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

LoRA of rank {rank}, alpha {alpha}, on {targets} of an {codebook_name} base (blocks of {block_size}{double}), trained on
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
        load_in_4bit=True, bnb_4bit_quant_type="{codebook}", bnb_4bit_use_double_quant={double_flag}
    ),
)
model = PeftModel.from_pretrained(base, "<this folder>")
tokenizer = AutoTokenizer.from_pretrained("<this folder>")
```

bitsandbytes packs blocks of 64 when it loads a model this way; the figures above hold for blocks of {block_size}.
`lowbit.json` holds the hash of the packed weights that the adapter was trained on.
"""
