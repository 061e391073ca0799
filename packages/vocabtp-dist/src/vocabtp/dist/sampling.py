"""Picking tokens over shards of the vocabulary, without gathering it.

Greedy: the maximum of `(ordered logit, inverted id)` packed into one int64, one MAX all_reduce.
Stochastic: Gumbel-max, `argmax(z / T + G(key, id))` over the tokens that the filters keep, is an
exact draw from their softmax; G is a function of (key, global id), so equal logits give equal
tokens however the vocabulary is cut. Letters: `N` rows, `L` this shard's columns, `K` candidates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vocabtp.dist import _order
from vocabtp.dist._filters import Filters, check_keys, check_options
from vocabtp.dist._inputs import whole_or_shard
from vocabtp.dist._noise import gumbel, mix
from vocabtp.dist._nucleus import nucleus, share_of, temperature_like, weights
from vocabtp.dist.collectives import all_gather, all_max, all_sum
from vocabtp.dist.shard import VocabShard

# elements of [rows, L] handled at a time: about eight fp64 temporaries of 16 MiB
_CHUNK = 1 << 21


def vocab_parallel_argmax(vocab_parallel_logits: Tensor, shard: VocabShard | None = None) -> Tensor:
    """The id of each row's largest logit over all shards; equal logits give the lowest id.

    One MAX all_reduce of an int64 a row. Logits are compared as fp32 (exact for bf16, fp16, fp32);
    -0.0 equals 0.0; NaN counts as -inf, so a NaN is never picked while any other logit is above
    -inf. A row of nothing but -inf and NaN gives id 0. Not differentiable.

    Args:
        vocab_parallel_logits: `[..., L]` floating-point, this rank's columns, or a DTensor sharded
            on the last dimension.
        shard: which columns they are; None is the whole vocabulary (a DTensor brings its own).

    Returns:
        `[...]` int64 ids in `[0, V)`, the same on every rank.

    Raises:
        ValueError: the tensor's width is not the shard's, or the vocabulary is empty.
        TypeError: the logits are not a floating-point tensor.
    """
    logits, shard = whole_or_shard("vocab_parallel_argmax", vocab_parallel_logits, shard)
    best = all_max(_local_best(logits, shard), shard.tp_group)
    return _order.unpack(best)[1]


def _local_best(logits: Tensor, shard: VocabShard) -> Tensor:
    """The packed best token of each row of this shard; `[..., L]` -> `[...]` int64."""
    if shard.width == 0:
        return logits.new_full(logits.shape[:-1], _order.NO_TOKEN, dtype=torch.int64)
    x = _order.clean(logits)
    # argmax and not max: it alone promises the first of equal maxima
    at = x.argmax(-1, keepdim=True)
    return _order.pack(x.gather(-1, at).squeeze(-1), at.squeeze(-1) + shard.start)


def sampling_keys(*parts: int | Tensor) -> Tensor:
    """Mix numbers such as (seed, step, sample, position) into keys for `vocab_parallel_sample`.

    Args:
        parts: ints or int64 tensors; shapes broadcast. Their order matters.

    Returns:
        int64 of the broadcast shape (0-dimensional for ints alone).
    """
    device = next((part.device for part in parts if isinstance(part, Tensor)), None)
    key = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        if isinstance(part, Tensor):
            number = part.long()
        else:  # any Python int, as its low 64 bits
            number = torch.tensor((part + 2**63) % 2**64 - 2**63, device=device)
        key = mix(key + mix(number + 1))
    return key


def vocab_parallel_sample(
    vocab_parallel_logits: Tensor,
    shard: VocabShard | None = None,
    *,
    keys: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Draw one id a row from the softmax over all shards; exact, and the same at every layout.

    Filters act in the order temperature, top_k, top_p, min_p, each on the distribution that the
    one before left: the `top_k` largest; of these the smallest top set with at least `top_p` of
    the probability; of these the tokens at least `min_p` times as probable as the most probable.
    Tokens of equal logits rank by ascending id, and exactly `top_k` are kept.

    Equal logits, keys and options give bitwise equal ids at every cut of the vocabulary: noise is
    a hash of (key, global id), and probabilities are summed as integers (units of 2**-40 of the
    largest). A token of -inf is never drawn; NaN counts as -inf; +inf beats every finite logit. A
    row of nothing but -inf and NaN gives id 0. Logits are read as fp32. Not differentiable.

    Collectives: one all_gather, of `[N, top_k]` with `top_k` and of a few numbers a row without.
    Without `top_k`, `top_p` and `min_p` need one all_reduce for the maximum, and `top_p` five (of
    1024 integers a row) to nine (of 16; small vocabularies) more. The vocabulary is never gathered.

    Args:
        vocab_parallel_logits: `[..., L]` floating-point, this rank's columns, or a DTensor sharded
            on the last dimension.
        shard: which columns they are; None is the whole vocabulary (a DTensor brings its own).
        keys: int64 `[...]`, one a row, equal on all ranks of the group and distinct between draws
            that must be independent (see `sampling_keys`).
        temperature: divides the logits; > 0. For greedy use `vocab_parallel_argmax`.
        top_k: how many tokens stay, >= 1; None is off.
        top_p: share of the probability that stays, in (0, 1]; None or 1 is off.
        min_p: least probability relative to the largest, in [0, 1]; None or 0 is off.

    Returns:
        `[...]` int64 ids in `[0, V)`, the same on every rank.

    Raises:
        ValueError: an option is out of its range, `keys` has another shape, the tensor's width is
            not the shard's, or the vocabulary is empty; on all ranks, where keys on the CPU differ
            between ranks.
        TypeError: the logits are not floating-point, or `keys` is not int64.
    """
    logits, shard = whole_or_shard("vocab_parallel_sample", vocab_parallel_logits, shard)
    filters = check_options(temperature, top_k, top_p, min_p, shard.global_size)
    check_keys(keys, logits)
    rows = logits.reshape(-1, shard.width) if shard.width else logits.new_empty(keys.numel(), 0)
    flat_keys = keys.detach().reshape(-1)
    sample = _sample_all if filters.top_k is None else _sample_candidates
    return sample(rows, flat_keys, shard, filters).view(keys.shape)


