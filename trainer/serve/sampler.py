"""From logits to tokens: masks, penalties, cuts, one counter-based random number a token, log-probabilities.

The engine's last step of each forward pass. A row's token depends on its logits, its parameters and (seed, choice,
position) alone: the random number is a hash of those three, not the state of a generator, and every row is
computed by itself. So a request gets the same tokens alone, in any company, after preemption, and when a draft of
several tokens is checked at once. The token is the inverse of the distribution function in float64 over the kept
tokens in vocabulary order, so that a token of probability 1e-7 is drawn once in 1e7 (float32 noise never draws it).

On a CPU the rows go through numpy one by one, which beats torch there: no threads are woken for 0.1 ms of work.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from trainer.serve.outputs import TokenLogprob
from trainer.serve.sampling_params import SamplingParams

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry (OpenAI's value)."""
FLOAT32_MAX = float(np.finfo(np.float32).max)
CDF_BLOCK = 64
"""Weights summed at once before the block with the drawn token is looked at; 32 to 256 measure alike."""
LOGPROB_ROWS = 32
"""Rows whose full log-softmax stands in memory at a time: 19 MB at 151,936 tokens."""


@dataclass(slots=True)
class SampleRow:
    """Whose token a row of logits is to become."""

    params: SamplingParams
    seed: int
    """The request's seed, 64 bits, signed or not."""
    index: int
    """Choice 0..best_of-1: copies of a request share the seed and differ here."""
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """The answer so far, drafts before this position included: its length is the position."""
    eos_token_ids: tuple[int, ...]
    bitmask: Tensor | None = None
    """[ceil(V / 32)] int32 on the CPU: bit i % 32 of word i // 32 allows token i (grammar.py)."""


def sample(logits: Tensor, rows: list[SampleRow]) -> list[TokenLogprob]:
    """Choose a token for each row.

    In order: bitmask, logit_bias, EOS and stop tokens masked before min_tokens, repetition penalty, frequency and
    presence penalty; then the likeliest token (the lowest id of equals), or temperature, min_p, top_k, top_p and a
    draw. Cuts among equally likely tokens keep the lower ids. Where min_tokens would leave no token at all (a
    grammar that allows only the end) it yields. Log-probabilities are those of the logits as they came.

    logits   [R, V] float32, left as they are
    returns  R tokens; logprob 0.0 and rank 0 where neither logprobs nor best_of > n asks for them
    raises   RuntimeError naming the row if its logits have NaN or no finite maximum, or all its tokens are masked
    """
    assert logits.dim() == 2 and logits.dtype == torch.float32 and len(rows) == len(logits), (logits.shape, len(rows))
    if not rows:
        return []
    token_ids = _argmax(logits, "the model's logits")
    on_device = []
    for position, row in enumerate(rows):
        if _adjusts(row) or not row.params.greedy and logits.device.type == "cpu":
            token_ids[position] = _choose(logits[position].cpu().numpy(), row, position)
        elif not row.params.greedy:
            on_device.append(position)
    if on_device:
        drawn = _draw_sorted(logits[on_device], [rows[position] for position in on_device])
        for position, token_id in zip(on_device, drawn, strict=True):
            token_ids[position] = token_id
    return _with_logprobs(logits, rows, token_ids)


def needs_argmax_only(row: SampleRow) -> bool:
    """Whether a row's token is the likeliest one of the logits as they come, and nothing else is asked about them."""
    return row.params.greedy and not _adjusts(row) and not _asks_logprobs(row)


def likeliest(token_ids: Tensor) -> list[TokenLogprob]:
    """What `sample` returns for rows that need the argmax only.

    token_ids  [R] int64, -1 where a row has no finite maximum
    raises     RuntimeError naming such a row
    """
    ids = token_ids.tolist()
    _check_finite([token_id >= 0 for token_id in ids], "the model's logits")
    return [TokenLogprob(token_id, 0.0, 0) for token_id in ids]


