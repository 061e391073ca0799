"""The public losses on a shard of the vocabulary.

Each op is: the ranks agree (`_inputs.prepare`), then the op of `vocabtp.kernels` runs on this
rank's columns with the group's Exchange; formulas and edges are written down there. Names and
argument order are those of `deepspeed.sequence.vocab_parallel_ops`, what is new is keyword-only.

What holds for all of them:

- Values are fp32 (fp64 for fp64 logits), one per row, bitwise the same on every rank. Gradients
  have the input's dtype and are the slice of the dense gradient, provided that every rank
  back-propagates the same loss. The backward needs no collective.
- `tp_group=None`, without a shard and without a DTensor, is one process that holds the whole
  vocabulary: torch.distributed is never touched.
- A DTensor sharded on its last dimension over a one-dimensional mesh brings group and bounds
  itself; its gradient is a DTensor placed alike.
- Without `shard=` the ranks compare shapes, dtypes, bounds and options first, by one small
  all_gather (and, on a GPU, one wait for it); whatever is wrong, on whichever rank, is the same
  ValueError on all of them. `shard=` (see `VocabShard`) says that this was done: then the call
  costs the op's own exchanges only, and an input that is wrong on one rank alone raises there
  alone.
- Uneven and empty shards, zero rows and strided views work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from vocabtp import kernels
from vocabtp.dist._arguments import exchange_of, pair_inputs, token_inputs
from vocabtp.dist._dtensor import unchanged
from vocabtp.dist._inputs import Bounds, prepare
from vocabtp.dist.shard import VocabShard
from vocabtp.kernels import checks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def vocab_parallel_logprobs(
    vocab_parallel_logits: Tensor,
    index: Tensor,
    tp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
    *,
    shard: VocabShard | None = None,
    temperature: float = 1.0,
    validate_ids: bool | None = None,
) -> Tensor:
    """Log-probabilities of chosen tokens, `log softmax(logits / temperature)[index]`.

    One all_gather of two statistics a row and one all_reduce of the chosen logits.

    Args:
        vocab_parallel_logits: `[..., L]` bf16, fp16, fp32 or fp64; this rank's columns, or a
            DTensor.
        index: integer ids of the whole vocabulary, `[...]` or `[..., K]`, the same on all ranks.
            The backward reads them again: they must not change in place before.
        tp_group: the ranks that share the vocabulary; None is a single process.
        vocab_start_index: this rank's first column; None takes the widths of the ranks in order.
        vocab_end_index: one past this rank's last column.
        global_vocab_size: V.
        ignore_index: an id that asks nothing: value 0, no gradient.
        shard: group and bounds that were agreed on before.
        temperature: divides the logits; 1e-37 to 1e37.
        validate_ids: whether an id outside of `[0, V)` raises before the call returns. None: yes
            for ids on the CPU, while ids on a GPU give a NaN row and raise at the next call or at
            `vocabtp.kernels.check_ids()`; True waits for the GPU; False does not, anywhere.

    Returns:
        The shape of `index`; -inf at a token outside the support.

    Raises:
        ValueError: on every rank: inputs that do not fit together, or an id outside of `[0, V)`
            other than `ignore_index`, whichever rank has it.
        TypeError: an argument of the wrong type, in a single process or with `shard=`.
    """
    bounds = Bounds(vocab_start_index, vocab_end_index, global_vocab_size)
    local, ids, options = token_inputs(
        "vocab_parallel_logprobs",
        vocab_parallel_logits,
        index,
        tp_group,
        bounds,
        ignore_index,
        shard,
        temperature,
        validate_ids,
    )
    return kernels.logprobs(local, ids, **options)


def vocab_parallel_entropy(
    vocab_parallel_logits: Tensor,
    tp_group: ProcessGroup | None = None,
    *,
    shard: VocabShard | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Entropy of each row in nats, `-sum p log p` with `p = softmax(logits / temperature)`.

    One all_gather of three statistics a row.

    Args:
        vocab_parallel_logits: `[..., L]` bf16, fp16, fp32 or fp64; this rank's columns, or a
            DTensor.
        tp_group: the ranks that share the vocabulary; None is a single process.
        shard: group and bounds that were agreed on before.
        temperature: divides the logits; 1e-37 to 1e37.

    Returns:
        `[...]`; NaN for a row of -inf.

    Raises:
        ValueError: on every rank: inputs that do not fit together.
        TypeError: an argument of the wrong type, in a single process or with `shard=`.
    """
    op = "vocab_parallel_entropy"

    def check(local: Sequence[Tensor]) -> None:
        checks.logits(op, "vocab_parallel_logits", local[0])
        checks.temperature(op, temperature)

    (local,), own = prepare(
        op,
        {"vocab_parallel_logits": vocab_parallel_logits},
        tp_group=tp_group,
        shard=shard,
        facts={"temperature": temperature},
        check=check,
    )
    (local,) = unchanged((local,), (vocab_parallel_logits,))
    return kernels.entropy(local, temperature=temperature, exchange=exchange_of(own))


