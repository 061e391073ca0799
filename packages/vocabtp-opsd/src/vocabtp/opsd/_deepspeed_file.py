"""A DeepSpeed configuration as a file or a mapping says it, with the place of every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vocabtp.opsd._deepspeed_booleans import plain_switches
from vocabtp.opsd._deepspeed_keys import problems
from vocabtp.opsd._document import read_document
from vocabtp.opsd._wording import shown
from vocabtp.opsd.errors import ConfigError


class Reading:
    """A DeepSpeed configuration with the place of its keys."""

    def __init__(self, values: dict[str, Any], prefix: str, where: dict[str, str]) -> None:
        self.prefix = prefix  # of the keys in `where` and in messages
        self.where = where
        self.auto: set[str] = set()
        try:
            self.values = self._without_auto(values, "")
        except RecursionError:  # an alias of YAML to its own parent
            raise ConfigError(f"{where['']}: deepspeed_config is nested too deeply") from None

    def _without_auto(self, values: dict[str, Any], above: str) -> dict[str, Any]:
        """What is `auto` is left to our keys, and to DeepSpeed's default where we have none."""
        out: dict[str, Any] = {}
        for given, value in values.items():
            key = str(given)  # YAML has other keys too
            name = f"{above}{key}"
            if value == "auto" and key != "keep_in_fp32_modules":
                self.auto.add(name)
            elif value is not None:
                inner = isinstance(value, dict)
                out[key] = self._without_auto(value, f"{name}.") if inner else value
        return out

    def place(self, key: str) -> str:
        """File and line, or the override, of a dotted key or of the section that it is in."""
        parts = f"{self.prefix}{key}".split(".")
        names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((self.where[name] for name in names if name in self.where), self.where[""])

    def error(self, key: str, text: str) -> ConfigError:
        """One line that names the key."""
        return ConfigError(f"{self.place(key)}: {self.prefix}{key} {text}")


def read_deepspeed(values: dict[str, Any], where: dict[str, str]) -> Reading | None:
    """The DeepSpeed configuration that `deepspeed_config` names or holds, its keys checked.

    Raises:
        ConfigError: There is no such file, or a key in it that cannot be used.
    """
    given = values.get("deepspeed_config")
    if given is None:
        return None
    place = where["deepspeed_config"]
    if given == "":
        raise ConfigError(f"{place}: deepspeed_config must not be empty, got ''")
    if isinstance(given, dict):
        reading = Reading(given, "deepspeed_config.", {**where, "": place})
    elif isinstance(given, str):
        path = Path(given)
        if not path.is_file():
            raise ConfigError(
                f"{place}: deepspeed_config: no file {shown(given)}, neither beside the "
                "configuration nor in the working directory"
            )
        document = read_document(path)
        lines = {key: f"{path}:{line}" for key, line in document.lines.items()}
        reading = Reading(document.values, "", {**lines, "": str(path)})
    else:
        raise ConfigError(
            f"{place}: deepspeed_config must be a DeepSpeed JSON file or its content, "
            f"got {shown(given)}"
        )
    if "bfloat16" in reading.values:  # an older name
        reading.values.setdefault("bf16", reading.values.pop("bfloat16"))
    plain_switches(reading.values)
    for key, text in problems(reading.values):
        raise reading.error(key, text)
    return reading