def prompt_logprobs(logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprob]:
    """Log-probabilities of given tokens; row i of the logits is what predicted token_ids[i].

    logits   [R, V] float32
    raises   RuntimeError naming the row if its logits have NaN or no finite maximum
    """
    if not token_ids:
        return []
    _argmax(logits, "the model's logits of the prompt")
    return _logprobs(logits, token_ids, [num_top] * len(token_ids))


def _argmax(logits: Tensor, what: str) -> list[int]:
    """The likeliest tokens, the lowest id of equals. [R, V] -> R ids; NaN counts as largest and is refused."""
    if logits.device.type == "cpu":
        values = logits.numpy()
        best = values.argmax(-1)  # 7 times as fast as torch's
        finite = np.isfinite(values[np.arange(len(values)), best])
        ids, finite = best.tolist(), finite.tolist()
    else:
        peaks, best = logits.max(-1)
        ids, finite = best.tolist(), peaks.isfinite().tolist()
    _check_finite(finite, what)
    return ids


def _check_finite(finite: list[bool], what: str) -> None:
    if not all(finite):
        row = finite.index(False)
        raise RuntimeError(f"{what}: row {row} of {len(finite)} has NaN or no finite maximum; no token can be chosen")


# ---- masks and penalties


def _adjusts(row: SampleRow) -> bool:
    params = row.params
    return bool(
        row.bitmask is not None
        or params.logit_bias
        or len(row.output_token_ids) < params.min_tokens
        or params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
    )


def _choose(logits: np.ndarray, row: SampleRow, position: int) -> int:
    """One row's token. [V] float32, left as it is"""
    if _adjusts(row):
        logits = logits.copy()
        _adjust(logits, row)
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            raise RuntimeError(f"row {position}: masks and penalties leave no token")
        if row.params.greedy:
            return best
    return _draw(logits, row)


def _adjust(logits: np.ndarray, row: SampleRow) -> None:
    """Apply the row's masks and penalties in place. [V] float32"""
    params = row.params
    if row.bitmask is not None:
        allowed = np.unpackbits(row.bitmask.numpy().view(np.uint8), bitorder="little")
        assert len(allowed) >= len(logits), f"a mask of {len(allowed)} bits for {len(logits)} tokens"
        np.putmask(logits, allowed[: len(logits)] == 0, -np.inf)
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if len(row.output_token_ids) < params.min_tokens:
        ends = [i for i in {*row.eos_token_ids, *params.stop_token_ids} if 0 <= i < len(logits)]
        before = logits[ends]
        logits[ends] = -np.inf
        if logits.max() == -np.inf:
            logits[ends] = before
    if params.repetition_penalty != 1:
        seen = np.fromiter({*row.prompt_token_ids, *row.output_token_ids}, np.int64)
        logits[seen] = _penalize_repetition(logits[seen], params.repetition_penalty)
    if row.output_token_ids and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(row.output_token_ids, return_counts=True)
        logits[ids] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)


def _penalize_repetition(logits: np.ndarray, penalty: float) -> np.ndarray:
    """Divide positive and multiply negative logits, clamped to float32: penalties of 1e-300 are allowed."""
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        wide = np.where(wide > 0, wide / penalty, wide * penalty).clip(-FLOAT32_MAX, FLOAT32_MAX)
    return np.where(logits == -np.inf, logits, wide.astype(np.float32))


# ---- the draw


def _uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) of 53 random bits that only its three counters decide."""
    message = struct.pack("<QQQ", seed & (2**64 - 1), index, position)
    return (int.from_bytes(blake2b(message, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def _draw(logits: np.ndarray, row: SampleRow) -> int:
    """Draw a row's token. [V] float32"""
    distance = _distance(logits, row.params.temperature)
    weights = np.exp(-distance)
    _cut(weights, distance, row.params)
    return _invert(weights, _uniform(row.seed, row.index, len(row.output_token_ids)))


def _distance(logits: np.ndarray, temperature: float) -> np.ndarray:
    """How far each token lies below the likeliest one: 0 or more, finite for it, so that exp(-distance) is safe."""
    with np.errstate(over="ignore"):  # a tiny temperature sends far tokens to infinity, that is to weight 0
        return (logits.max() - logits) / np.float32(temperature)


