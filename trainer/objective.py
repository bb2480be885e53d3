"""What training minimises: the sum of next-token losses over the target tokens of some documents.

The sum, not the mean: the loop divides by the target tokens of the whole step, over all micro-steps and processes, so
that accumulation and data parallelism equal the large batch. Only target positions reach the output head.

An objective is a module and four answers, which the loop and the evaluation ask for (preference.py has others):
`collate` makes a batch of rows, `count` says what each summed loss of a batch is divided by, `look_ahead` may read all
batches of a step before the first is trained on, and `drain_metrics` tells what else was measured.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel

from trainer.architecture import active_module, base_model
from trainer.data.loader import collate
from trainer.fused_decoder import FusedDecoder, document_positions
from trainer.kernels.cross_entropy import linear_cross_entropy
from trainer.kernels.token_log_probs import token_log_probs
from trainer.neftune import EmbeddingNoise
from trainer.qat.fake_quant import head_operands

log = logging.getLogger(__name__)

IGNORE_INDEX = -100
"""Label of a position that is no target, as torch and transformers have it."""
MAX_DECODER_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Relative distance of the fused decoder's hidden states from transformers': ten times what another order of the same
sums gives over 30 layers."""


def num_targets(labels: Tensor) -> int:
    """How many positions of `labels` [T] are predicted; a document's first label is -100 (see `collate`)."""
    return int((labels != IGNORE_INDEX).sum())


