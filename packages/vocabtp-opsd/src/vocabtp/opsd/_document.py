"""A YAML or JSON file as plain values, with the line of every key and no key set twice."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vocabtp.opsd._wording import shown
from vocabtp.opsd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Document:
    """What a configuration file says, and where."""

    values: dict[str, Any]
    lines: dict[str, int]  # dotted key -> physical line, from 1


def read_document(path: Path) -> Document:
    """Reads a configuration file.

    JSON (`.json`) is parsed as JSON; everything else as YAML 1.1. Only the outer two levels of
    mappings are given lines, which is as deep as a configuration goes.

    Raises:
        ConfigError: The file is missing, unreadable, broken, or sets a key twice.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"{path}: cannot read the configuration: {reason}") from None
    is_json = path.suffix.lower() == ".json"
    values = _json_values(path, text) if is_json else None
    # raw tabs are legal between JSON's tokens and nowhere else in it, but never in YAML
    node, lines = _compose(path, text.replace("\t", " ") if is_json else text)
    if values is None and node is not None:
        values = _construct(path, text)
    if values is None:
        raise ConfigError(f"{path}: the configuration is empty")
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: a configuration is a mapping of sections (student, teacher, ...), "
            f"got a {type(values).__name__}"
        )
    return Document(values, lines)


def _compose(path: Path, text: str) -> tuple[yaml.Node | None, dict[str, int]]:
    with _yaml_errors(path):
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return node, _key_lines(path, node)


def _construct(path: Path, text: str) -> Any:
    with _yaml_errors(path):
        return yaml_value(text)


def yaml_value(text: str) -> Any:
    """What a YAML text says.

    Raises:
        yaml.YAMLError: It is no YAML, or says a value that there is not, such as a 13th month.
        RecursionError: It is nested too deeply.
    """
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    """Gives the place of scalars that look like a date or a number and are none."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """The value of a node."""
        try:
            return super().construct_object(node, deep)
        # the library lets through whatever int(), a lookup or a match that failed raised
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = node.tag.rpartition(":")[2]
            value = node.value if isinstance(node, yaml.ScalarNode) else "what is there"
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown(value)} is no {kind}; quote a text", node.start_mark
            ) from error


@contextlib.contextmanager
def _yaml_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None


def _json_values(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except ValueError:  # Python's own limit on the digits of a whole number
        raise ConfigError(f"{path}: not valid JSON: a number with too many digits") from None


def _key_lines(path: Path, root: yaml.Node | None) -> dict[str, int]:
    lines: dict[str, int] = {}
    todo = [("", root)]
    while todo:
        prefix, node = todo.pop()
        if not isinstance(node, yaml.MappingNode):
            continue
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:str" and key.value != "<<":
                got = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise ConfigError(f"{path}:{key.start_mark.line + 1}: a key must be a name: {got}")
            name, line = f"{prefix}{key.value}", key.start_mark.line + 1
            if name in lines:
                raise ConfigError(
                    f"{path}:{line}: {name} is set twice, first on line {lines[name]}"
                )
            lines[name] = line
            # deeper mappings are of the wrong type anyway, and an alias may point to its parent
            if not prefix:
                todo.append((f"{name}.", value))
    return lines