def vocab_parallel_logprobs_and_entropy(
    vocab_parallel_logits: Tensor,
    index: Tensor,
    tp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
    *,
    shard: VocabShard | None = None,
    temperature: float = 1.0,
    validate_ids: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`vocab_parallel_logprobs` and `vocab_parallel_entropy` from one read of the logits.

    One all_gather of three statistics a row and one all_reduce of the chosen logits. A row whose
    ids are ignored keeps its entropy.

    Args:
        vocab_parallel_logits: as for `vocab_parallel_logprobs`.
        index: as for `vocab_parallel_logprobs`.
        tp_group: as for `vocab_parallel_logprobs`.
        vocab_start_index: as for `vocab_parallel_logprobs`.
        vocab_end_index: as for `vocab_parallel_logprobs`.
        global_vocab_size: as for `vocab_parallel_logprobs`.
        ignore_index: as for `vocab_parallel_logprobs`.
        shard: as for `vocab_parallel_logprobs`.
        temperature: as for `vocab_parallel_logprobs`.
        validate_ids: as for `vocab_parallel_logprobs`.

    Returns:
        `(logprobs, entropy)`: the shape of `index`, and `[...]`.

    Raises:
        ValueError: as for `vocab_parallel_logprobs`.
        TypeError: as for `vocab_parallel_logprobs`.
    """
    bounds = Bounds(vocab_start_index, vocab_end_index, global_vocab_size)
    local, ids, options = token_inputs(
        "vocab_parallel_logprobs_and_entropy",
        vocab_parallel_logits,
        index,
        tp_group,
        bounds,
        ignore_index,
        shard,
        temperature,
        validate_ids,
    )
    return kernels.logprobs_and_entropy(local, ids, **options)


def vocab_parallel_kl_div(
    student_logits: Tensor,
    teacher_logits: Tensor,
    reverse: bool = False,
    tp_group: ProcessGroup | None = None,
    *,
    shard: VocabShard | None = None,
    pointwise_clip: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Kullback-Leibler divergence of each row: forward KL(q || p), or reverse KL(p || q).

    `p` is the student's and `q` the teacher's `softmax(logits / temperature)`. One all_gather of
    six statistics a row, and one of three with a clip. Gradients flow to both sides.

    No `reduction`, `ignore_index` or mask: choose the rows that count first, the same on all ranks,
    and reduce what comes back (`student_logits[keep]`, `.mean()`).

    Args:
        student_logits: `[..., L]` bf16, fp16, fp32 or fp64; this rank's columns, or a DTensor.
        teacher_logits: the same shape and device, cut alike; the dtype may differ.
        reverse: False for KL(teacher || student), True for KL(student || teacher).
        tp_group: the ranks that share the vocabulary; None is a single process.
        shard: group and bounds that were agreed on before.
        pointwise_clip: caps each vocabulary term from above before the sum; None caps nothing.
        temperature: divides both sides; 1e-37 to 1e37.

    Returns:
        `[...]`; +inf where the first distribution supports a token that the second masks.

    Raises:
        ValueError: on every rank: inputs that do not fit together.
        TypeError: an argument of the wrong type, in a single process or with `shard=`.
    """
    op = "vocab_parallel_kl_div"

    def check() -> None:
        checks.flag(op, "reverse", reverse)
        checks.clip(op, pointwise_clip)
        checks.temperature(op, temperature)

    facts = {"reverse": reverse, "pointwise_clip": pointwise_clip, "temperature": temperature}
    student, teacher, own = pair_inputs(
        op, student_logits, teacher_logits, tp_group, shard, facts, check
    )
    return kernels.kl_div(
        student,
        teacher,
        reverse=reverse,
        pointwise_clip=pointwise_clip,
        temperature=temperature,
        exchange=exchange_of(own),
    )


def vocab_parallel_jsd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    beta: float = 0.5,
    tp_group: ProcessGroup | None = None,
    *,
    shard: VocabShard | None = None,
    rescale: bool = False,
    pointwise_clip: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Generalized JSD of each row, `beta KL(q || m) + (1 - beta) KL(p || m)`.

    `p` is the student's, `q` the teacher's distribution and `m = beta q + (1 - beta) p`. beta = 0
    is forward KL(q || p), beta = 1 reverse KL(p || q). Between them the value tends to 0 at both
    ends; `rescale` divides it by `beta (1 - beta)` and so runs continuously from forward KL through
    4 JSD to reverse KL. Two all_gathers, of four and three statistics a row (at the ends those of
    KL). Gradients flow to both sides.

    No `reduction`, `ignore_index` or mask: choose the rows that count first, the same on all ranks,
    and reduce what comes back (`student_logits[keep]`, `.mean()`).

    Args:
        student_logits: `[..., L]` bf16, fp16, fp32 or fp64; this rank's columns, or a DTensor.
        teacher_logits: the same shape and device, cut alike; the dtype may differ.
        beta: the teacher's share of the mixture, in [0, 1].
        tp_group: the ranks that share the vocabulary; None is a single process.
        shard: group and bounds that were agreed on before.
        rescale: divide an interior beta's value by `beta (1 - beta)`, after the clip.
        pointwise_clip: caps each vocabulary term from above before the sum; None caps nothing.
        temperature: divides both sides; 1e-37 to 1e37.

    Returns:
        `[...]`.

    Raises:
        ValueError: on every rank: inputs that do not fit together, beta outside of [0, 1].
        TypeError: an argument of the wrong type, in a single process or with `shard=`.
    """
    op = "vocab_parallel_jsd"

    def check() -> None:
        checks.beta(op, beta)
        checks.flag(op, "rescale", rescale)
        checks.clip(op, pointwise_clip)
        checks.temperature(op, temperature)

    facts = {
        "beta": beta,
        "rescale": rescale,
        "pointwise_clip": pointwise_clip,
        "temperature": temperature,
    }
    student, teacher, own = pair_inputs(
        op, student_logits, teacher_logits, tp_group, shard, facts, check
    )
    return kernels.jsd(
        student,
        teacher,
        beta=beta,
        rescale=rescale,
        pointwise_clip=pointwise_clip,
        temperature=temperature,
        exchange=exchange_of(own),
    )
