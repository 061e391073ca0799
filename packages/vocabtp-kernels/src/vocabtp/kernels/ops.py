"""The public ops: values and exact gradients of losses over a large vocabulary.

`p` is the student's distribution, `q` the teacher's, each softmax(logits / temperature) over the
last dimension. Every op computes in fp32 from bf16, fp16 or fp32 logits (fp64 logits in fp64) and
returns fp32 (fp64), one value a row; gradients have the dtype of their logits. Inputs are never
written, and a value may be masked in place before the backward.

The edges are the same everywhere. A logit of -inf is a token outside the support. A row with
every logit -inf is undefined: its value is NaN, its gradient 0. A NaN or +inf logit makes the row's
value and gradient NaN. An upstream gradient of exactly 0 gives a gradient of exactly 0, whatever
the row holds.

`exchange` is for callers that hold a shard, `[..., L]` of `[..., V]`: two methods that put the
statistics of all shards together. Every rank then gets the same value and the gradient of its own
columns.
"""

from __future__ import annotations

from torch import Tensor

from vocabtp.kernels import _calls, checks
from vocabtp.kernels._exchange import LOCAL, Exchange

# an interior beta below fp32's range would leave nothing to rescale; nothing that is
# representable tells this one from a smaller one
_LEAST_BETA = 2.0**-100


def logprobs(
    logits: Tensor,
    index: Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    exchange: Exchange = LOCAL,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    validate_ids: bool | None = None,
    caller: str = "logprobs",
) -> Tensor:
    """Log-probabilities of chosen tokens, `log softmax(logits / temperature)[index]`.

    The gradient is the sum over a row's ids of `(onehot - p) / temperature`; an id may come twice.

    Args:
        logits: `[..., L]`, bf16, fp16, fp32 or fp64; this shard's columns.
        index: ids of the whole vocabulary, `[...]` or `[..., K]`, where the logits are; int64,
            int32, int16, int8 or uint8. The backward reads them again: they must not change in
            place before. Of ids made in inference mode it reads a copy; inside torch.compile
            autograd refuses those.
        ignore_index: an id that asks nothing: its value is 0 and it has no gradient.
        temperature: 1e-37 to 1e37.
        exchange: how shards come together; `LOCAL` for a whole vocabulary.
        vocab_start: the id of this shard's first column.
        vocab_size: V, None for L.
        validate_ids: True reports a bad id before returning, waiting for the device; False leaves
            it to the next op, which waits until the device has come to these ids (with an
            exchange, to the end of this forward), or to `check_ids`. None does the first for ids
            on the CPU and the second for others.
        caller: the function that messages name, for one that calls this one with an exchange.

    Returns:
        The shape of `index`, fp32 (fp64 for fp64 logits); -inf at a token outside the support.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes or devices that do not fit, a temperature out of range, or an id outside
            of `[0, V)` other than `ignore_index` - on every rank, whichever has it. For ids on an
            accelerator the row is NaN and the error comes later, see `validate_ids`. So it may be
            an earlier call's; or that logits cannot be taken by the implementation that `backend`
            demands.
    """
    checked, ids, options = _calls.token_call(
        caller,
        logits,
        index,
        ignore_index,
        temperature,
        exchange,
        vocab_start,
        vocab_size,
        validate_ids,
    )
    return _calls.logprobs(checked, ids, options).view(index.shape)


def entropy(logits: Tensor, *, temperature: float = 1.0, exchange: Exchange = LOCAL) -> Tensor:
    """Entropy of each row, `-sum p log p` in nats.

    The gradient is `-p (log p + H) / temperature`.

    Args:
        logits: `[..., L]`, bf16, fp16, fp32 or fp64; this shard's columns.
        temperature: 1e-37 to 1e37.
        exchange: how shards come together; `LOCAL` for a whole vocabulary.

    Returns:
        `[...]` fp32 (fp64 for fp64 logits).

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: logits of no dimension, a temperature out of range, the bad id of an earlier
            call that left it to the next op (see `logprobs`), or logits that an implementation
            demanded by `backend` cannot take.
    """
    _calls.begin()
    checked = checks.logits("entropy", "logits", logits)
    options = _calls.TokenOptions(
        name="entropy",
        exchange=exchange,
        temperature=checks.temperature("entropy", temperature),
        ignore_index=-100,
        vocab_start=0,
        vocab_size=0,
        at_once=True,
    )
    return _calls.entropy(checked, options).view(checked.shape[:-1])


def logprobs_and_entropy(
    logits: Tensor,
    index: Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    exchange: Exchange = LOCAL,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    validate_ids: bool | None = None,
    caller: str = "logprobs_and_entropy",
) -> tuple[Tensor, Tensor]:
    """`logprobs` and `entropy` from one read of the logits, and one more for both gradients.

    Args:
        logits: as for `logprobs`.
        index: as for `logprobs`. A row whose ids are ignored or out of range keeps its entropy.
        ignore_index: as for `logprobs`.
        temperature: 1e-37 to 1e37.
        exchange: how shards come together; `LOCAL` for a whole vocabulary.
        vocab_start: as for `logprobs`.
        vocab_size: as for `logprobs`.
        validate_ids: as for `logprobs`.
        caller: as for `logprobs`.

    Returns:
        `(logprobs, entropy)`: the shape of `index`, and `[...]`; fp32 (fp64 for fp64 logits).

    Raises:
        TypeError: as for `logprobs`.
        ValueError: as for `logprobs`.
    """
    checked, ids, options = _calls.token_call(
        caller,
        logits,
        index,
        ignore_index,
        temperature,
        exchange,
        vocab_start,
        vocab_size,
        validate_ids,
    )
    values, entropies = _calls.logprobs_and_entropy(checked, ids, options)
    return values.view(index.shape), entropies.view(checked.shape[:-1])


