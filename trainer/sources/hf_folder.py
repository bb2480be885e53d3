"""Write a plain Hugging Face folder: config, weights in bfloat16, and a byte-level BPE tokenizer.

The sources that build a model themselves (bundled, tiny) meet here, so that what they write loads with
`from_pretrained` in this and in any other program, with nothing about how it came to be left in it.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast


def write_folder(
    folder: Path, config: PreTrainedConfig, state_dict: dict[str, Tensor], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Write what `from_pretrained` needs for a decoder-only model.

    state_dict  by the names of the model class; each tensor is stored once and in bfloat16
    """
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in state_dict.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.dtype = torch.bfloat16  # of the file; a loader may ask for another
    config.save_pretrained(folder)
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def split_digits() -> pre_tokenizers.PreTokenizer:
    """The split of SmolLM and StarCoder: each digit by itself, the rest as in GPT-2."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def byte_level_tokenizer(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    control: list[str],
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    max_len: int,
    chat_template: str,
    **special_tokens: str,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text comes back from its tokens unchanged, and nothing is added to it.

    vocab           token in the byte alphabet -> id, the control tokens included
    control         tokens that are matched whole and are never made from text
    max_len         the longest sequence the model has positions for, in tokens
    special_tokens  `bos_token=`, `eos_token=`, `pad_token=`, `unk_token=`
    """
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
        **special_tokens,
    )
    tokenizer.chat_template = chat_template
    return tokenizer
