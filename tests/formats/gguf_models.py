"""Small random models, trained tokenizers and llama.cpp for the tests of GGUF files."""

import argparse
import ctypes
import functools
import inspect
import json
import tokenize
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from trainer.formats.gguf_pretokenizer import SPLITTERS

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
EOS = "<|im_end|>"
MAX_POSITIONS = 256


@functools.cache
def texts() -> tuple[str, ...]:
    """Docstrings of the running Python's library, and strings on which tokenizers fall apart."""
    found = [
        documented.__doc__
        for module in (argparse, inspect, json, tokenize, functools, ctypes)
        for _, documented in inspect.getmembers(module)
        if isinstance(getattr(documented, "__doc__", None), str)
    ]
    edges = (
        *(
            " ",
            "  a",
            "a  ",
            "\n\n\n",
            "\t\tx\n \n  y",
            "a\r\nb\r\n\r\nc",
            "\u00a0x\u2003y\u3000z",
            "x\u200dy",
            "\x1f\x7f",
        ),
        *("0123456789 3.14 1,000,000 1e-5", "x1y22z333", "²³½ⅷ ٣٤ १२", "I'll we'LL they've it'S 'tis rock'n'roll"),
        *("déjà vu naïve Ünïcödé", "e\u0301 a\u0308", "東京タワー 你好，世界！", "สวัสดี हिन्दी العربية עברית"),
        *("🙂👩\u200d👩\u200d👧 🇩🇪", "CamelCaseHTTPServer", "a/b//c\n/", "...!?;:\"'()[]{}<>|\\@#$%^&*_+-=~`"),
        "def f(x):\n    return x**2  # ok\n",
    )
    return tuple(dict.fromkeys((*edges, *found)))


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of some hundred tokens; kind: a splitter's name, sentencepiece or sentencepiece-new."""
    if kind.startswith("sentencepiece"):
        return _sentencepiece(by_normalizer=kind == "sentencepiece")
    splitter = next(splitter for splitter in SPLITTERS if splitter.name == kind)
    backend = Tokenizer(models.BPE(ignore_merges=splitter.skips_merges))
    backend.pre_tokenizer, backend.decoder = splitter.pieces, decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", EOS, "<|pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(texts(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=EOS, pad_token=special[2], unk_token=special[0],
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )  # fmt: skip
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def _sentencepiece(*, by_normalizer: bool) -> PreTrainedTokenizerFast:
    """As Llama 2: a space before the text, bytes to fall back on, bos before it; merges as its converter makes them.

    by_normalizer  spaces are replaced by the normalizer, as older files have it, which looks at no text's beginning
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.train_from_iterator(texts(), trainers.BpeTrainer(vocab_size=500, show_progress=False))
    learned = json.loads(backend.to_str())["model"]
    made = ["".join(pair) for pair in learned["merges"]]
    order = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    order += [token for token in sorted(learned["vocab"], key=learned["vocab"].get) if token not in made] + made
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(order))}
    merges = [
        (token[:cut], token[cut:])
        for token in dict.fromkeys(made)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    bpe = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    backend = Tokenizer(bpe)
    if by_normalizer:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def small_model(
    architecture: str,
    *,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    tokenizer: str = "smollm",
    **settings: Any,
) -> PreTrainedModel:
    """Random weights in float32 whose logits have a spread of some units; norms and biases are not ones and zeros."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 512 if hidden % 256 == 0 else hidden * 3 // 2,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": MAX_POSITIONS,
        "vocab_size": len(tokenizer_of(tokenizer)) + 5,
        "tie_word_embeddings": False,
        "sliding_window": None,
    }
    config = CONFIGS[architecture](**{**sizes, **settings}, pad_token_id=0, bos_token_id=0, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        scale = 0.3 if weight.dim() == 1 else 1.5 / weight.shape[1] ** 0.5
        scale = 1.0 if "embed_tokens" in name else scale
        weight.copy_(torch.randn(weight.shape, generator=generator) * scale + ("norm" in name))
    return model


def random_ids(model: PreTrainedModel, count: int = 40) -> list[int]:
    """Token ids without special ones."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, model.config.vocab_size - 10, (count,), generator=generator).tolist()


def open_llama(path: Path, **options: Any) -> Any:
    """The file in llama.cpp, keys and values in float32; skips without the package."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is compiled on installation: extra [bench]")
    settings = {"n_ctx": MAX_POSITIONS, "n_batch": MAX_POSITIONS, "logits_all": True, "verbose": False}
    settings |= {"n_threads": 1, "n_threads_batch": 1}  # they spin while they wait for one another
    settings |= {
        "yarn_beta_fast": -1.0,
        "yarn_beta_slow": -1.0,
    }  # what the file says; the binding has numbers of its own
    return llama_cpp.Llama(str(path), type_k=0, type_v=0, use_mmap=False, **{**settings, **options})


def llama_logits(llama: Any, ids: list[int]) -> Tensor:
    """[tokens, vocabulary] float32"""
    llama.reset()
    llama.eval(ids)
    return torch.tensor(np.array(llama.scores[: len(ids)]))


@torch.no_grad()
def logits(model: torch.nn.Module, ids: list[int]) -> Tensor:
    """[tokens, vocabulary] float32"""
    return model(torch.tensor([ids])).logits[0].float()


def distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|"""
    return float((found - expected).norm() / expected.norm())


def with_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> PreTrainedModel:
    """A dense model of the same config with these weights."""
    other = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval().requires_grad_(False)
    loading = other.load_state_dict(weights, strict=False)
    assert not loading.unexpected_keys and set(loading.missing_keys) <= {"lm_head.weight"}
    other.tie_weights()
    return other


def llama_ids(llama: Any, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """What llama.cpp makes of a text, with bos and the like as the file says."""
    return llama.tokenize(text.encode(), add_bos=True, special=True)
