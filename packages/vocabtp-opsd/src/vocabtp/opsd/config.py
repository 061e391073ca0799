"""The configuration of a run: one YAML or JSON file, and `section.key=value` overrides.

Batch arithmetic: `train_batch_size` counts prompts per optimizer step over all data-parallel
ranks, so that

    train_batch_size * n_samples_per_prompt
        = micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel ranks.

Paths: `data.path`, `data.eval_path`, `data.chat_template` and the models' directories are looked
for beside the file, then in the working directory; in an override the other way round. What
neither holds is taken as it is (a hub name, a template's text). `training.save_dir` is relative
to the working directory.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError

from vocabtp.opsd._application import is_application, read_application
from vocabtp.opsd._deepspeed_config import read_deepspeed, resolved, take_over, unresolved
from vocabtp.opsd._document import Document, read_document, yaml_value
from vocabtp.opsd._fields import RuleError
from vocabtp.opsd._keys import KeyReference, nearest, reference, sections
from vocabtp.opsd._notices import notices_of
from vocabtp.opsd._parallel import ParallelConfig
from vocabtp.opsd._schema import (
    TOKENIZER_TEMPLATE,
    DataConfig,
    DistillationConfig,
    RolloutConfig,
    Sections,
    StudentConfig,
    TeacherConfig,
)
from vocabtp.opsd._templates import template_fields
from vocabtp.opsd._training import TrainingConfig
from vocabtp.opsd._wording import shown, value_problem
from vocabtp.opsd.errors import ConfigError

__all__ = [
    "TOKENIZER_TEMPLATE",
    "Config",
    "DataConfig",
    "DistillationConfig",
    "KeyReference",
    "ParallelConfig",
    "RolloutConfig",
    "StudentConfig",
    "TeacherConfig",
    "TrainingConfig",
    "load_config",
    "reference",
    "template_fields",
]

_log = logging.getLogger("vocabtp.opsd")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MODELS = ("student.model_name_or_path", "teacher.model_name_or_path")
_FILES = ("data.path", "data.eval_path", "data.chat_template", "deepspeed_config")


class Config(Sections):
    """A checked configuration; frozen."""

    def for_world(self, world_size: int) -> Self:
        """The same configuration with its three batch sizes filled in.

        Args:
            world_size: Ranks of the run, tensor-parallel peers included.

        Raises:
            ConfigError: `tp` does not divide the ranks, or the batch sizes contradict each other.
        """
        tp, samples = self.parallel.tp, self.rollout.n_samples_per_prompt
        if world_size % tp:
            raise ConfigError(
                f"parallel.tp is {tp}, but the run has {world_size} rank(s): set parallel.nproc "
                f"or start torchrun with a multiple of {tp}"
            )
        dp = world_size // tp
        t = self.training
        train, micro, steps = _batch_sizes(
            t.train_batch_size,
            t.micro_batch_size_per_gpu,
            t.gradient_accumulation_steps,
            samples,
            dp,
        )
        if train * samples != micro * steps * dp:
            raise ConfigError(
                f"training: train_batch_size {train} x n_samples_per_prompt {samples} is "
                f"{train * samples} sequences a step, but micro_batch_size_per_gpu {micro} x "
                f"gradient_accumulation_steps {steps} x {dp} data-parallel rank(s) is "
                f"{micro * steps * dp}"
            )
        sizes = {
            "train_batch_size": train,
            "micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
        }
        filled = self.model_copy(update={"training": t.model_copy(update=sizes)})
        return filled.model_copy(update={"deepspeed_config": filled._with_ours()})

    def flat(self) -> dict[str, Any]:
        """Every key by its full name, with its value.

        `deepspeed_config` is without the values that other keys have already.
        """
        out: dict[str, Any] = {}
        for name, value in self._without_ours().items():
            if name in sections():
                out.update({f"{name}.{key}": v for key, v in value.items()})
            else:
                out[name] = value
        return out

    def dump(self) -> str:
        """The configuration as YAML that `load_config` reads back to an equal one."""
        text = yaml.safe_dump(self._without_ours(), sort_keys=False, allow_unicode=True)
        return str(text)

    def _with_ours(self) -> dict[str, Any] | None:
        """DeepSpeed's configuration with the values of our keys."""
        own = self.deepspeed_config
        return None if own is None else resolved(own, self)

    def _without_ours(self) -> dict[str, Any]:
        """All keys, each value under one of them."""
        values = self.model_dump(mode="json")
        if self.deepspeed_config is not None:
            values["deepspeed_config"] = unresolved(self.deepspeed_config, self)
        return values


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), *, teacher: bool = True
) -> Config:
    """Reads and checks a configuration; loads no model and touches no network.

    Args:
        path: YAML or JSON file.
        overrides: `section.key=value` each; the value is read as YAML. A later one wins.
        teacher: Whether the teacher's directory has to be there; rollout and export do without.

    Raises:
        ConfigError: One line that names the file and line (or the override), the key, what came
            and what is allowed.
    """
    file = Path(path)
    document = read_document(file)
    values = _merge_sections(file, document)
    where = {key: f"{file}:{line}" for key, line in document.lines.items()}
    base = {key: [file.parent, Path()] for key in (*_MODELS, *_FILES)}
    for override in overrides:
        key, value = _parse_override(override)
        section, _, name = key.rpartition(".")
        target = values.setdefault(section, {}) if section else values
        target[name] = value
        where[key] = f"override {override!r}"
        if key in base:  # what is typed is meant from here
            base[key] = [Path(), file.parent]
    if is_application(values):  # it is started in the folder above that of its configurations
        base = {key: [*folders, file.parent.parent] for key, folders in base.items()}
    notices = read_application(values, where)
    _refuse_unknown(values, where, str(file))
    _refuse_no_text(values, where)
    _resolve_paths(values, where, base, _MODELS if teacher else _MODELS[:1])
    if (reading := read_deepspeed(values, where)) is not None:
        notices += take_over(reading, values, where)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_first_problem(error, where, str(file))) from None
    for line in (*notices, *notices_of(config)):
        _log.warning(line)
    return config.model_copy(update={"deepspeed_config": config._with_ours()})


