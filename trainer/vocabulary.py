"""Tokens that a run adds to a model's vocabulary, and how two tokenizers are told apart.

An adapter belongs to a base and to a mapping from text to ids. Both must be there again when it is loaded: the added
tokens under the same ids, the embedding with as many rows. The surprising thing: a rebuilt base must have the same
bits on every machine, so new rows are the plain mean of the old ones (summed in float64), without the noise that
`resize_token_embeddings` adds to it.
"""

import hashlib
import logging

import torch
from torch import Tensor
from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.errors import UserError, require

log = logging.getLogger(__name__)

PROBE = (
    "The quick brown fox's 3,141.59 jumps\n\tover  12 lazy dogs — déjà vu? 東京 🙂 <b>x_1 = f(y) ** 2</b>\r\n"
    'def add(a: int) -> int:\n    return a + 1  # 1234567890\n\n\n"I\'ll" MiXeD CamelCase 100% éa'
)
"""Text on which two tokenizers of one vocabulary differ if they normalise or split differently."""


def extend_tokenizer(tokenizer: PreTrainedTokenizerBase, tokens: list[str]) -> list[int]:
    """Give each of `tokens` an id of its own, in order, that text is cut at before anything else.

    returns  the ids
    raises   UserError if a token is in the vocabulary already
    """
    known = tokenizer.get_vocab()
    present = [token for token in tokens if token in known]
    require(not present, f"model.add_tokens has {present}, which the vocabulary holds already; leave them out")
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    return tokenizer.convert_tokens_to_ids(tokens)


@torch.no_grad()
def add_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: list[str]) -> list[int]:
    """Give each of `tokens` an id of its own, in order; the embedding and the head grow where they have no row for it.

    New rows are the mean of the old ones: other starts can make a new token likelier than all others (Hewitt,
    Initializing New Word Embeddings for Pretrained Language Models, 2021). Rows in stock, of a padded vocabulary, stay.

    returns  the ids
    raises   UserError if a token is in the vocabulary already
    """
    ids = extend_tokenizer(tokenizer, tokens)
    num_rows, needed = model.get_input_embeddings().weight.shape[0], max(ids) + 1
    if needed > num_rows:
        with torch.random.fork_rng(devices=[]):  # it draws rows that are overwritten below
            model.resize_token_embeddings(needed, mean_resizing=False)
        _fill_with_mean(model.get_input_embeddings().weight, num_rows)
        head = model.get_output_embeddings()
        if head is not None and head.weight is not model.get_input_embeddings().weight:
            _fill_with_mean(head.weight, num_rows)
        if getattr(head, "bias", None) is not None:
            _fill_with_mean(head.bias, num_rows)
    log.info("tokens   %d added as %d..%d, %d rows", len(ids), min(ids), max(ids), max(needed, num_rows))
    return ids


def _fill_with_mean(rows: Tensor, num_old: int) -> None:
    """Rows from num_old on become the mean of those before; a few thousand rows at a time are float64."""
    sums = torch.stack([part.double().sum(0) for part in rows[:num_old].split(4096)])
    rows[num_old:] = (sums.sum(0) / num_old).to(rows.dtype)


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the output head is the embedding."""
    return bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what maps text to ids: every token with its id, and the ids of a probe text.

    Not of the files: these differ between versions of the library that write the same tokenizer.
    """
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{index}\0{token}\0".encode("utf-8", "surrogatepass"))
    digest.update(str(tokenizer(PROBE, add_special_tokens=False)["input_ids"]).encode())
    return digest.hexdigest()


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, trained: dict[str, object], source: str) -> None:
    """Refuse a tokenizer that gives text other ids than the one a model was trained with.

    trained  "tokenizer_sha256", "num_tokens" and "added_tokens" (token -> id) as they were then
    source   who needs it, for the message
    raises   UserError saying what differs
    """
    if trained.get("tokenizer_sha256") in (None, tokenizer_sha256(tokenizer)):
        return
    known = tokenizer.get_vocab()
    moved = {token: index for token, index in trained.get("added_tokens", {}).items() if known.get(token) != index}
    if moved:
        difference = f"it lacks the added tokens {moved} or has them under other ids"
    elif len(known) != trained.get("num_tokens"):
        difference = f"it has {len(known)} tokens instead of {trained.get('num_tokens')}"
    else:
        difference = "it has as many tokens, but other ones or other ids, or it splits text differently"
    raise UserError(f"{source} was trained with another tokenizer: {difference}; use the tokenizer that lies beside it")