def _same_keys(gathered: Tensor) -> None:
    """Keys differ between ranks: an error on all of them, where telling costs no device sync."""
    if gathered.device.type != "cpu":
        return
    unlike = (gathered != gathered[:1]).flatten(1).any(1).nonzero().flatten().tolist()
    if unlike:
        raise ValueError(
            "vocab_parallel_sample: keys must be equal on all ranks of the group, "
            f"those of rank 0 differ from those of {unlike}"
        )


def _min_p_cut(top: Tensor, filters: Filters) -> Tensor:
    """The lowest logit that min_p keeps, in fp64; `[N, 1]` -> `[N, 1]`."""
    assert filters.min_p is not None
    return top.double() + math.log(filters.min_p) * filters.temperature


def _finite(x: Tensor) -> Tensor:
    """fp32 logits without NaN and +inf: the latter as the largest number."""
    return _order.clean(x).float().clamp_max(torch.finfo(torch.float32).max)


def _scores(values: Tensor, keys: Tensor, ids: Tensor, kept: Tensor, temperature: float) -> Tensor:
    """Perturbed logits in fp64, -inf where not kept; `[N, *]`."""
    noisy = values.double() / temperature_like(values, temperature) + gumbel(keys[:, None], ids)
    return noisy.masked_fill(~kept, -math.inf)