def _invert(weights: np.ndarray, uniform: float) -> int:
    """The first token whose cumulative weight exceeds uniform times the total: its own weight is above 0.

    Sums of blocks first, then one block in full: a cumulative sum of the whole vocabulary takes 3 times as long.
    """
    blocks = np.zeros((-(-len(weights) // CDF_BLOCK), CDF_BLOCK))
    blocks.reshape(-1)[: len(weights)] = weights
    cumulative = blocks.sum(-1).cumsum()
    target = min(uniform * cumulative[-1], np.nextafter(cumulative[-1], 0))
    block = int(cumulative.searchsorted(target, side="right"))
    inner = blocks[block].cumsum()
    # The two sums of a block may differ in the last bit; never step past its last token of any weight.
    inside = min(target - (cumulative[block - 1] if block else 0.0), np.nextafter(inner[-1], 0))
    return block * CDF_BLOCK + int(inner.searchsorted(inside, side="right"))


def _cut(weights: np.ndarray, distance: np.ndarray, params: SamplingParams) -> None:
    """Zero the weights that min_p, then top_k, then top_p (of what is left) drop. [V] float32 each"""
    if params.min_p > 0:
        weights *= distance <= -math.log(params.min_p)
    if 0 < params.top_k < len(weights):
        _keep_likeliest(weights, distance, params.top_k, None)
    if params.top_p < 1:
        _keep_likeliest(weights, distance, params.top_p, weights)


def _keep_likeliest(weights: np.ndarray, distance: np.ndarray, reach: float, measure: np.ndarray | None) -> None:
    """Keep the smallest set of likeliest tokens that reaches a number or a share, without sorting the vocabulary.

    Distances are not negative, so their bits order like them, and the upper 16 make buckets of nearly equal ones.
    The bucket in which the set is complete is found by a histogram; only its tokens are sorted.

    measure  what is summed until it reaches the share `reach` of its total; None: tokens, until there are `reach`
    """
    bucket = distance.view(np.int32) >> 16
    cumulative = np.bincount(bucket, weights=measure).cumsum()
    target = reach if measure is None else reach * cumulative[-1]
    crossing = int(cumulative.searchsorted(target))
    inside = np.flatnonzero(bucket == crossing)
    inside = inside[distance[inside].argsort(kind="stable")]  # stable: lower ids first among equals
    reached = np.ones(len(inside)) if measure is None else measure[inside]
    reached = reached.cumsum(dtype=np.float64) + (cumulative[crossing - 1] if crossing else 0)
    last = min(int(reached.searchsorted(target)), len(inside) - 1)
    weights *= distance <= distance[inside[last]]  # 5 times as fast as assigning through a mask
    weights[inside[last + 1 :]] = 0


def _draw_sorted(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    """What `_draw` does, for all rows at once by sorting the vocabulary: for GPUs. [R, V] float32"""
    device = logits.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    temperature = column([row.params.temperature for row in rows])
    distance = (logits.amax(-1, keepdim=True) - logits) / temperature.float()
    weights = torch.exp(-distance)
    if any(row.params.min_p > 0 or row.params.top_k > 0 or row.params.top_p < 1 for row in rows):
        weights = _keep_sorted(weights, distance, rows, column)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    uniform = column([_uniform(row.seed, row.index, len(row.output_token_ids)) for row in rows])
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0].tolist()


def _keep_sorted(
    weights: Tensor, distance: Tensor, rows: list[SampleRow], column: Callable[[list[float]], Tensor]
) -> Tensor:
    """What `_cut` does, for all rows. [R, V] float32 -> [R, V] with the dropped weights at 0"""
    farthest = column([-math.log(row.params.min_p) if row.params.min_p > 0 else math.inf for row in rows])
    top_k = column([row.params.top_k if row.params.top_k > 0 else math.inf for row in rows])
    top_p = column([row.params.top_p if row.params.top_p < 1 else math.inf for row in rows])
    distance, order = distance.sort(dim=-1, stable=True)  # stable: lower ids first among equals
    weights = weights.gather(-1, order)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    weights = weights.masked_fill((distance > farthest) | (rank >= top_k), 0)
    reached = weights.cumsum(-1, dtype=torch.float64)
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0))
    weights = weights.masked_fill(before >= top_p * reached[:, -1:], 0)
    return torch.zeros_like(weights).scatter_(-1, order, weights)


# ---- log-probabilities


def _asks_logprobs(row: SampleRow) -> bool:
    return row.params.logprobs is not None or row.params.best_of > row.params.n


def _with_logprobs(logits: Tensor, rows: list[SampleRow], token_ids: list[int]) -> list[TokenLogprob]:
    """The tokens, with log-probabilities where the row asks for them."""
    tokens = [TokenLogprob(token_id, 0.0, 0) for token_id in token_ids]
    asking = [i for i, row in enumerate(rows) if _asks_logprobs(row)]
    if asking:
        asked = logits if len(asking) == len(rows) else logits[asking]
        num_tops = [rows[i].params.logprobs or 0 for i in asking]
        for i, entry in zip(asking, _logprobs(asked, [token_ids[i] for i in asking], num_tops), strict=True):
            tokens[i] = entry
    return tokens


def _logprobs(logits: Tensor, token_ids: list[int], num_tops: list[int]) -> list[TokenLogprob]:
    """An entry for each row's token and its num_tops likeliest ones. [R, V] float32"""
    if logits.device.type == "cpu":
        return [_logprob(*row) for row in zip(logits.numpy(), token_ids, num_tops, strict=True)]
    entries = []
    for start in range(0, len(logits), LOGPROB_ROWS):
        part = slice(start, start + LOGPROB_ROWS)
        entries += _logprobs_sorted(logits[part], token_ids[part], num_tops[part])
    return entries


def _logprob(logits: np.ndarray, token_id: int, num_top: int) -> TokenLogprob:
    """The entry of one row. [V] float32"""
    peak = logits.max()
    log_total = float(peak) + math.log(np.exp(logits - peak).sum())
    rest, likeliest = logits.copy() if num_top else logits, []
    for _ in range(min(num_top, len(logits))):  # at most 20 rounds; numpy's partition of the vocabulary takes longer
        best = int(rest.argmax())
        if rest[best] == -np.inf:
            break
        likeliest.append(best)
        rest[best] = -np.inf
    values = [float(np.float32(float(logits[i]) - log_total)) for i in (*likeliest, token_id)]
    return _entry(token_id, values[-1], int(np.count_nonzero(logits > logits[token_id])) + 1, likeliest, values)


def _logprobs_sorted(logits: Tensor, token_ids: list[int], num_tops: list[int]) -> list[TokenLogprob]:
    """What `_logprob` does, for all rows at once: for GPUs. [R, V] float32"""
    logprobs = logits.log_softmax(-1)
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logprobs.gather(-1, ids)[:, 0].tolist()
    ranks = ((logits > logits.gather(-1, ids)).sum(-1) + 1).tolist()
    if largest := max(num_tops):
        likeliest = logits.sort(dim=-1, descending=True, stable=True).indices[:, :largest]  # topk: equals by chance
        values = logprobs.gather(-1, likeliest).tolist()
        likeliest = likeliest.tolist()
    else:
        likeliest = values = [[] for _ in num_tops]
    return [
        _entry(token_id, own[i], ranks[i], likeliest[i][: num_tops[i]], values[i])
        for i, token_id in enumerate(token_ids)
    ]


def _entry(token_id: int, logprob: float, rank: int, likeliest: list[int], values: list[float]) -> TokenLogprob:
    """Without the likeliest tokens of probability 0, which a vocabulary with padding may have."""
    logprob = max(logprob, LOWEST_LOGPROB)
    top = [(i, max(value, LOWEST_LOGPROB)) for i, value in zip(likeliest, values, strict=False) if value > -math.inf]
    if all(i != token_id for i, _ in top):
        top.append((token_id, logprob))
    return TokenLogprob(token_id, logprob, rank, top)
