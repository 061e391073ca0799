import subprocess
import sys

import pytest

import vocabtp.opsd

# refuses every connection and name look-up before the import
PROBE = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("the network was touched")
socket.socket.connect = socket.getaddrinfo = refuse
import vocabtp.opsd, vocabtp.opsd.cli, vocabtp.opsd.data
vocabtp.opsd.load_config, vocabtp.opsd.ConfigError
heavy = {"torch", "transformers", "tokenizers", "matplotlib", "tensorboard"} & set(sys.modules)
assert not heavy, heavy
"""


def test_import_is_light_and_offline():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_resolve():
    for name in set(vocabtp.opsd.__all__) - {"__version__"}:
        assert getattr(vocabtp.opsd, name).__name__ == name
    assert set(vocabtp.opsd.__all__) <= set(dir(vocabtp.opsd))
    assert issubclass(vocabtp.opsd.ConfigError, vocabtp.opsd.UserError)
    assert issubclass(vocabtp.opsd.ConfigError, ValueError)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Trainner'"):
        _ = vocabtp.opsd.Trainner