def kl_div(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    reverse: bool = False,
    pointwise_clip: float | None = None,
    temperature: float = 1.0,
    exchange: Exchange = LOCAL,
) -> Tensor:
    """Kullback-Leibler divergence of each row: forward KL(q || p), or reverse KL(p || q).

    `KL(A || B) = sum a (log a - log b)` is +inf where A supports a token that B masks, decided on
    the logits. Gradients flow to both sides: `a (log a - log b - KL) / temperature` to A and
    `(b - a) / temperature` to B. The value is not clamped at 0: for nearly equal sides it may be
    negative by rounding.

    There is no `reduction`, `ignore_index` or mask. Choose the rows that count first, which also
    saves the work of the others: `keep = labels != -100; kl_div(s[keep], t[keep]).mean()`. To mask
    values use `torch.where(mask, value, 0.0)`, since a row's value may be infinite or NaN.

    Args:
        student_logits: `[..., L]`, bf16, fp16, fp32 or fp64; this shard's columns.
        teacher_logits: the same shape and device; the dtype may differ.
        reverse: False for KL(teacher || student), True for KL(student || teacher).
        pointwise_clip: caps each token's `a (log a - log b)` from above before the sum; a capped
            term has no gradient of its own. Costs a second read. Finite, > 0.
        temperature: 1e-37 to 1e37; divides both sides. The usual factor of temperature squared is
            the caller's.
        exchange: how shards come together; `LOCAL` for a whole vocabulary.

    Returns:
        `[...]` fp32 (fp64 if a side is fp64).

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes or devices that differ, a temperature or clip out of range, the bad id
            of an earlier call that left it to the next op (see `logprobs`), or logits that an
            implementation demanded by `backend` cannot take.

    Note:
        Kullback and Leibler, On Information and Sufficiency (1951); forward KL is the distillation
        loss of Hinton et al. (arXiv:1503.02531), reverse KL that of MiniLLM (Gu et al.,
        arXiv:2306.08543). The clip of single tokens' terms is an option of
        github.com/siyan-zhao/OPSD. Since terms may be negative and are capped from above alone, a
        clip moves a value down, also below 0; huggingface/trl#5990 has a discussion.
    """
    _calls.begin()
    student, teacher = checks.pair("kl_div", student_logits, teacher_logits)
    options = _calls.PairOptions(
        name="kl_div",
        exchange=exchange,
        temperature=checks.temperature("kl_div", temperature),
        clip=checks.clip("kl_div", pointwise_clip),
        beta=0.5,
        scale=1.0,
    )
    return _calls.kl(student, teacher, checks.flag("kl_div", "reverse", reverse), options)


def jsd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float = 0.5,
    rescale: bool = False,
    pointwise_clip: float | None = None,
    temperature: float = 1.0,
    exchange: Exchange = LOCAL,
) -> Tensor:
    """Generalized Jensen-Shannon divergence of each row.

    With the mixture `m = beta q + (1 - beta) p` it is `beta KL(q || m) + (1 - beta) KL(p || m)`
    for 0 < beta < 1. beta = 0 is forward KL(q || p) and beta = 1 reverse KL(p || q), each the same
    as `kl_div`. Between them the value tends to 0 at both ends, so a beta close to an end scales
    the signal away: `rescale` divides by `beta (1 - beta)` and runs continuously from forward KL
    through 4 JSD to reverse KL. The interior is finite for every pair of supports.

    Gradients: `(1 - beta) p (log(p/m) - KL(p || m)) / temperature` to the student,
    `beta q (log(q/m) - KL(q || m)) / temperature` to the teacher.

    There is no `reduction`, `ignore_index` or mask. Choose the rows that count first, which also
    saves the work of the others: `keep = labels != -100; jsd(s[keep], t[keep]).mean()`. To mask
    values use `torch.where(mask, value, 0.0)`, since a row's value may be infinite or NaN.

    Args:
        student_logits: `[..., L]`, bf16, fp16, fp32 or fp64; this shard's columns.
        teacher_logits: the same shape and device; the dtype may differ.
        beta: the teacher's share of the mixture, in [0, 1].
        rescale: divide an interior beta's value by `beta (1 - beta)`, after the clip.
        pointwise_clip: caps each token's term from above before the sum: the combined
            `beta q log(q/m) + (1 - beta) p log(p/m)`, or `kl_div`'s term at the ends. Finite, > 0.
        temperature: 1e-37 to 1e37; divides both sides.
        exchange: how shards come together; `LOCAL` for a whole vocabulary.

    Returns:
        `[...]` fp32 (fp64 if a side is fp64); not clamped at 0.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: shapes or devices that differ; beta, temperature or clip out of range; the bad
            id of an earlier call that left it to the next op (see `logprobs`); or logits that an
            implementation demanded by `backend` cannot take.

    Note:
        The generalized form is that of Agarwal et al., On-Policy Distillation of Language Models
        (arXiv:2306.13649); the clip is that of `kl_div`.
    """
    _calls.begin()
    student, teacher = checks.pair("jsd", student_logits, teacher_logits)
    share = checks.beta("jsd", beta)
    scaled = checks.flag("jsd", "rescale", rescale)
    interior = 0.0 < share < 1.0
    share = max(share, _LEAST_BETA) if interior else share
    options = _calls.PairOptions(
        name="jsd",
        exchange=exchange,
        temperature=checks.temperature("jsd", temperature),
        clip=checks.clip("jsd", pointwise_clip),
        beta=share,
        scale=1.0 / (share * (1.0 - share)) if scaled and interior else 1.0,
    )
    if not interior:
        return _calls.kl(student, teacher, share == 1.0, options)
    return _calls.jsd(student, teacher, options)
