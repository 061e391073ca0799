"""A run's configuration in a file, and what is said of one that is refused."""

import pytest

from vocabtp.opsd.config import load_config
from vocabtp.opsd.errors import ConfigError

BASE = """\
student:
  model_name_or_path: org/student
teacher:
  model_name_or_path: org/teacher
data:
  path: prompts.jsonl
"""


def refusal(path, overrides=()):
    """Why the file is refused, in one line."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text
