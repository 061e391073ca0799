"""Held-out prompts: greedy answers, exact match, and how far the student is from the teacher."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from vocabtp.opsd.config import Config
from vocabtp.opsd.data import answer_of
from vocabtp.opsd.loss import LossSpec, distill_loss
from vocabtp.opsd.model import evaluating
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.rollout import Rollout, generate
from vocabtp.opsd.session import Answerer, Models, Prompts
from vocabtp.opsd.sharding import gathered

SAMPLES = 12


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The student on the held-out prompts, over all ranks."""

    exact_match: float  # share of answers equal to the row's answer, both stripped
    reverse_kl: float  # KL(student || teacher), mean over the tokens of these answers
    examples: int
    response_length: float  # mean tokens
    truncated: float  # share of answers without an end token
    samples: list[dict[str, Any]] = field(default_factory=list)  # the first few of this copy

    def numbers(self) -> dict[str, float]:
        """Everything but the samples."""
        return {k: v for k, v in asdict(self).items() if k != "samples"}


def evaluate(
    config: Config,
    layout: Layout,
    models: Models,
    prompts: Prompts,
    *,
    tick: Callable[[int, int], None] = lambda done, total: None,
    stop: Callable[[], bool] | None = None,
) -> Evaluation:
    """Answer every held-out prompt greedily and compare with `data.answer_field`.

    The prompts are split over the data-parallel ranks. Every rank takes the same number of
    batches, the last ones empty where need be.

    Args:
        config: The run's configuration, batch sizes filled in.
        layout: The ranks.
        models: Student and teacher.
        prompts: The held-out ones, with their answers.
        tick: Called on every rank before each batch and once more when it is answered, with the
            batches done and in all; what it raises must be raised on all ranks.
        stop: As in `generate`. What is cut short must not be counted, so `tick` has to raise then.

    Returns:
        The same numbers on every rank.
    """
    size = config.training.micro_batch_size_per_gpu or 1
    mine = list(range(layout.dp_rank, len(prompts), layout.dp))
    most = math.ceil(len(prompts) / layout.dp)
    batches = math.ceil(most / size)
    sums = torch.zeros(5, dtype=torch.float64, device=layout.device)
    samples: list[dict[str, Any]] = []
    with gathered(models.student.module):
        for i in range(batches):
            tick(i, batches)
            rollout = None
            if batch := mine[i * size : (i + 1) * size]:
                rollout = greedy(config, models, prompts.for_student(batch), stop)
            tick(i, batches)
            if rollout is None:
                models.teacher.idle()
                continue
            found, rows = _batch(config, models, prompts, batch, rollout)
            sums += found
            samples += rows[: max(0, SAMPLES - len(samples))]
    if layout.dp > 1:
        dist.all_reduce(sums, group=layout.dp_group)
    right, divergence, tokens, truncated, examples = sums.tolist()
    return Evaluation(
        exact_match=right / examples,
        reverse_kl=divergence / max(1.0, tokens),
        examples=int(examples),
        response_length=tokens / examples,
        truncated=truncated / examples,
        samples=samples,
    )


def greedy(
    config: Config,
    answerer: Answerer,
    ids: list[list[int]],
    stop: Callable[[], bool] | None = None,
) -> Rollout:
    """The student's greedy answers to these prompts."""
    settings = config.rollout.model_copy(
        update={"temperature": 0.0, "n_samples_per_prompt": 1, "top_k": -1, "top_p": 1.0}
    )
    return generate(
        answerer.student,
        ids,
        list(range(len(ids))),
        config=settings,
        specials=answerer.specials,
        seed=config.training.seed,
        step=0,
        stop=stop,
    )


def answer_all(
    config: Config, layout: Layout, answerer: Answerer, prompts: Prompts, limit: int | None
) -> list[dict[str, Any]]:
    """The student's answers, as `rollout` configures them, in the order of the file.

    Args:
        config: The run's configuration, batch sizes filled in.
        layout: The ranks.
        answerer: The student, its tokenizer and the ids that end an answer.
        prompts: What it answers.
        limit: Only the first so many prompts.

    Returns:
        One row for each prompt, on every rank.
    """
    size = config.training.micro_batch_size_per_gpu or 1
    settings = config.rollout.model_copy(update={"n_samples_per_prompt": 1})
    mine = list(range(len(prompts)))[:limit][layout.dp_rank :: layout.dp]
    rows: list[tuple[int, dict[str, Any]]] = []
    with gathered(answerer.student.module):
        for at in range(0, len(mine), size):
            batch = mine[at : at + size]
            rollout = generate(
                answerer.student,
                prompts.for_student(batch),
                batch,
                config=settings,
                specials=answerer.specials,
                seed=config.training.seed,
                step=0,
            )
            texts = response_texts(answerer, rollout)
            for i, text, length, cut in zip(
                batch, texts, rollout.response_lengths, rollout.truncated, strict=True
            ):
                example = prompts.examples[i]
                row = {"line": example.line, "prompt": example.prompt, "response": text}
                rows.append((i, row | {"tokens": length, "truncated": cut}))
    if layout.dp > 1:
        parts: list[Any] = [None] * layout.dp
        dist.all_gather_object(parts, rows, group=layout.dp_group)
        rows = [row for part in parts for row in part]
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def response_texts(answerer: Answerer, rollout: Rollout) -> list[str]:
    """The answers as text, without end and other special tokens."""
    ends = set(answerer.specials.eos_ids)
    return [
        str(answerer.tokenizer.decode([t for t in row if t not in ends], skip_special_tokens=True))
        for row in rollout.responses()
    ]


def _batch(
    config: Config,
    models: Models,
    prompts: Prompts,
    batch: list[int],
    rollout: Rollout,
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Sums over one batch (right, KL, tokens, truncated, examples), and its answers."""
    rows: list[dict[str, Any]] = []
    for i, text in zip(batch, response_texts(models, rollout), strict=True):
        answer = answer_of(prompts.examples[i], config.data)
        prompt = prompts.examples[i].prompt
        rows.append(
            {
                "prompt": prompt if isinstance(prompt, str) else prompt[-1]["content"],
                "response": text.strip(),
                "answer": answer,
                "correct": text.strip() == answer,
            }
        )
    tokens = sum(rollout.response_lengths)
    divergence = 0.0
    if tokens:
        divergence = _divergence(config, models, rollout, prompts.for_teacher(batch))
    else:
        models.teacher.idle()
    numbers = [
        sum(row["correct"] for row in rows),
        divergence,
        tokens,
        sum(rollout.truncated),
        len(batch),
    ]
    return torch.tensor(numbers, dtype=torch.float64, device=rollout.tokens.device), rows


@torch.no_grad()
def _divergence(
    config: Config, models: Models, rollout: Rollout, teacher_ids: list[list[int]] | None
) -> float:
    """Sum over tokens of KL(student || teacher) at temperature 1."""
    spec = LossSpec.of(
        config.distillation,
        loss_type="reverse_kl",
        rescale=False,
        pointwise_clip=None,
        temperature=1.0,
    )
    with (
        evaluating(models.student.module),
        models.teacher.score(rollout, teacher_ids) as cache,
    ):
        logits = models.student.response_logits(
            rollout.tokens, rollout.attention_mask, rollout.response_mask
        )
        loss = distill_loss(
            logits, cache, None, spec, models.student.shard, normalizer=1.0, agreed=True
        )
    return float(loss)