def _sample_all(rows: Tensor, keys: Tensor, shard: VocabShard, filters: Filters) -> Tensor:
    """Without top_k: every token is scored on its own rank; `[N, L]`, `[N]` -> `[N]`."""
    ids = torch.arange(shard.start, shard.end, device=rows.device)
    top: Tensor | None = None
    if filters.top_p is not None or filters.min_p is not None:
        best = all_max(_local_best(rows, shard), shard.tp_group)
        top = _finite(_order.unpack(best)[0])[:, None]
    step = max(1, _CHUNK // max(16, shard.global_size))
    parts = [
        _local_pick(
            rows[i : i + step],
            keys[i : i + step],
            ids,
            shard,
            filters,
            None if top is None else top[i : i + step],
        )
        for i in range(0, rows.shape[0], step)
    ]
    if not parts:
        return keys.clone()
    score, token = (torch.cat(part) for part in zip(*parts, strict=True))
    return _global_pick(score, token, keys, shard)


def _local_pick(
    rows: Tensor,
    keys: Tensor,
    ids: Tensor,
    shard: VocabShard,
    filters: Filters,
    top: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The best score of this shard and its id, `[N]` each; -inf and V for an empty shard."""
    values = _finite(rows)
    kept = values > -math.inf
    if top is not None and filters.top_p is not None:
        weight = weights(values, top, filters.temperature)
        weight = torch.where(kept, weight, 0)
        kept = nucleus(
            values,
            ids,
            weight,
            filters.top_p,
            shard.global_size,
            lambda x: all_sum(x, shard.tp_group),
        )
    if top is not None and filters.min_p is not None:
        kept = kept & (values.double() >= _min_p_cut(top, filters))
    if shard.width == 0:
        score = values.new_full(keys.shape, -math.inf, dtype=torch.float64)
        return score, torch.full_like(keys, shard.global_size)
    scores = _scores(values, keys, ids, kept, filters.temperature)
    at = scores.argmax(-1, keepdim=True)
    return scores.gather(-1, at).squeeze(-1), at.squeeze(-1) + shard.start


def _global_pick(score: Tensor, ids: Tensor, keys: Tensor, shard: VocabShard) -> Tensor:
    """The id of the best score over ranks, the lowest of equal ones; one all_gather."""
    packed = torch.stack([score.view(torch.int64), ids, keys])
    gathered = all_gather(packed, shard.tp_group)  # [R, 3, N]
    _same_keys(gathered[:, 2])
    scores = gathered[:, 0].contiguous().view(torch.float64)
    best = scores.amax(0, keepdim=True)
    return torch.where(scores == best, gathered[:, 1], shard.global_size).amin(0)


def _sample_candidates(rows: Tensor, keys: Tensor, shard: VocabShard, filters: Filters) -> Tensor:
    """With top_k: gather each shard's K best, then go on with the same `[N, K]` everywhere."""
    assert filters.top_k is not None
    packed = _local_candidates(rows, shard, filters.top_k)
    gathered = all_gather(torch.cat([keys[:, None], packed], 1), shard.tp_group)  # [R, N, 1 + K]
    _same_keys(gathered[:, :, 0])
    # sorted by (value, id): the same tensor on every rank and at every layout
    pool = gathered[:, :, 1:].permute(1, 0, 2).flatten(1)
    values, ids = _order.unpack(pool.topk(filters.top_k, sorted=True).values)
    values = _finite(values)
    kept = values > -math.inf
    top = values[:, :1]
    if filters.top_p is not None:
        weight = torch.where(kept, weights(values, top, filters.temperature), 0)
        reached = weight.cumsum(1)
        kept = kept & (reached - weight < share_of(reached[:, -1:], filters.top_p))
    if filters.min_p is not None:
        kept = kept & (values.double() >= _min_p_cut(top, filters))
    # rank 0's keys: were they unequal on a GPU, the ranks would still draw the same token
    scores = _scores(values, gathered[0, :, 0], ids, kept, filters.temperature)
    best = scores.amax(1, keepdim=True)
    return torch.where(scores == best, ids, shard.global_size).amin(1)


def _local_candidates(rows: Tensor, shard: VocabShard, count: int) -> Tensor:
    """The packed best `count` tokens of this shard, padded with NO_TOKEN; `[N, count]`."""
    out = torch.full((rows.shape[0], count), _order.NO_TOKEN, device=rows.device)
    width = min(count, shard.width)
    ids = torch.arange(shard.start, shard.end, device=rows.device)
    step = max(1, _CHUNK // max(1, shard.width))
    for i in range(0, rows.shape[0] if width else 0, step):
        packed = _order.pack(_order.clean(rows[i : i + step]), ids)
        out[i : i + step, :width] = packed.topk(width, sorted=False).values
    return out
