"""The student answers: our own decode loop over a head that is cut over the vocabulary.

`generate` of the model library would pick each rank's token from that rank's columns. Here a token
is picked over all shards without gathering them, and sampling noise is a function of (seed, step,
sample, position, id), so equal logits give equal tokens at every layout, whatever the ranks' own
random generators hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from vocabtp.dist import agree, sampling_keys, vocab_parallel_argmax, vocab_parallel_sample
from vocabtp.opsd.model import LanguageModel, evaluating
from vocabtp.opsd.sharding import gathered

if TYPE_CHECKING:
    from vocabtp.opsd.config import RolloutConfig
    from vocabtp.opsd.tokens import Specials

# tokens between two questions whether to stop: a second or so of a large model
_STOP_EVERY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Prompts with their answers: prompts end, and answers start, at column `P`.

    Attributes:
        tokens: `[B, P + R]` int64, prompts padded on the left, responses on the right.
        attention_mask: `[B, P + R]` int64, 1 on tokens. Made from lengths: a pad id that is also
            the end id, or that stands in a prompt, counts where it is a token.
        response_mask: `[B, P + R]` bool, True on response tokens, the end token included.
        prompt_lengths: Tokens of each prompt.
        response_lengths: Tokens of each response; 0 where the context left no room.
        truncated: Whether the response was cut before an end token.
        sample_ids: The global id of each row, which its sampling noise derives from.
    """

    tokens: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    prompt_lengths: list[int]
    response_lengths: list[int]
    truncated: list[bool]
    sample_ids: list[int]

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def prompt_width(self) -> int:
        """Columns of the prompts."""
        return max(self.prompt_lengths, default=0)

    def rows(self, start: int, stop: int) -> Rollout:
        """The samples `start` to `stop`, without the padding that only the others needed."""
        prompts, responses = self.prompt_lengths[start:stop], self.response_lengths[start:stop]
        left = self.prompt_width - max(prompts, default=0)
        right = self.prompt_width + max(responses, default=0)
        return Rollout(
            tokens=self.tokens[start:stop, left:right],
            attention_mask=self.attention_mask[start:stop, left:right],
            response_mask=self.response_mask[start:stop, left:right],
            prompt_lengths=prompts,
            response_lengths=responses,
            truncated=self.truncated[start:stop],
            sample_ids=self.sample_ids[start:stop],
        )

    def responses(self) -> list[list[int]]:
        """The response tokens of each sample, the end token included."""
        start = self.prompt_width
        return [
            row[start : start + length]
            for row, length in zip(self.tokens.tolist(), self.response_lengths, strict=True)
        ]


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    sample_ids: Sequence[int],
    *,
    config: RolloutConfig,
    specials: Specials,
    seed: int,
    step: int,
    stop: Callable[[], bool] | None = None,
) -> Rollout:
    """Answer prompts, `config.n_samples_per_prompt` times each.

    Every tensor-parallel peer passes the same arguments; data-parallel copies pass their own.
    Copies that share a sharded student call it equally often, or all hold it `gathered` meanwhile.
    Runs without gradients and in evaluation mode; both are as before afterwards.

    Args:
        model: The student.
        prompts: Token ids of each prompt, at least one id each.
        sample_ids: Global index of each prompt; its k-th answer has the id `index * n + k`.
        config: Lengths, temperature, `top_k`, `top_p`, `n_samples_per_prompt`.
        specials: End and pad ids, and how many ids the tokenizer has; no id beyond is picked.
        seed: The run's seed.
        step: The optimizer step, so that noise differs between steps.
        stop: Asked every few tokens; where it is true on a tensor-parallel peer, all peers end the
            answers there, as if cut. Every peer passes one or none does.

    Returns:
        The rollout, the answers to one prompt in consecutive rows.

    Raises:
        ValueError: An empty prompt; or, on every tensor-parallel peer, inputs or picked tokens
            that differ between peers.
    """
    samples = config.n_samples_per_prompt
    rows = [list(prompt) for prompt in prompts for _ in range(samples)]
    ids = [sample * samples + k for sample in sample_ids for k in range(samples)]
    group = model.layout.tp_group
    inputs = {"seed": seed, "step": step, "samples": digest(ids), "prompts": digest(rows)}
    error = None if all(rows) else "a prompt has no token"
    # before the first collective: unequal batches would hang the peers or mix their rows
    agree(inputs, what="rollout inputs of tensor-parallel peers", group=group, error=error)
    prompt_block, prompt_mask = left_padded(rows, specials.pad_id, model.layout.device)
    limits = response_limits(rows, config.max_response_length, model.context)
    picker = _Picker(model, config, specials, seed, step, ids)
    with torch.no_grad(), gathered(model.module), evaluating(model.module):
        response, lengths, ended = _decode(picker, prompt_block, prompt_mask, limits, stop)
    picked = {"tokens": digest(response.tolist()), "lengths": digest(lengths)}
    agree(picked, what="rollout of tensor-parallel peers", group=group)
    return assemble(rows, response, lengths, ended, ids, (prompt_block, prompt_mask))


