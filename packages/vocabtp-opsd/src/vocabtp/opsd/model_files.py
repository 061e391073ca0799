"""Read a Hugging Face model from a directory or the hub, and refuse early what cannot train.

Everything that a model's configuration tells is checked before any weight is read: the layout
against the attention heads, the two heads' widths, the context lengths.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from vocabtp.opsd.errors import ModelError
from vocabtp.opsd.tp_plan import module_roles

if TYPE_CHECKING:
    from vocabtp.opsd.config import Config, StudentConfig

# the library is annotated in parts only
auto_model: Any = AutoModelForCausalLM
_hf_logging: Any = logging
_MAX_KEYS_SHOWN = 3


def read_config(section: StudentConfig, role: str) -> Any:
    """The model's Hugging Face configuration.

    Args:
        section: `config.student` or `config.teacher`.
        role: `"student"` or `"teacher"`, for messages.

    Raises:
        ModelError: There is no such model, or its configuration cannot be read.
    """
    path = Path(section.model_name_or_path).expanduser()
    looks_local = path.is_absolute() or section.model_name_or_path.startswith((".", "~"))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{role}.model_name_or_path: the directory {str(path)!r} has no config.json"
            )
    elif looks_local or path.exists():
        raise ModelError(f"{role}.model_name_or_path: there is no directory {str(path)!r}")
    with one_line(section, role, "cannot read its configuration"):
        return AutoConfig.from_pretrained(
            model_source(section), trust_remote_code=section.trust_remote_code
        )


def read_model(section: StudentConfig, config: Any, role: str, attention: str | None) -> Any:
    """The model with its weights on the CPU, whole, in evaluation mode.

    Args:
        section: `config.student` or `config.teacher`.
        config: What `read_config` returned.
        role: `"student"` or `"teacher"`, for messages.
        attention: Attention implementation; None for the library's choice.

    Raises:
        ModelError: No safetensors file, or its keys or shapes are not exactly the model's.
    """
    options = {} if attention is None else {"attn_implementation": attention}
    with one_line(section, role, "cannot load its weights"), quiet():
        model, report = auto_model.from_pretrained(
            model_source(section),
            config=config,
            dtype=getattr(torch, section.dtype),
            trust_remote_code=section.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            # reported like the other keys, instead of an error that names none
            ignore_mismatched_sizes=True,
            **options,
        )
    for what in ("missing", "unexpected", "mismatched"):
        if keys := sorted(map(_key_text, report[f"{what}_keys"])):
            more = f" and {len(keys) - _MAX_KEYS_SHOWN} more" if len(keys) > _MAX_KEYS_SHOWN else ""
            raise ModelError(
                f"{role} {section.model_name_or_path!r}: {what} weights in its files: "
                f"{', '.join(keys[:_MAX_KEYS_SHOWN])}{more}"
            )
    return model


def check_layout(
    section: StudentConfig, config: Any, role: str, tp: int, cut_vocab: bool, tp_by: str
) -> None:
    """Refuse a model that tensor parallelism cannot cut, from its configuration alone.

    Raises:
        ModelError: As `vocabtp.opsd.tp_plan.module_roles` and, where AutoTP is to cut it,
            `vocabtp.opsd.engine.autotp.check_model`.
    """
    if tp == 1:
        return
    with one_line(section, role, "cannot build it"), torch.device("meta"):
        skeleton = auto_model.from_config(config, trust_remote_code=section.trust_remote_code)
    name = f"{role} {section.model_name_or_path!r}"
    module_roles(skeleton, tp, cut_vocab=cut_vocab, name=name)
    if tp_by == "autotp":
        from vocabtp.opsd.engine.autotp import check_model

        check_model(skeleton, name)


def check_heads(student: Any, teacher: Any, tokenizer_length: int, config: Config) -> None:
    """Refuse heads that cannot be compared column by column, or that lack a token's column.

    Args:
        student: The student's Hugging Face configuration.
        teacher: The teacher's.
        tokenizer_length: Ids of the tokenizer, `len(tokenizer)`.
        config: `distillation.vocab` is read.

    Raises:
        ModelError: The widths differ with `vocab: own`, or one is below `tokenizer_length`.
    """
    check_width(config.student, student, "student", tokenizer_length)
    check_width(config.teacher, teacher, "teacher", tokenizer_length)
    width, other = head_width(student), head_width(teacher)
    if config.distillation.vocab == "own" and width != other:
        raise ModelError(
            f"the student's head has {width} columns and the teacher's {other}, with a tokenizer "
            f"of {tokenizer_length} ids: set distillation.vocab to common to cut both to the "
            "tokenizer's ids"
        )


def check_width(section: StudentConfig, config: Any, role: str, tokenizer_length: int) -> None:
    """Refuse a head that lacks a token's column.

    Args:
        section: `config.student` or `config.teacher`.
        config: What `read_config` returned.
        role: `"student"` or `"teacher"`, for messages.
        tokenizer_length: Ids of the tokenizer, `len(tokenizer)`.

    Raises:
        ModelError: The message names both numbers.
    """
    if (width := head_width(config)) < tokenizer_length:
        raise ModelError(
            f"{role} {section.model_name_or_path!r}: its head has {width} columns, but the "
            f"tokenizer has {tokenizer_length} ids"
        )


def dropout_notice(section: StudentConfig, config: Any, tp: int) -> str | None:
    """What to tell of a student whose attention drops weights in heads that are cut.

    Tensor-parallel peers draw one noise, or what all of them hold would differ; so theirs is the
    same where it should be each one's own.
    """
    text = config.get_text_config()
    rate = getattr(text, "attention_dropout", None)
    # without a plan every rank has all heads
    if tp == 1 or not rate or not getattr(text, "base_model_tp_plan", None):
        return None
    return (
        f"student {section.model_name_or_path!r}: of its attention_dropout {rate}, heads of "
        "different tensor-parallel ranks get the same noise; for noise of their own set "
        "parallel.tp to 1"
    )


def check_context(
    student: Any, teacher: Any, config: Config, teacher_prompt: int | None = None
) -> None:
    """Refuse prompts and answers that are longer than a model's context.

    An answer may be cut at the student's context; the teacher must be able to read all of it.

    Args:
        student: The student's Hugging Face configuration.
        teacher: The teacher's.
        config: The lengths under `rollout` are read.
        teacher_prompt: Tokens of the longest prompt, where the teacher reads prompts of its own.

    Raises:
        ModelError: The message names the lengths and the keys.
    """
    check_prompts(student, config)
    prompt, response = config.rollout.max_prompt_length, config.rollout.max_response_length
    own, other = context_length(student), context_length(teacher)
    longest = prompt + response if own is None else min(own, prompt + response)
    if other is not None and longest > other:
        raise ModelError(
            f"prompt and answer can have {longest} tokens, but the teacher's context is {other}: "
            "lower rollout.max_prompt_length or rollout.max_response_length"
        )
    answer = response if own is None else min(response, own - 1)
    if teacher_prompt is not None and other is not None and teacher_prompt + answer > other:
        raise ModelError(
            f"teacher.prompt_template gives prompts of up to {teacher_prompt} tokens and an answer "
            f"can have {answer}, but the teacher's context is {other}: shorten the template or its "
            "fields, or lower rollout.max_response_length"
        )


def check_prompts(student: Any, config: Config) -> None:
    """Refuse prompts that are longer than the student's context.

    Raises:
        ModelError: The message names both lengths and the key.
    """
    prompt, own = config.rollout.max_prompt_length, context_length(student)
    if own is not None and prompt > own:
        raise ModelError(
            f"rollout.max_prompt_length is {prompt}, but the student's context is {own} tokens: "
            "lower it, to leave room for the answer"
        )


def kept_in_float32(module: Any, dtype: torch.dtype) -> list[str]:
    """Parameters that the library loads in float32 where the rest of the model is of `dtype`.

    Args:
        module: A Hugging Face model, built or loaded in `dtype`.
        dtype: What it is loaded in.

    Returns:
        Their names: those that the model's class lists, and those that it makes in float32 whatever
        the dtype. The weights of some routers, for example.
    """
    if dtype == torch.float32:
        return []
    patterns = [pattern.replace("*", ".*") for pattern in module._get_dtype_plan(dtype)]
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.dtype == torch.float32 or any(re.search(pattern, name) for pattern in patterns)
    ]


def check_dtypes(section: StudentConfig, config: Any, role: str) -> None:
    """Refuse a model of several dtypes for an engine that makes them one.

    Raises:
        ModelError: The message names the first parameter that would be rounded.
    """
    dtype = getattr(torch, section.dtype)
    with one_line(section, role, "cannot build it"), torch.device("meta"):
        skeleton = auto_model.from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=section.trust_remote_code
        )
    if kept := kept_in_float32(skeleton, dtype):
        raise ModelError(
            f"{role} {section.model_name_or_path!r}: {kept[0]} stays in float32 where the model is "
            f"loaded in {section.dtype}, but DeepSpeed would round it: set {role}.dtype to "
            "float32, or parallel.engine to torch"
            + (", or parallel.teacher_shard to none" if role == "teacher" else "")
        )


def head_width(config: Any) -> int:
    """Columns of the LM head."""
    return int(config.get_text_config().vocab_size)


def context_length(config: Any) -> int | None:
    """Longest sequence that the model was built for; None if it names none."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def _key_text(key: Any) -> str:
    if isinstance(key, str):
        return key
    name, found, wanted = key
    return f"{name} (shape {list(found)} instead of {list(wanted)})"


def model_source(section: StudentConfig) -> str:
    """The model's directory, or else its name on the hub."""
    path = Path(section.model_name_or_path).expanduser()
    return str(path) if path.is_dir() else section.model_name_or_path


@contextmanager
def one_line(section: StudentConfig, role: str, what: str) -> Iterator[None]:
    """Turn what the libraries raise in a block into a `ModelError` of one line."""
    try:
        yield
    except ModelError:
        raise
    # the library raises OSError, ValueError, RuntimeError, KeyError, ImportError and those of
    # safetensors, huggingface_hub and any remote code
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ModelError(
            f"{role} {section.model_name_or_path!r}: {what}: {type(error).__name__}: {reason[:300]}"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """No table of wrong keys, which our own line replaces, and one progress bar for all ranks."""
    level = _hf_logging.get_verbosity()
    bar = os.environ.get("RANK", "0") != "0" and _hf_logging.is_progress_bar_enabled()
    _hf_logging.set_verbosity_error()
    if bar:
        _hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        _hf_logging.set_verbosity(level)
        if bar:
            _hf_logging.enable_progress_bar()
