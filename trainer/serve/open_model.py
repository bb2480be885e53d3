"""From `model=...` to a module, a tokenizer and the adapter that belongs to them.

a run folder        config.yaml: the base as it was trained, with export/adapter over it, or export/quantized
what quantize.py wrote   quantize.json: export/quantized
an adapter folder   adapter_config.json: the base it names, packed as lowbit.json says
a Hugging Face folder, a .gguf file, org/name, smollm2_135m, tiny
a module in memory  as it is
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trainer.compose import read_run_config
from trainer.config.errors import UserError, require
from trainer.config.model import DType, ModelConfig, ModelSource, named_model, short_name
from trainer.config.ptq import REPORT
from trainer.config.quant import Codebook, QuantConfig
from trainer.export.adapter import base_plan, put_token_rows, read_identity
from trainer.export.base_codes import restore_base
from trainer.formats.lowbit import packed_entry
from trainer.linear import weights_sha256
from trainer.model import load_model, prepare_model
from trainer.qat.fake_quant import fake_quantize_linears
from trainer.qat.packed_model import packed_layers
from trainer.qat.scheme import Scheme
from trainer.serve.config import ServeConfig

INTEGER_SCHEMES = {
    "int4": Scheme.named("int4"),
    "int4_dynamic": Scheme.named("int4_int8"),
    "int8_dynamic": Scheme.named("int8"),
}
"""quantization -> the scheme, as quantization-aware training names it."""

Quantization = QuantConfig | Scheme | None


@dataclass(slots=True)
class OpenedModel:
    """What the engine is built from.

    adapters     name -> folder, to load at start; the first one of a run or adapter folder is the default
    base_sha256  the hash that an adapter's lowbit.json must name
    disposable   nobody else has the module: the engine takes it apart while it is built, and holds no weight twice
    """

    module: nn.Module
    tokenizer: PreTrainedTokenizerBase
    name: str
    adapters: dict[str, str]
    default_adapter: str | None = None
    base_sha256: str = ""
    disposable: bool = False


def open_model(config: ServeConfig) -> OpenedModel:
    """Load what `config.model` names.

    raises  UserError if it is nothing that can be served
    """
    path = Path(config.model).expanduser()
    if path.is_dir() and (path / REPORT).is_file():
        quantized = named_model(str(path / "export" / "quantized"), DType(config.dtype))
        config.served_model_name = config.served_model_name or path.name
        opened = _open_base(quantized, _scheme(config.quantization), config)
    elif path.is_dir() and (path / "config.yaml").is_file():
        opened = _open_run(path, config)
    elif path.is_dir() and (path / "adapter_config.json").is_file():
        opened = _open_adapter(path, config)
    else:
        opened = _open_base(named_model(config.model, DType(config.dtype)), _scheme(config.quantization), config)
    for item in config.adapters:
        name, _, folder = item.partition("=")
        require(name not in opened.adapters, f"adapters names {name} twice; give each its own name")
        opened.adapters[name] = folder
    opened.disposable = True
    if config.tokenizer is not None:
        opened.tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)
    return opened


def _open_run(run: Path, config: ServeConfig) -> OpenedModel:
    trained = read_run_config(run)
    if config.dtype != "auto":
        trained.model.dtype = DType(config.dtype)
    quant = trained.quant if config.quantization is None else _scheme(config.quantization)
    adapter, merged, quantized = (run / "export" / name for name in ("adapter", "merged", "quantized"))
    if trained.qat.enabled and (quantized / "config.json").is_file():  # an adapter alone is not what was trained
        model = ModelConfig(ModelSource.folder, str(quantized), dtype=trained.model.dtype)
        config.served_model_name = config.served_model_name or run.name
        return _open_base(model, _scheme(config.quantization), config)
    if (merged / "config.json").is_file() and (trained.qat.enabled or not adapter.exists()):
        model = ModelConfig(ModelSource.folder, str(merged), dtype=trained.model.dtype)
        config.served_model_name = config.served_model_name or run.name
        return _open_base(model, _scheme(config.quantization), config)
    require(
        (adapter / "adapter_config.json").is_file(),
        f"{run} holds no export/adapter; let the run finish (resume={run}), or give another model",
    )
    return _open_base(trained.model, quant, config, adapter=adapter, adapter_name=run.name)


def _open_adapter(folder: Path, config: ServeConfig) -> OpenedModel:
    base = json.loads((folder / "adapter_config.json").read_text()).get("base_model_name_or_path")
    require(
        bool(base), f"{folder}/adapter_config.json names no base model; serve the base and load the adapter over it"
    )
    base_config = named_model(base, DType(config.dtype))
    quant, name = _scheme(config.quantization), folder.resolve().name
    return _open_base(base_config, quant, config, adapter=folder, adapter_name=name)


def _open_base(
    model_config: ModelConfig,
    quant: Quantization,
    config: ServeConfig,
    *,
    adapter: Path | None = None,
    adapter_name: str = "",
) -> OpenedModel:
    if adapter is not None and model_config.dtype is DType.auto:
        # What was auto when the adapter was trained: embeddings and norms in another dtype are another base.
        model_config.dtype = DType(read_identity(adapter).get("dtype", "auto"))
    if adapter is not None:
        model_config.add_tokens = list(read_identity(adapter).get("added_tokens", {}))
    module, tokenizer = load_model(model_config)
    require(
        quant is None or not packed_layers(module),
        f"quantization={config.quantization} would round {config.model} again, which holds codes already; leave it out",
    )
    if config.kv_cache_dtype == "auto" and (packed_entry(str(model_config.path)) or {}).get("kv_cache") == "int8":
        config.kv_cache_dtype = "int8"  # as it was trained
    # As the adapter's base was packed, unless the user wants another one: its plan says more than the run's config.
    plan = None if adapter is None or config.quantization is not None else base_plan(adapter)
    if plan is not None or (isinstance(quant, QuantConfig) and quant.codebook is not Codebook.none):
        prepare_model(module, quant if isinstance(quant, QuantConfig) else QuantConfig(), plan=plan)
        if adapter is not None:
            restore_base(module, adapter, read_identity(adapter))
    elif isinstance(quant, Scheme):
        _fake_quantize(module, quant)
    sha256 = weights_sha256(module)
    if adapter is not None and model_config.add_tokens:
        put_token_rows(module, adapter)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)  # Triton launches on the current device, wherever the tensors are
        module.to(device)
    name = config.served_model_name or short_name(model_config)
    if adapter is None:
        return OpenedModel(module, tokenizer, name, {}, base_sha256=sha256)
    if (adapter / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(adapter)
    return OpenedModel(module, tokenizer, name, {adapter_name: str(adapter)}, adapter_name, sha256)


def opened_module(module: nn.Module, tokenizer: PreTrainedTokenizerBase, name: str = "live") -> OpenedModel:
    """A model in memory, served as it is; see adapters.factors_from_module for the adapter on it."""
    return OpenedModel(module, tokenizer, name, {}, base_sha256=weights_sha256(module))


def _fake_quantize(module: PreTrainedModel, scheme: Scheme) -> None:
    """Layers that compute what quantization-aware training would; the decoder packs their weights by the scheme."""
    head = module.get_output_embeddings()
    try:
        fake_quantize_linears(module, lambda name: None if module.get_submodule(name) is head else scheme)
    except ValueError as error:
        raise UserError(f"{error}; or use quantization=nf4") from None


def _scheme(quantization: str | None) -> Quantization:
    if quantization in INTEGER_SCHEMES:
        return INTEGER_SCHEMES[quantization]
    return None if quantization in (None, "none") else QuantConfig(Codebook(quantization))


def eos_token_ids(opened: OpenedModel) -> tuple[int, ...]:
    """Every id that ends an answer: the tokenizer's and the model's own list."""
    generation = getattr(opened.module, "generation_config", None)
    listed = getattr(generation, "eos_token_id", None)
    ids = [listed] if isinstance(listed, int) else list(listed or [])
    ids += [] if opened.tokenizer.eos_token_id is None else [opened.tokenizer.eos_token_id]
    return tuple(dict.fromkeys(ids))