def _merge_sections(file: Path, document: Document) -> dict[str, Any]:
    """The file's values with `section:` and nothing under it read as an empty section."""
    values: dict[str, Any] = {}
    for name, value in document.values.items():
        if name in sections():
            if value is not None and not isinstance(value, dict):
                raise ConfigError(
                    f"{file}:{document.lines.get(name, 1)}: {name} is a section with keys of its "
                    f"own, got {value!r}"
                )
            value = dict(value or {})
        values[name] = value
    return values


def _parse_override(override: str) -> tuple[str, Any]:
    key, sign, text = override.partition("=")
    key = key.strip()
    if not sign or not key:
        raise ConfigError(f"override {override!r}: write it as section.key=value")
    parts = key.split(".")
    if key in sections() or len(parts) > 2 or not all(parts):
        raise ConfigError(f"override {override!r}: {key} names no key; write section.key=value")
    if len(parts) == 2 and parts[0] not in sections():
        raise ConfigError(f"override {override!r}: unknown key {key}: {nearest(key)}")
    try:
        return key, yaml_value(text)
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"override {override!r}: the value is not valid YAML; quote it") from None


def _refuse_unknown(values: dict[str, Any], where: dict[str, str], file: str) -> None:
    known = sections()
    unknown = [name for name in values if name not in Sections.model_fields]
    for name in known:
        fields = known[name].model_fields
        unknown += [f"{name}.{key}" for key in values.get(name, {}) if key not in fields]
    if unknown:
        unknown.sort(key=lambda key: _line(where.get(key, "")))
        key = unknown[0]
        more = f" (and {len(unknown) - 1} more unknown keys)" if len(unknown) > 1 else ""
        raise ConfigError(f"{where.get(key, file)}: unknown key {key}: {nearest(key)}{more}")


def _refuse_no_text(values: dict[str, Any], where: dict[str, str]) -> None:
    """No NUL and no half of a surrogate pair: neither fits into a file's name or a UTF-8 file."""
    for name, section in values.items():
        pairs = section.items() if isinstance(section, dict) else [(None, section)]
        for sub, value in pairs:
            if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
                key = name if sub is None else f"{name}.{sub}"
                raise ConfigError(
                    f"{where.get(key, name)}: {key} must be a text without NUL characters and "
                    f"lone surrogates, got {shown(value)}"
                )


def _line(place: str) -> int:
    tail = place.rpartition(":")[2]
    return int(tail) if tail.isdigit() else 0


def _resolve_paths(
    values: dict[str, Any],
    where: dict[str, str],
    base: dict[str, list[Path]],
    needed: Sequence[str],
) -> None:
    for key, folders in base.items():
        section, _, name = key.rpartition(".")
        target = values.get(section, {}) if section else values
        value = target.get(name)
        if not isinstance(value, str) or not value or "\n" in value:
            continue
        found = [f / Path(value).expanduser() for f in folders]
        existing = [p for p in found if _exists(p)]
        if existing:
            target[name] = os.path.abspath(existing[0])
        elif key in needed and not _HUB_NAME.fullmatch(value):
            raise ConfigError(
                f"{where[key]}: {key}: no directory {value!r}, and no hub name (owner/name) either"
            )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a template's text can be longer than any file name
        return False


def _first_problem(error: ValidationError, where: dict[str, str], file: str) -> str:
    problems = []
    for item in error.errors():
        rule = item.get("ctx", {}).get("error")
        if isinstance(rule, RuleError):
            key, text = rule.key, rule.text
        else:
            key = ".".join(str(part) for part in item["loc"][:2])
            text = value_problem(key, item)
        place = where.get(key) or where.get(key.partition(".")[0]) or file
        problems.append((_line(place), f"{place}: {key} {text}"))
    problems.sort(key=lambda pair: pair[0])
    more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
    return problems[0][1] + more


def _batch_sizes(
    train: int | None, micro: int | None, steps: int | None, samples: int, dp: int
) -> tuple[int, int, int]:
    """Fills in what was left out; the caller checks the product."""
    if train is None and (micro is not None or steps is not None):
        micro, steps = micro or 1, steps or 1
        return max(1, micro * steps * dp // samples), micro, steps
    train = 8 if train is None else train
    if micro is None:
        micro = 1 if steps is None else max(1, train * samples // (steps * dp))
    if steps is None:
        steps = max(1, train * samples // (micro * dp))
    return train, micro, steps
