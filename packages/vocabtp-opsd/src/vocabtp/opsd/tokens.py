"""Prompts as token ids, and whether two tokenizers mean the same by each id."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocabtp.opsd.config import TOKENIZER_TEMPLATE, Config, template_fields
from vocabtp.opsd.data import Example, report_broken
from vocabtp.opsd.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

Prompt = str | list[dict[str, str]]


@dataclasses.dataclass(frozen=True, slots=True)
class Specials:
    """The ids that end and pad sequences, and how many ids the tokenizer knows.

    Attributes:
        eos_ids: Ids that end an answer, ascending.
        pad_id: Fills up rows; it may equal an end id, so masks come from lengths, never from it.
        vocab: One more than the tokenizer's highest id. Higher columns of a head mean nothing.
    """

    eos_ids: tuple[int, ...]
    pad_id: int
    vocab: int


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub name.

    Raises:
        ModelError: There is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except Exception as error:  # every tokenizer class raises what it likes
        raise ModelError(f"{path}: cannot load the tokenizer: {first_line(error)}") from error
    return tokenizer


def special_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None
) -> Specials:
    """The end ids of tokenizer and generation configuration, the pad id, the number of ids.

    Raises:
        ModelError: Neither names an end token.
    """
    ends = {tokenizer.eos_token_id}
    more = None if generation_config is None else generation_config.eos_token_id
    ends |= set(more) if isinstance(more, list | tuple) else {more}
    named = ends - {None}
    if odd := [i for i in named if isinstance(i, bool) or not isinstance(i, int)]:
        raise ModelError(
            f"generation_config.json of the student: eos_token_id must be a whole number or a "
            f"list of them, got {odd[0]!r}"
        )
    eos_ids = tuple(sorted(named))
    if not eos_ids:
        raise ModelError(
            f"{tokenizer.name_or_path}: neither the tokenizer nor generation_config.json names an "
            "end token (eos_token), so no answer would ever end"
        )
    pad = tokenizer.pad_token_id
    first = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else eos_ids[0]
    return Specials(eos_ids, first if pad is None else pad, number_of_ids(tokenizer))


def number_of_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """The columns that a head needs: one for each id up to the highest, gaps included."""
    return 1 + max(tokenizer.get_vocab().values())


def compare_tokenizers(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """Checks that both tokenizers have the same token at every id.

    Raises:
        ModelError: Names the first id at which they differ and both tokens.
    """
    mine = {i: token for token, i in student.get_vocab().items()}
    theirs = {i: token for token, i in teacher.get_vocab().items()}
    different = [i for i in mine.keys() | theirs.keys() if mine.get(i) != theirs.get(i)]
    if different:
        i = min(different)
        raise ModelError(
            f"the tokenizers of student ({student.name_or_path}) and teacher "
            f"({teacher.name_or_path}) differ at {len(different)} id(s), first at id {i}: "
            f"{_token(mine.get(i))} and {_token(theirs.get(i))}; distillation compares "
            "distributions over the same tokens"
        )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, config: Config) -> list[int]:
    """Token ids of a prompt, as the tokenizer itself makes them in one step.

    Chat messages go through the chat template with the generation prompt at the end; a string
    does so only when `data.chat_template` is set, and is encoded as it is otherwise.

    Raises:
        DataError: The template refuses the messages.
        ConfigError: Messages, and neither the tokenizer nor the configuration has a template.
    """
    template = config.data.chat_template
    if isinstance(prompt, str):
        if template is None:
            return _one_bos(tokenizer, list(tokenizer(prompt)["input_ids"]))
        prompt = [{"role": "user", "content": prompt}]
    source = _template_source(tokenizer, template)
    try:
        ids: Any = tokenizer.apply_chat_template(
            prompt,
            chat_template=source,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
    except Exception as error:  # jinja errors, and whatever a template raises
        raise DataError(f"the chat template refuses it: {first_line(error)}") from error
    return [int(i) for i in ids]


def teacher_prompt(
    tokenizer: PreTrainedTokenizerBase, example: Example, config: Config
) -> list[int]:
    """Token ids of the prompt that the teacher sees: the student's, or `prompt_template` filled in.

    With chat messages the template replaces the content of the last user message, and `{prompt}`
    is what that content was.

    Raises:
        DataError: The row lacks a field that the template names, or has no user message.
    """
    template = config.teacher.prompt_template
    if template is None:
        return encode_prompt(tokenizer, example.prompt, config)
    return encode_prompt(tokenizer, fill_template(template, example), config)


def fill_template(template: str, example: Example) -> Prompt:
    """A row's prompt with the teacher's template filled in (see `teacher_prompt`)."""
    prompt = example.prompt
    at = None
    if not isinstance(prompt, str):
        users = [i for i, message in enumerate(prompt) if message["role"] == "user"]
        if not users:
            raise DataError("teacher.prompt_template needs a user message, and there is none")
        at = users[-1]
    values = dict(example.fields)
    values["prompt"] = prompt if isinstance(prompt, str) else prompt[users[-1]]["content"]
    for name in template_fields(template):
        if not isinstance(values.get(name), str | int | float):
            problem = "is no text" if name in values else "is missing"
            raise DataError(f"the field {name!r} of teacher.prompt_template {problem}")
    text = template.format_map(values)
    if isinstance(prompt, str):
        return text
    return [{**m, "content": text} if i == at else m for i, m in enumerate(prompt)]


def encode_examples(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    config: Config,
    *,
    path: str,
    teacher: bool = True,
) -> tuple[list[Example], list[list[int]], list[list[int]] | None]:
    """Encodes every row at the start, so that none fails in the middle of a run.

    A prompt that is longer than `rollout.max_prompt_length`, that encodes to nothing or that the
    template cannot render is an error of its line: refused or left out as `data.on_error` says.

    Args:
        tokenizer: The student's.
        examples: From `load_examples`.
        config: The whole configuration.
        path: The file's name, for messages.
        teacher: Also encode the teacher's prompts.

    Returns:
        The rows that are used, indexed from 0 again; their ids; and the ids of the teacher's
        prompts, None when they are the student's.

    Raises:
        DataError: See above.
        ConfigError: No row has a field that `teacher.prompt_template` names.
    """
    own = teacher and config.teacher.prompt_template is not None
    if own:
        _check_template(examples, config)
    used: list[Example] = []
    ids: list[list[int]] = []
    teacher_ids: list[list[int]] = []
    broken: list[tuple[int, str]] = []
    limit = config.rollout.max_prompt_length
    for example in examples:
        try:
            row = encode_prompt(tokenizer, example.prompt, config)
            theirs = teacher_prompt(tokenizer, example, config) if own else row
        except DataError as error:
            broken.append((example.line, str(error)))
            continue
        if not row or not theirs:
            broken.append((example.line, "the prompt encodes to no token"))
        elif len(row) > limit:
            text = f"the prompt has {len(row)} tokens, rollout.max_prompt_length is {limit}"
            broken.append((example.line, text))
        else:
            used.append(dataclasses.replace(example, index=len(used)))
            ids.append(row)
            teacher_ids.append(theirs)
    report_broken(path, broken, len(used), config.data)
    return used, ids, teacher_ids if own else None


def first_line(error: BaseException) -> str:
    """What an exception of another library says, on one line."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def _check_template(examples: Sequence[Example], config: Config) -> None:
    names = template_fields(config.teacher.prompt_template or "")
    for name in names:
        if name != "prompt" and not any(name in example.fields for example in examples):
            have = sorted({key for example in examples[:100] for key in example.fields})
            raise ConfigError(
                f"teacher.prompt_template names {{{name}}}, which no row has; "
                f"the rows have {', '.join(have)}"
            )


def _one_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Drops the tokenizer's BOS where the text already starts with one."""
    bos = tokenizer.bos_token_id
    return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


def _template_source(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str | None:
    if template is not None and template != TOKENIZER_TEMPLATE:
        file = _template_file(template)
        return template if file is None else file
    if not tokenizer.chat_template:
        name = tokenizer.name_or_path
        if template == TOKENIZER_TEMPLATE:
            raise ConfigError(
                f"data.chat_template is `{TOKENIZER_TEMPLATE}`, but the tokenizer {name} has none: "
                "give a template there, or null to leave strings as they are"
            )
        raise ConfigError(
            f"the prompts are chat messages, but the tokenizer {name} has no chat template: "
            "set data.chat_template"
        )
    return None


def _template_file(template: str) -> str | None:
    if "{" in template or "\n" in template:
        return None
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template: {template!r} is no Jinja template, and no file that can be "
            f"read: {first_line(error)}"
        ) from None


def _token(token: str | None) -> str:
    return "no token" if token is None else repr(token)


__all__ = [
    "Prompt",
    "Specials",
    "compare_tokenizers",
    "encode_examples",
    "encode_prompt",
    "fill_template",
    "first_line",
    "load_tokenizer",
    "special_ids",
    "teacher_prompt",
]
