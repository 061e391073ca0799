"""What a run consists of: prompts, tokenizer, student, teacher. Read in the order of their cost.

Files and tokenizers come before any model, so that a mistake in them costs seconds. Training reads
everything; what only answers or evaluates reads what that takes, and nothing else has to be there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from vocabtp.cache.pool import PAGE_BYTES, PinnedPool
from vocabtp.opsd.config import Config, StudentConfig
from vocabtp.opsd.data import Example, load_examples
from vocabtp.opsd.errors import ConfigError
from vocabtp.opsd.loading import load_models, load_student
from vocabtp.opsd.model import LanguageModel
from vocabtp.opsd.parallel import Layout
from vocabtp.opsd.teacher import Teacher
from vocabtp.opsd.tokens import (
    Specials,
    compare_tokenizers,
    encode_examples,
    load_tokenizer,
    number_of_ids,
    special_ids,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """One prompt file, encoded."""

    path: str
    digest: str  # sha256 of the file
    examples: list[Example]
    ids: list[list[int]]
    teacher_ids: list[list[int]] | None  # None: the teacher sees the student's prompt

    def __len__(self) -> int:
        return len(self.ids)

    def for_student(self, indices: Sequence[int]) -> list[list[int]]:
        """The student's prompts at these indices."""
        return [self.ids[i] for i in indices]

    def for_teacher(self, indices: Sequence[int]) -> list[list[int]] | None:
        """The teacher's own prompts at these indices, if it has any."""
        return None if self.teacher_ids is None else [self.teacher_ids[i] for i in indices]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All that training reads before the models."""

    tokenizer: PreTrainedTokenizerBase
    train: Prompts
    held_out: Prompts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answerer:
    """What answers prompts: the student on this layout, its tokenizer, what ends an answer."""

    student: LanguageModel
    tokenizer: PreTrainedTokenizerBase
    specials: Specials


@dataclass(frozen=True, slots=True, kw_only=True)
class Models(Answerer):
    """The student, and the teacher that scores its answers."""

    teacher: Teacher


def read_inputs(config: Config, layout: Layout) -> Inputs:
    """Read prompts and tokenizers; what one rank cannot read, no rank goes on without.

    Raises:
        UserError: On every rank: data, tokenizer or template that cannot be used.
    """
    with layout.together():
        # broken files before tokenizers, which may come from the network
        path, held = config.data.path, config.data.eval_path
        rows = load_examples(path, config.data)
        held_rows = _held_out_rows(config, held) if held else []
        tokenizer = _compared_tokenizer(config)
        return Inputs(
            tokenizer=tokenizer,
            train=_encode(tokenizer, rows, config, path),
            held_out=_encode(tokenizer, held_rows, config, held) if held else None,
        )


def read_prompts(config: Config, layout: Layout) -> tuple[PreTrainedTokenizerBase, Prompts]:
    """The training prompts for the student alone, and its tokenizer.

    Raises:
        UserError: On every rank, as `read_inputs`.
    """
    with layout.together():
        path = config.data.path
        rows = load_examples(path, config.data)
        tokenizer = _answering_tokenizer(config)
        return tokenizer, _encode(tokenizer, rows, config, path, teacher=False)


def read_held_out(
    config: Config, layout: Layout, path: str
) -> tuple[PreTrainedTokenizerBase, Prompts]:
    """The held-out prompts for student and teacher, and their tokenizer.

    Raises:
        UserError: On every rank, as `read_inputs`.
    """
    with layout.together():
        rows = _held_out_rows(config, path)
        tokenizer = _compared_tokenizer(config)
        return tokenizer, _encode(tokenizer, rows, config, path)


def read_models(
    config: Config, layout: Layout, tokenizer: PreTrainedTokenizerBase, *prompts: Prompts | None
) -> Models:
    """Load both models; all that their configurations tell is checked before any weight.

    Args:
        config: The run's configuration.
        layout: This process's place.
        tokenizer: The student's.
        prompts: What they are for: the teacher's own have to fit it.

    Raises:
        UserError: On every rank.
    """
    # dropout: different on data-parallel copies; equal on the peers of one copy, or activations
    # that all of them hold would differ
    torch.manual_seed(config.training.seed + layout.dp_rank)
    lengths = [len(row) for p in prompts if p is not None for row in p.teacher_ids or ()]
    student, teacher = load_models(
        config, layout, number_of_ids(tokenizer), teacher_prompt=max(lengths, default=None)
    )
    if config.parallel.teacher_shard == "zero3" and layout.dp > 1:
        from vocabtp.opsd.engine.deepspeed_teacher import partition

        partition(teacher.module, config, layout)
    limit = config.teacher.pinned_bytes
    scoring = Teacher(
        teacher,
        student=student,
        offload_to_cpu=config.teacher.offload_to_cpu,
        payload=config.teacher.payload,
        prefetch_bytes=config.teacher.prefetch_bytes,
        pool=None if limit is None else PinnedPool(limit),
    )
    if limit is not None:
        with layout.together():
            _check_limit(limit, scoring, config, student.context)
    return Models(
        student=student,
        tokenizer=tokenizer,
        specials=_specials_of(student, tokenizer),
        teacher=scoring,
    )


def read_answerer(config: Config, layout: Layout, tokenizer: PreTrainedTokenizerBase) -> Answerer:
    """Load the student to answer prompts, as it would in training.

    Raises:
        UserError: On every rank.
    """
    student = load_student(config, layout, number_of_ids(tokenizer), answers=True)
    specials = _specials_of(student, tokenizer)
    return Answerer(student=student, tokenizer=tokenizer, specials=specials)


def read_student(config: Config, layout: Layout) -> tuple[LanguageModel, PreTrainedTokenizerBase]:
    """The student and its tokenizer, for what needs neither prompts nor a teacher.

    Raises:
        UserError: On every rank.
    """
    with layout.together():
        tokenizer = _tokenizer(config.student)
    return load_student(config, layout, number_of_ids(tokenizer), answers=False), tokenizer


def _check_limit(limit: int, teacher: Teacher, config: Config, context: int | None) -> None:
    """Refuse a limit that a payload could pass: in a step, only the rank of that payload would."""
    answers = config.training.micro_batch_size_per_gpu or 1
    longest = config.rollout.max_response_length
    if context is not None:
        longest = min(longest, context - 1)
    # a pool holds whole pages
    need = -(-teacher.payload_nbytes(answers * longest) // PAGE_BYTES) * PAGE_BYTES
    if need > limit:
        raise ConfigError(
            f"teacher.pinned_bytes is {limit}, but the {config.teacher.payload} of {answers} "
            f"answer(s) of up to {longest} tokens take {need} bytes: raise it, set "
            "teacher.payload hidden if that is less, or lower training.micro_batch_size_per_gpu "
            "or rollout.max_response_length"
        )


def checksum(model: LanguageModel) -> int:
    """A number that changes when any bit of this rank's weights does, for all practical purposes.

    Weighted sums of the bytes, taken on the device, a few at a time: hashing gigabytes on the host
    would take longer than many steps.
    """
    total = 0
    for i, tensor in enumerate(model.module.parameters()):
        # a partitioned teacher holds its part elsewhere
        local = getattr(tensor, "ds_tensor", tensor).detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        for part in local.contiguous().view(-1).view(torch.uint8).split(1 << 24):
            part = part.to(model.layout.device)
            weights = torch.arange(part.numel(), device=part.device) % 65521 + 1 + i
            total = (total * 31 + int((part.long() * weights).sum())) % (1 << 61)
    return total


def _held_out_rows(config: Config, path: str) -> list[Example]:
    return load_examples(path, config.data, need_answer=True)[: config.data.eval_limit]


def _tokenizer(section: StudentConfig) -> PreTrainedTokenizerBase:
    return load_tokenizer(section.model_name_or_path, trust_remote_code=section.trust_remote_code)


def _answering_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The student's, with which answers can end: known before any weight is read."""
    tokenizer = _tokenizer(config.student)
    special_ids(tokenizer, _ends(config.student.model_name_or_path))
    return tokenizer


def _compared_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """The student's, with the same tokens as the teacher's."""
    tokenizer = _answering_tokenizer(config)
    compare_tokenizers(tokenizer, _tokenizer(config.teacher))
    return tokenizer


def _specials_of(student: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> Specials:
    return special_ids(tokenizer, getattr(student.module, "generation_config", None))


def _ends(path: str) -> GenerationConfig | None:
    """The generation configuration in a model's files: it may name the only end token."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Example],
    config: Config,
    path: str,
    *,
    teacher: bool = True,
) -> Prompts:
    examples, ids, teacher_ids = encode_examples(
        tokenizer, rows, config, path=path, teacher=teacher
    )
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return Prompts(path=path, digest=digest, examples=examples, ids=ids, teacher_ids=teacher_ids)