def targets_of_documents(labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B] int64: how many positions of each document are predicted."""
    before = pad((labels != IGNORE_INDEX).cumsum(0), (1, 0))  # [T + 1]
    return before[cu_seqlens.long()].diff()


class NextTokenLoss(nn.Module):
    """Sum of cross-entropies over the targets of documents, in nats.

    Models that `FusedDecoder` computes go through it; others through their own forward, padded on the right: under
    causal attention a real token never sees what stands to its right.
    """

    def __init__(self, model: PreTrainedModel, *, decoded_bytes: int = 0, neftune_alpha: float = 0.0) -> None:
        """model: a causal language model, or PEFT's wrapper around one; decoded_bytes: see `FusedDecoder`

        neftune_alpha  size of the noise on training embeddings; see neftune.py
        """
        super().__init__()
        self.model = model
        with evaluating(model):
            self._decoder = self._fused_decoder(decoded_bytes)
            self.fused_head = self._fused_equals_logits()
        if not self.fused_head:
            log.warning(
                "the output head does more than one product; the loss goes through the full logits (more memory)"
            )

        embedding = self._causal_lm.get_input_embeddings()
        self._noise = EmbeddingNoise(embedding, neftune_alpha) if neftune_alpha else None

    @property
    def fused_decoder(self) -> bool:
        """Whether our own decoder runs, and not transformers' modules."""
        return self._decoder is not None

    def forward(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Documents one after the other, or rows of one length.

        input_ids, labels  [T] int64 with cu_seqlens, -100 where there is no target and at each document's start;
                           or [B, T] without: each row is a document, and its first label does not count
        cu_seqlens         [B + 1] int32: document b has the tokens cu_seqlens[b] to cu_seqlens[b + 1]
        returns            [] float32
        """
        if cu_seqlens is None:
            labels = torch.cat([torch.full_like(labels[:, :1], IGNORE_INDEX), labels[:, 1:]], dim=1)
            cu_seqlens = _equal_documents(*input_ids.shape, device=input_ids.device)
            input_ids, labels = input_ids.flatten(), labels.flatten()
        keep = (labels[1:] != IGNORE_INDEX).nonzero()[:, 0]
        targets = labels[keep + 1]
        if self.fused_head:
            hidden_states = self.hidden_states(input_ids, cu_seqlens, keep)
            return linear_cross_entropy(*head_operands(self.head, hidden_states), targets)
        return cross_entropy(self.logits(input_ids, cu_seqlens, keep).float(), targets, reduction="sum")

    def log_probs(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Log-probability of each document's targets, given all that stands before them; documents as in `forward`.

        returns  [B] float64, in nats, 0 for a document without a target: differences of such sums are what counts
        """
        keep = (labels[1:] != IGNORE_INDEX).nonzero()[:, 0]
        targets = labels[keep + 1]
        if self.fused_head:
            hidden_states = self.hidden_states(input_ids, cu_seqlens, keep)
            tokens = token_log_probs(*head_operands(self.head, hidden_states), targets)
        else:
            logits = self.logits(input_ids, cu_seqlens, keep).float()
            tokens = -cross_entropy(logits, targets, reduction="none")
        lengths = targets_of_documents(labels, cu_seqlens)
        return torch.segment_reduce(tokens.double(), "sum", lengths=lengths, unsafe=True)  # in order, unlike index_add

    def hidden_states(self, input_ids: Tensor, cu_seqlens: Tensor, positions: Tensor) -> Tensor:
        """What the output head is given at some positions of documents.

        input_ids, cu_seqlens  as in forward
        positions              [N] int64, of the T tokens
        returns                [N, hidden_size] of the compute dtype
        """
        self._announce(cu_seqlens)
        return self._hidden_states(input_ids, cu_seqlens)[positions]

    def logits(self, input_ids: Tensor, cu_seqlens: Tensor, positions: Tensor) -> Tensor:
        """The model's own logits [N, vocab_size], for a head that is more than one product; as `hidden_states`."""
        self._announce(cu_seqlens)
        padded, place = _pad(input_ids, cu_seqlens)
        return self.model(input_ids=padded, use_cache=False).logits.flatten(0, 1)[place[positions]]

    # ---- what the loop asks an objective for

    def collate(self, rows: Sequence[dict[str, Any]], device: torch.device | str | None = None) -> dict[str, Tensor]:
        """What `forward` takes; see `loader.collate`."""
        return collate(rows, device)

    def count(self, batch: dict[str, Any]) -> list[int]:
        """What each sum of `forward` is divided by, once all of a step's are added up: here target tokens."""
        return [num_targets(batch["labels"])]

    def look_ahead(self, batches: Sequence[dict[str, Any]], reduce: Callable[[Tensor], Tensor]) -> None:
        """Nothing here depends on the other batches of a step."""

    def drain_metrics(self) -> dict[str, tuple[float, float]]:
        """Figure -> sum and count since the last call; the same names in every process."""
        return {}

    def _announce(self, cu_seqlens: Tensor) -> None:
        if self._noise is not None:
            self._noise.lengths = cu_seqlens.diff()

    @property
    def _causal_lm(self) -> PreTrainedModel:
        return base_model(self.model)

    @property
    def head(self) -> nn.Linear:
        """The output head; its product with `hidden_states` is the logits where `fused_head`."""
        return active_module(self._causal_lm.get_output_embeddings())

    def _hidden_states(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, hidden_size]"""
        if self._decoder is not None:
            return self._decoder(input_ids, cu_seqlens)
        padded, place = _pad(input_ids, cu_seqlens)
        return self._transformers_hidden_states(padded).flatten(0, 1)[place]

    def _transformers_hidden_states(self, input_ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, hidden_size]"""
        decoder = getattr(self._causal_lm, self._causal_lm.base_model_prefix)
        return decoder(input_ids=input_ids, use_cache=False).last_hidden_state

    @torch.no_grad()
    def _fused_decoder(self, decoded_bytes: int) -> FusedDecoder | None:
        """Ours, if it is made for this model and agrees with transformers' on a few tokens."""
        try:
            decoder = FusedDecoder(self._causal_lm, decoded_bytes=decoded_bytes)
        except ValueError as error:
            log.info("layers   transformers' own: %s", error)
            return None
        input_ids = _probe(self._causal_lm)
        ours = decoder(input_ids.flatten(), _equal_documents(*input_ids.shape, device=input_ids.device))
        theirs = self._transformers_hidden_states(input_ids).flatten(0, 1)
        error = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
        if not error < MAX_DECODER_ERROR[theirs.dtype]:
            log.warning("layers   transformers' own (slower): the fused ones differ by %.2f", error)
            return None
        return decoder

    @torch.no_grad()
    def _fused_equals_logits(self) -> bool:
        """Try both paths on a few tokens: soft caps, logit scales and head biases show up here.

        A head that multiplies integers rounds elsewhere than its operands' product does, in the last bits.
        """
        # PEFT's wrapper of a head with trained rows is the product with its `weight`, which has their gradient.
        head = getattr(self.head, "original_module", self.head)
        if not (type(head) is nn.Linear or hasattr(type(head), "quantized")) or head.bias is not None:
            return False
        if getattr(getattr(head, "scheme", None), "integer", False):
            return False
        input_ids = _probe(self._causal_lm)
        x, weight = head_operands(self.head, self._transformers_hidden_states(input_ids))
        direct = x @ weight.T
        return torch.allclose(direct, self.model(input_ids=input_ids, use_cache=False).logits.to(direct.dtype))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout: two forwards can be compared only so, since an adapter that starts apart from zero drops."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    yield
    for module in training:
        module.training = True


def _probe(model: PreTrainedModel) -> Tensor:
    """[2, 8] token ids"""
    embedding = model.get_input_embeddings().weight
    return torch.arange(16, device=embedding.device).remainder(len(embedding)).view(2, 8)


def _equal_documents(num_documents: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(0, (num_documents + 1) * length, length, dtype=torch.int32, device=device)


def _pad(input_ids: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Documents as rows [B, longest], filled up with token 0, and each token's place in the flattened rows [T]."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max())
    row = torch.arange(len(lengths), device=input_ids.device).repeat_interleave(lengths)
    place = row * longest + document_positions(cu_seqlens, len(input_ids))
    padded = input_ids.new_zeros(len(lengths) * longest)
    padded[place] = input_ids
    return padded.view(len(lengths), longest), place
