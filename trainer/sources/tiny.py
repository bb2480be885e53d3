"""A Llama with random weights and a tokenizer of bytes: a whole run in seconds, for tests and trials.

Its sizes are awkward on purpose: rows of 96 and 160 cross blocks of 64, two query heads share a kv head, and the
head is tied to the embedding.
"""

from pathlib import Path

import numpy as np
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainer.sources.cache import prepare_once
from trainer.sources.hf_folder import byte_level_tokenizer, write_folder

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
MAX_POSITIONS = 2048
SEED = 0
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_model() -> Path:
    """The folder of the tiny model, 0.15 M parameters in bfloat16; built on first use."""
    return prepare_once("tiny-1", _build, needs_bytes=2_000_000)


def _build(folder: Path) -> None:
    tokenizer = _tokenizer()
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    write_folder(folder, config, _random_weights(config), tokenizer)


def _random_weights(config: LlamaConfig) -> dict[str, Tensor]:
    """Normal weights, norms of 1, from a generator of our own: torch's global one does not move."""
    random = np.random.RandomState(SEED)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in LlamaForCausalLM(config).named_parameters()}
    return {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.from_numpy(random.normal(0, config.initializer_range, shape)).float()
        for name, shape in shapes.items()
    }


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte and four control tokens: ids 0..3 control, 4..259 the bytes in the byte alphabet's order."""
    tokens = (*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    end_of_text, _, im_end, pad = CONTROL
    return byte_level_tokenizer(
        {token: index for index, token in enumerate(tokens)},
        [],
        control=list(CONTROL),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        max_len=MAX_POSITIONS,
        chat_template=CHAT_TEMPLATE,
        bos_token=end_of_text,
        unk_token=end_of_text,
        eos_token=im_end,
        pad_token=pad,
    )
