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
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trainer.architecture import base_model
from trainer.config.errors import UserError, require
from trainer.config.model import ModelSource
from trainer.config.quant import Codebook, QuantConfig
from trainer.config.schema import Config
from trainer.export.base_codes import FILE_NAME, copy_base_codes, restore_base
from trainer.export.method import describe_method
from trainer.export.rounded_adapter import read_rounded, rounding_identity, write_scales
from trainer.figures import markdown_table
from trainer.linear import QuantLinear, weights_sha256
from trainer.lora import adapter_tensors, plain_config, register_layers
from trainer.quant_plan import QuantPlan
from trainer.quantizer import DEFAULTS
from trainer.vocabulary import check_tokenizer, is_tied, tokenizer_sha256


def write_adapter(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    base_sha256: str,
    base_codes: Path | None = None,
) -> None:
    """Write the adapter into `folder` and read it back: the file must hold what was trained, bit for bit.

    base_codes  the run folder, whose codes of the base travel with the adapter if it has any
    raises  RuntimeError if the file differs from the model
    """
    model.save_pretrained(folder, save_embedding_layers=False)  # "auto" would add a whole embedding to new tokens' rows
    tokenizer.save_pretrained(folder)
    dtype = str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    identity = {"base_sha256": base_sha256, "dtype": dtype, **_packed_by(model)}
    identity |= _vocabulary(model, tokenizer) | rounding_identity(model)
    write_scales(model, folder)
    codes = base_codes and copy_base_codes(model, base_codes, folder)
    if codes:
        identity["base_codes"] = codes
    (folder / "lowbit.json").write_text(json.dumps(identity, indent=2) + "\n")
    trained = adapter_tensors(model)
    save_file(
        {name: tensor.cpu().clone().contiguous() for name, tensor in trained.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    plain_config(model, PeftLoraConfig.from_pretrained(folder)).save_pretrained(folder)
    written = load_file(folder / "adapter_model.safetensors")
    if written.keys() != trained.keys() or any(not torch.equal(written[k], trained[k].cpu()) for k in trained):
        raise RuntimeError(f"{folder}/adapter_model.safetensors differs from the trained adapter")


def _packed_by(model: nn.Module) -> dict[str, Any]:
    """What lowbit.json says of the quantizers, so that `base_plan` can pack the base again; null for a 16-bit base."""
    layers = {
        name.removesuffix(".base_layer"): layer.quantizer
        for name, layer in base_model(model).named_modules()
        if isinstance(layer, QuantLinear)
    }
    return QuantPlan.of_layers(layers).to_dict() if layers else {"quantizer": None}


def base_plan(folder: Path) -> QuantPlan | None:
    """How the base of the adapter in `folder` was packed; None if it was not, or if the adapter does not say.

    raises  UserError if lowbit.json is damaged
    """
    identity = read_identity(folder)
    if not identity.get("quantizer"):
        return None
    try:
        return QuantPlan.from_dict(identity)
    except ValueError as error:
        raise UserError(f"{folder / 'lowbit.json'}: {error}; export the adapter again") from None


def _vocabulary(model: PeftModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What lowbit.json says of embedding and tokenizer, so that `check_vocabulary` can tell them from others."""
    indices = model.active_peft_config.trainable_token_indices or []
    ids = next(iter(indices.values())) if isinstance(indices, dict) else indices
    return {
        "tied": is_tied(model.get_base_model()),
        "vocab_size": model.get_input_embeddings().weight.shape[0],
        "num_tokens": len(tokenizer.get_vocab()),
        "added_tokens": dict(zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True)),
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
    }


def check_vocabulary(folder: Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Refuse a base with another embedding, or another tokenizer, than the adapter in `folder` was trained with.

    raises  UserError saying what differs; an adapter without lowbit.json, or of an earlier version, passes
    """
    identity = read_identity(folder)
    rows, trained = model.get_input_embeddings().weight.shape[0], identity.get("vocab_size")
    if trained is not None and trained != rows:
        added = list(identity.get("added_tokens", {}))
        next_step = f"load the base with model.add_tokens={added}" if added else "use the base that it names"
        raise UserError(
            f"{folder} was trained on a base with {trained} embedding rows, this one has {rows}; {next_step}"
        )
    tied, now = identity.get("tied"), is_tied(base_model(model))
    require(
        tied in (None, now),
        f"{folder} was trained on a base with tie_word_embeddings={tied}, this one has {now}; use the base that its "
        "config.yaml names",
    )
    if tokenizer is not None:
        check_tokenizer(tokenizer, identity, str(folder))


def read_adapter(model: nn.Module, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> PeftModel:
    """Put a written adapter over `model`, packed as it was in training; frozen, in eval mode.

    Codes that travelled with the adapter replace those of the base.

    tokenizer  what the model will be used with; checked if given
    raises     UserError if the adapter was trained over another base, vocabulary or tokenizer
    """
    check_vocabulary(folder, model, tokenizer)
    restore_base(model, folder, read_identity(folder))
    config, rounded = PeftLoraConfig.from_pretrained(folder), read_identity(folder).get("rounded")
    if not rounded:
        check_base(folder, weights_sha256(model))
        register_layers(config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unsupported layer type")  # said of every custom module
        if rounded:
            return read_rounded(model, folder, config, rounded)
        return PeftModel.from_pretrained(model, folder, config=config).eval()


@dataclass(frozen=True)
class AdapterFactors:
    """An adapter as numbers: module name under the base model, such as `layers.0.self_attn.q_proj` -> its update.

    factors     lora_A [rank, in_features], lora_B [out_features, rank], scaling
    sha256      of all the rest: adapters with equal hashes compute the same
    token_rows  module ("embed_tokens", "lm_head") -> ids of added tokens and their trained rows [n, hidden_size]
    """

    factors: dict[str, tuple[Tensor, Tensor, float]]
    sha256: str
    token_rows: dict[str, tuple[list[int], Tensor]] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max((lora_A.shape[0] for lora_A, _, _ in self.factors.values()), default=0)

    @classmethod
    def of(
        cls,
        factors: dict[str, tuple[Tensor, Tensor, float]],
        token_rows: dict[str, tuple[list[int], Tensor]] | None = None,
    ) -> "AdapterFactors":
        digest = hashlib.sha256()
        for name, (lora_A, lora_B, scaling) in sorted(factors.items()):
            digest.update(f"{name} {tuple(lora_A.shape)} {tuple(lora_B.shape)} {scaling!r}".encode())
            for factor in (lora_A, lora_B):
                digest.update(factor.detach().float().cpu().contiguous().numpy())
        for name, (ids, rows) in sorted((token_rows or {}).items()):
            digest.update(f"{name} {ids}".encode())
            digest.update(rows.detach().float().cpu().contiguous().numpy())
        return cls(factors, digest.hexdigest(), token_rows or {})


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
    others = ("lora_bias", "modules_to_save", "layer_replication", "target_parameters")
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
    token_rows = _take_token_rows(config, tensors, folder)
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
    return AdapterFactors.of(factors, token_rows)


def _take_token_rows(
    config: PeftLoraConfig, tensors: dict[str, Tensor], folder: Path
) -> dict[str, tuple[list[int], Tensor]]:
    """Take the trained rows of added tokens out of `tensors`: module -> ids and rows.

    raises  UserError if rows of tokens are trained that the base has: other requests use them too
    """
    token_rows, indices = {}, config.trainable_token_indices
    added = set(read_identity(folder).get("added_tokens", {}).values())
    for key in [key for key in tensors if key.endswith(_TOKEN_ROWS)]:
        module = key.removesuffix(_TOKEN_ROWS).rpartition(".")[2]
        ids = list(indices[module] if isinstance(indices, dict) else indices)
        require(
            set(ids) <= added,
            f"{folder} trains rows of {module} for tokens that the base has, which is not served, since other requests "
            "use them; merge the adapter and serve the merged model",
        )
        token_rows[module] = ids, tensors.pop(key)
    return token_rows


@torch.no_grad()
def put_token_rows(model: nn.Module, folder: Path) -> None:
    """Write the trained rows of the adapter's added tokens into the base's embedding and head, in place.

    Nothing but these tokens changes, and a base that was not tuned has no use for them.
    """
    for module, (ids, rows) in read_adapter_factors(folder).token_rows.items():
        layer = model.get_input_embeddings() if module == "embed_tokens" else model.get_output_embeddings()
        layer.weight[ids] = rows.to(layer.weight)


_TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"
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
    identity = read_identity(folder)
    require(
        not identity.get("rounded"),
        f"{folder} was trained through the rounding of the weights that it merges into; beside its base it is another "
        "model. Serve the run, or its export `quantized`",
    )
    trained_on, added = str(identity.get("base_sha256")), list(identity.get("added_tokens", {}))
    if trained_on != base_sha256:
        own = [f"the tokens {added} added"] if added else []
        own += [f"the codes in its {FILE_NAME}"] if "base_codes" in identity else []
        tokens = f", with {' and '.join(own)} (start the server with model={folder})" if own else ""
        raise UserError(
            f"{folder} was trained on a base whose packed weights have sha256 {trained_on[:12]}, this one has "
            f"{base_sha256[:12]}; use the base and the quant settings that its config.yaml names{tokens}"
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
    identity = read_identity(folder)
    values = {
        "base": base,
        "source": "hub" if config.model.source is ModelSource.hub else "folder",
        "dtype": identity.get("dtype", "auto"),
        "block_size": config.quant.block_size or DEFAULTS["nf4"]["block_size"],
        "codebook": config.quant.codebook.value,
        "double_flag": config.quant.double_quant is not False,
    }
    (folder / "README.md").write_text(
        _CARD.format(
            base_name=base if config.model.source is ModelSource.hub else Path(base).name,
            method=describe_method(config),
            data=data,
            table=markdown_table(metrics, config),
            how_to_load=_how_to_load(config.quant, identity).format(**values) + _how_to_add_tokens(identity),
            **metrics,
        ),
        encoding="utf-8",
    )


def _how_to_add_tokens(identity: dict[str, Any]) -> str:
    added = identity.get("added_tokens")
    if not added:
        return ""
    names = ", ".join(f"`{token}`" for token in added)
    return (
        f"\nTraining added the tokens {names}. Take the tokenizer that lies here, and "
        f"give the base their rows before the adapter: `base.resize_token_embeddings({identity['vocab_size']})`, or "
        f"`ModelConfig(..., add_tokens={list(added)})`. The adapter holds what the rows became.\n"
    )


def _how_to_load(quant: QuantConfig, identity: dict[str, Any]) -> str:
    """Only a plain 4-bit codebook is a base that bitsandbytes packs to the same bytes."""
    if identity.get("rounded"):
        return _LOAD_ROUNDED
    if quant.codebook is Codebook.none:
        return _LOAD_DENSE
    elsewhere = quant.codebook in (Codebook.nf4, Codebook.fp4) and quant.bits_budget is None
    if "base_codes" not in identity:
        return _LOAD_BITSANDBYTES if elsewhere else _LOAD_HERE
    same_blocks = (quant.block_size or DEFAULTS["nf4"]["block_size"]) == 64  # bitsandbytes packs no others on loading
    return _LOAD_HERE + (_LOAD_CODES if elsewhere and same_blocks else "")


_CARD = """---
library_name: peft
base_model: {base_name}
tags: [lora, lowbit]
---
# Adapter for {base_name}

{method}, trained on {data} for {steps} steps ({tokens} tokens) with lowbit.

{table}

{how_to_load}"""

_LOAD_BITSANDBYTES = """```python
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

_LOAD_DENSE = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("{base}", dtype="{dtype}")
model = PeftModel.from_pretrained(base, "<this folder>")
tokenizer = AutoTokenizer.from_pretrained("<this folder>")
```

`lowbit.json` holds the hash of the weights that the adapter was trained on.
"""

_LOAD_ROUNDED = """Training rounded the merged weights: what was measured above are the codes of W + s B A, the export
`quantized`. This adapter gives the same codes here, over the same base:

```python
from pathlib import Path

from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.export.adapter import read_adapter
from trainer.model import load_model

model, tokenizer = load_model(ModelConfig(ModelSource.{source}, "{base}", dtype=DType("{dtype}")))
model = read_adapter(model, Path("<this folder>"))
```

Over the 16-bit base in PEFT it is a plain LoRA, the model without the rounding.
"""

_LOAD_HERE = """```python
from pathlib import Path

from trainer.config.model import DType, ModelConfig, ModelSource
from trainer.config.quant import QuantConfig
from trainer.export.adapter import base_plan, read_adapter
from trainer.model import load_model, prepare_model

folder = Path("<this folder>")
model, tokenizer = load_model(ModelConfig(ModelSource.{source}, "{base}", dtype=DType("{dtype}")))
prepare_model(model, QuantConfig(), plan=base_plan(folder))
model = read_adapter(model, folder)
```

or `python -m trainer.serve model=<this folder>`. Other libraries do not pack this base: over their 4-bit weights, or
over the 16-bit ones, the adapter is another model than the one measured above. `lowbit.json` holds the base's hash.
"""

_LOAD_CODES = """
This base's codes are not those nearest to the original weights, they were chosen together with the adapter; those that
differ are in `base_codes.safetensors`. With bitsandbytes, pack the original and put them in:

```python
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

base = AutoModelForCausalLM.from_pretrained(
    "{base}",
    dtype="{dtype}",
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="{codebook}",
        bnb_4bit_use_double_quant={double_flag},
        bnb_4bit_compute_dtype=torch.{dtype},
    ),
)
codes = load_file("<this folder>/base_codes.safetensors")
for name in {{key.rpartition(".")[0] for key in codes}}:
    weight = base.get_submodule(name).weight
    state = weight.quant_state
    weight.data.copy_(codes[name + ".packed"].view_as(weight))
    state.absmax.copy_(codes[name + ".absmax"])
    if state.nested:
        state.state2.absmax.copy_(codes[name + ".nested_absmax"])
        state.offset.copy_(codes[name + ".nested_offset"])
model = PeftModel.from_pretrained(base, "<this folder>")
tokenizer = AutoTokenizer.from_pretrained("<this folder>")
```
"""
