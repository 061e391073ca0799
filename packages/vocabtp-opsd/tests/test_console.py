import io
import sys

import pytest

from vocabtp.opsd._console import complain, say
from vocabtp.opsd.metrics import Progress


class Pieces(io.StringIO):
    """A stream that keeps what each write hands over, as an unbuffered one passes it on."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


@pytest.mark.parametrize(("outlet", "name"), [(say, "stdout"), (complain, "stderr")])
def test_lines_of_ranks_that_share_a_pipe_stay_whole(monkeypatch, outlet, name):
    stream = Pieces()
    monkeypatch.setattr(sys, name, stream)
    outlet("two\nlines")
    assert stream.pieces == ["two\nlines\n"]


def test_lines_of_the_progress_stay_whole():
    stream = Pieces()
    with Progress(1, every=1, stream=stream) as progress:
        progress.update(1, loss=1.0, tokens_per_s=1.0)
        progress.log("saved")
    assert len(stream.pieces) == 2
    assert all(piece.endswith("\n") for piece in stream.pieces)
