"""The frozen teacher: scores the student's answers and leaves the scores in a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from vocabtp.cache import (
    PREFETCH_BYTES,
    PinnedPool,
    TeacherCache,
    TeacherHiddenCache,
    TeacherLogitCache,
)
from vocabtp.opsd.model import LanguageModel, evaluating
from vocabtp.opsd.rollout import Rollout, left_padded
from vocabtp.opsd.sharding import release, sharding_of
from vocabtp.opsd.teacher_head import check_head, response_states


class Teacher:
    """Scores rollouts with a model that never learns.

    The model may be the student's own module (self-distillation): its training mode and its
    gradients are then left as they are.

    Args:
        model: The teacher; its head has the student's layout.
        student: The model in training. Unless both share one module, the teacher is frozen.
        offload_to_cpu: Keep the weights in host memory between two passes. Sharded ones were put
            there when they were loaded.
        payload: What waits on the host: "logits", or "hidden" states and, on the device, the
            head's weights.
        prefetch_bytes: How much of it may be on the device before it is asked for.
        pool: Who lends the host memory; None for the process's own.

    Raises:
        ModelError: On every rank: payload "hidden" and a head that `TeacherHead` cannot stand for.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        student: LanguageModel | None = None,
        offload_to_cpu: bool = False,
        payload: Literal["logits", "hidden"] = "logits",
        prefetch_bytes: int = PREFETCH_BYTES,
        pool: PinnedPool | None = None,
    ) -> None:
        self.model = model
        self._shared = student is not None and student.module is model.module
        self._offload = (
            offload_to_cpu
            and not self._shared
            and model.layout.device.type != "cpu"
            and sharding_of(model.module) is None
        )
        if not self._shared:
            model.module.requires_grad_(False)
            model.module.eval()
        self._payload = payload
        self._options: dict[str, Any] = {
            "donate": True,
            "prefetch_bytes": prefetch_bytes,
            "pool": pool,
        }
        self._payload_dtype = self._head_dtype
        if payload == "hidden":
            with torch.no_grad(), evaluating(model.module):
                self._payload_dtype = check_head(model)
        if self._offload:
            model.module.to("cpu")

    def score(
        self, rollout: Rollout, teacher_prompts: Sequence[Sequence[int]] | None = None
    ) -> TeacherCache:
        """The teacher's logits for every response token, packed row by row as the student's.

        Args:
            rollout: One micro-batch.
            teacher_prompts: A prompt of the teacher's own for each sample, of any length; None for
                the student's.

        Returns:
            A cache of `[rows, L]` in the dtype of the teacher's head, of the kind that
            `payload` says, which knows the teacher, the tokens and the positions that it was
            filled from; the caller frees it.

        Raises:
            ValueError: The number of teacher prompts is not the number of samples.
        """
        batch = self._batch(rollout, teacher_prompts)
        module, shard = self.model.module, self.model.shard
        options = self._options | self.identity(batch)
        with torch.no_grad(), evaluating(module), self._on_device():
            if self._payload == "hidden":
                states, head = response_states(self.model, *batch)
                return TeacherHiddenCache.store(states, head, shard, **options)
            logits = self.model.response_logits(*batch)
        release(module)
        return TeacherLogitCache.store(logits, shard, self._head_dtype, **options)

    def payload_nbytes(self, rows: int) -> int:
        """Bytes of host memory that a cache of so many rows takes on this rank."""
        width = self.model.shard.width
        if self._payload == "hidden":
            head = self.model.module.get_output_embeddings().weight
            # a partitioned weight has its shape beside it
            width = int(getattr(head, "ds_shape", head.shape)[1])
        return rows * width * self._payload_dtype.itemsize

    @property
    def _head_dtype(self) -> torch.dtype:
        # not the module's: some models keep their head in fp32
        found: torch.dtype = self.model.module.get_output_embeddings().weight.dtype
        return found

    def identity(self, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
        """What a cache of these tokens, their mask and the response mask is told of itself."""
        tokens, _, response = batch
        # on the host before the forward is queued: later it would be waited for
        return {"teacher": self.model.name, "tokens": tokens.cpu(), "positions": response.cpu()}

    def idle(self) -> None:
        """Take part in a `score` of other data-parallel copies, without a sample of one's own.

        Nothing to do unless the copies hold shards of the teacher.
        """
        module = self.model.module
        if sharding_of(module) is not None:
            with torch.no_grad(), evaluating(module):
                self.model.idle_logits()
            release(module)

    def _batch(
        self, rollout: Rollout, prompts: Sequence[Sequence[int]] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if prompts is None:
            return rollout.tokens, rollout.attention_mask, rollout.response_mask
        if len(prompts) != len(rollout):
            raise ValueError(
                f"Teacher.score: {len(prompts)} teacher prompts for {len(rollout)} samples"
            )
        tokens, mask = left_padded(prompts, 0, rollout.tokens.device)
        start = rollout.prompt_width
        return (
            torch.cat([tokens, rollout.tokens[:, start:]], dim=1),
            torch.cat([mask, rollout.attention_mask[:, start:]], dim=1),
            torch.cat([torch.zeros_like(mask).bool(), rollout.response_mask[:, start:]], dim=1),
        )

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if not self._offload:
            yield
            return
        module = self.model.module
        module.to(self.model.layout.device)
        try:
            yield
        finally:
            module.to("cpu")