def digest(value: object) -> str:
    """A short hash of nested lists of numbers."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def left_padded(
    rows: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`[B, P]` ids that end at the last column, and their mask; both int64."""
    width = max(map(len, rows), default=0)
    tokens = [[pad_id] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    shape = (len(rows), width)
    return (
        torch.tensor(tokens, dtype=torch.long, device=device).view(shape),
        torch.tensor(mask, dtype=torch.long, device=device).view(shape),
    )


def response_limits(
    prompts: Sequence[Sequence[int]], max_response: int, context: int | None
) -> list[int]:
    """Tokens that each answer may have: the configured number, or what the context leaves."""
    if context is None:
        return [max_response] * len(prompts)
    return [max(0, min(max_response, context - len(prompt))) for prompt in prompts]


class _Picker:
    """Picks the next token of each row over all shards."""

    def __init__(
        self,
        model: LanguageModel,
        config: RolloutConfig,
        specials: Specials,
        seed: int,
        step: int,
        ids: list[int],
    ) -> None:
        self.model = model
        self.specials = specials
        self._config = config
        self._noise = (seed, step, torch.tensor(ids, dtype=torch.long, device=model.layout.device))
        # columns of this shard that are ids of the tokenizer
        self._usable = max(0, specials.vocab - model.shard.start)

    def pick(self, logits: Tensor, position: int) -> Tensor:
        """`[B, L]` logits -> `[B]` global ids, the same on every peer."""
        shard, config = self.model.shard, self._config
        if self._usable < logits.shape[1]:
            logits = logits.clone()
            logits[:, self._usable :] = float("-inf")
        if config.temperature == 0:
            return vocab_parallel_argmax(logits, shard)
        seed, step, ids = self._noise
        return vocab_parallel_sample(
            logits,
            shard,
            keys=sampling_keys(seed, step, ids, position),
            temperature=config.temperature,
            top_k=None if config.top_k == -1 else config.top_k,
            top_p=None if config.top_p == 1 else config.top_p,
        )


def _decode(
    picker: _Picker,
    tokens: Tensor,
    mask: Tensor,
    limits: list[int],
    stop: Callable[[], bool] | None,
) -> tuple[Tensor, list[int], list[bool]]:
    """`[B, R]` response ids with pads after each end, their lengths, and which met an end id."""
    device, specials, group = tokens.device, picker.specials, picker.model.layout.tp_group
    limit = torch.tensor(limits, dtype=torch.long, device=device)
    ends = torch.tensor(specials.eos_ids, dtype=torch.long, device=device)
    lengths = torch.zeros_like(limit)
    ended = torch.zeros_like(limit, dtype=torch.bool)
    columns: list[Tensor] = []
    cache = None
    for position in range(max(limits, default=0)):
        logits, cache = picker.model.next_logits(tokens, mask, cache)
        live = ~ended & (limit > position)
        picked = torch.where(live, picker.pick(logits, position), specials.pad_id)
        columns.append(picked)
        lengths += live
        ended |= live & torch.isin(picked, ends)
        tokens = picked[:, None]
        mask = torch.cat([mask, live[:, None].long()], dim=1)
        if not bool((~ended & (limit > position + 1)).any()):
            break
        if stop is not None and (position + 1) % _STOP_EVERY == 0:
            asked = torch.tensor([stop()], dtype=torch.int32, device=device)
            if group is not None:
                dist.all_reduce(asked, dist.ReduceOp.MAX, group=group)
            if bool(asked):
                break
    response = torch.stack(columns, dim=1) if columns else tokens.new_zeros((len(limits), 0))
    return response, lengths.tolist(), ended.tolist()


def assemble(
    prompts: Sequence[Sequence[int]],
    response: Tensor,
    lengths: list[int],
    ended: list[bool],
    sample_ids: list[int],
    prompt_block: tuple[Tensor, Tensor],
) -> Rollout:
    """A rollout from prompts that are padded already and a `[B, R]` block of responses."""
    tokens, mask = prompt_block
    columns = torch.arange(response.shape[1], device=response.device)
    inside = columns < torch.tensor(lengths, device=response.device)[:, None]
    return Rollout(
        tokens=torch.cat([tokens, response], dim=1),
        attention_mask=torch.cat([mask, inside.long()], dim=1),
        response_mask=torch.cat([torch.zeros_like(mask, dtype=torch.bool), inside], dim=1),
        prompt_lengths=[len(prompt) for prompt in prompts],
        response_lengths=lengths,
        truncated=[not end for end in ended],
        sample_ids=sample_ids,
    )
