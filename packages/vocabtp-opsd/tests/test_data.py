import json
import logging
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vocabtp.opsd.config import DataConfig
from vocabtp.opsd.data import answer_of, batch_indices, load_examples, total_steps
from vocabtp.opsd.errors import DataError

REFUSE = DataConfig(path="unused")
SKIP = DataConfig(path="unused", on_error="skip")


@pytest.fixture
def write(tmp_path):
    def call(data):
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(data)
        return path

    return call


def refusal(path, config=REFUSE, **options):
    with pytest.raises(DataError) as caught:
        load_examples(path, config, **options)
    return str(caught.value)


def test_byte_order_mark_blank_lines_and_carriage_returns(write):
    """B52"""
    path = write(
        b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \n{"prompt": "b \xc3\xa9"}\n{"prompt": "c"}'
    )
    rows = load_examples(path, REFUSE)
    assert [(r.index, r.line, r.prompt) for r in rows] == [(0, 1, "a"), (1, 4, "b é"), (2, 5, "c")]


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf", b"\r\n  \n\t\n"])
@pytest.mark.parametrize("config", [REFUSE, SKIP])
def test_file_without_rows_is_an_error(write, data, config):
    assert "holds no prompt" in refusal(write(data), config)


def test_missing_file_and_directory(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.jsonl")
    assert "Is a directory" in refusal(tmp_path)


B54 = [
    b'{"prompt": "ok"}',
    b'{"Prompt": "x"}',
    b'{"prompt": null}',
    b'{"prompt": ""}',
    b'["prompt"]',
    b'{"prompt": "y"',
]


def test_every_broken_line_is_named_with_its_reason(write):
    """B54"""
    path = write(b"\n".join(B54))
    head, *lines = refusal(path).split("\n")
    assert head.startswith(f"{path}: 5 of 6 rows cannot be used (data.on_error: skip")
    for number, (line, reason) in enumerate(
        zip(
            lines,
            ["no field 'prompt'", "is null", "is empty", "object, got a list", "not valid JSON"],
            strict=True,
        ),
        start=2,
    ):
        assert line.startswith(f"  {path}:{number}: ")
        assert reason in line


def test_skip_leaves_lines_out_with_a_count(write, caplog):
    path = write(b"\n".join(B54) + b'\n{"prompt": "last"}\n')
    with caplog.at_level(logging.WARNING, logger="vocabtp.opsd"):
        rows = load_examples(path, SKIP)
    assert [(r.index, r.line, r.prompt) for r in rows] == [(0, 1, "ok"), (1, 7, "last")]
    assert "left out 5 of 7 rows" in caplog.text
    assert f"{path}:4: " in caplog.text


def test_skip_of_every_line_is_an_error(write):
    assert "2 of 2 rows cannot be used:" in refusal(write(b"{}\n[]\n"), SKIP)


def test_only_the_first_lines_are_listed(write):
    text = refusal(write(b"{}\n" * 12))
    assert text.count("\n") == 6
    assert text.endswith("and 7 more")


SECRET = "hunter2 " * 20


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "\\ud800"}', "lone surrogate"),  # D9
        (b'{"prompt": "a", "solution": {"x": ["\\udfff"]}}', "lone surrogate"),
        (b'{"prompt": "a", "\\ud83d": 1}', "lone surrogate"),
        (b'{"prompt": "\xed\xa0\x80"}', "invalid UTF-8 at byte 13"),
        (b'{"prompt": "caf\xe9"}', "invalid UTF-8 at byte 16"),
        (b'{"prompt": "a", "prompt": "b"}', "the field 'prompt' is there twice"),
        (b'{"prompt": "a", "x": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", "too many digits"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "a"} {"prompt": "b"}', "not valid JSON at column 17"),
        (b'{"prompt": 3}', "must be a string or chat messages, got a number"),
        (b'{"prompt": true}', "got a boolean"),
        (b'{"prompt": {"a": 1}}', "got an object"),
        (b'{"prompt": "  \\n"}', "is empty"),
        (b'"prompt"', "a row is a JSON object, got a string"),
        (b"null", "a row is a JSON object, got null"),
        (b'{"prompt": []}', "is an empty list"),
        (b'{"prompt": ["a"]}', "message 1 of 'prompt' needs the keys role and content"),
        (b'{"prompt": [{"role": "user"}]}', "needs the keys role and content"),
        (b'{"prompt": [{"role": "user", "content": 3}]}', "'content' must be a string, got a num"),
        (b'{"prompt": [{"role": "assistant", "content": "x"}]}', "is the assistant's"),
    ],
)
def test_broken_line_reason(write, line, reason):
    good = json.dumps({"prompt": SECRET}).encode()
    text = refusal(write(good + b"\r\n\r\n" + line + b"\n"))
    assert ":3: " in text
    assert reason in text
    assert len(text.split("\n")[1]) < 250


def test_the_row_itself_is_never_shown(write):
    rows = [
        {"Prompt": SECRET},
        {"prompt": [{"role": "user", "content": SECRET, "x": 1}]},
        {SECRET: 1},
        {"prompt": 1, "other": SECRET},
    ]
    data = "\n".join(json.dumps(row) for row in rows) + '\n{"prompt": "' + SECRET
    assert SECRET[:60] not in refusal(write(data.encode()))


def test_escaped_pair_and_line_separators_are_text(write):
    path = write('{"prompt": "\\ud83d\\ude00 a\u2028b\u0085c"}'.encode())
    assert load_examples(path, REFUSE)[0].prompt == "\U0001f600 a\u2028b\u0085c"


def test_messages_and_other_fields_are_kept(write):
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    row = {"question": messages, "solution": "s", "level": 3}
    config = DataConfig(path="unused", prompt_field="question")
    (example,) = load_examples(write(json.dumps(row).encode()), config)
    assert example.prompt == messages
    assert example.fields == row


def test_answers_are_needed_only_for_evaluation(write):
    path = write(b'{"prompt": "a", "answer": " 7 "}\n{"prompt": "b", "answer": 12}\n')
    rows = load_examples(path, REFUSE, need_answer=True)
    assert [answer_of(row, REFUSE) for row in rows] == ["7", "12"]
    bad = write(
        b'{"prompt": "a"}\n{"prompt": "a", "answer": ""}\n{"prompt": "a", "answer": false}\n'
        b'{"prompt": "a", "answer": 1.5}\n'
    )
    assert len(load_examples(bad, REFUSE)) == 4
    text = refusal(bad, need_answer=True)
    assert [f"prompts.jsonl:{n}: " in text for n in (1, 2, 3, 4)] == [True] * 4


@given(
    n=st.integers(1, 30),
    batch=st.integers(1, 70),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
)
def test_each_epoch_takes_each_prompt_once(n, batch, epochs, seed, shuffle):
    steps = total_steps(n, batch, epochs, -1)
    batches = [batch_indices(s, batch, n, seed, shuffle, epochs=epochs) for s in range(steps)]
    assert [len(b) for b in batches[:-1]] == [batch] * (steps - 1)
    assert len(batches[-1]) >= 1
    assert batch_indices(steps, batch, n, seed, shuffle, epochs=epochs) == []
    stream = [i for b in batches for i in b]
    for epoch in range(epochs):
        assert Counter(stream[epoch * n : (epoch + 1) * n]) == Counter(range(n))
    if not shuffle:
        assert stream == list(range(n)) * epochs


def test_order_is_a_function_of_seed_and_epoch():
    first = batch_indices(0, 50, 50, 1, True)
    assert first == batch_indices(0, 50, 50, 1, True)
    assert first != batch_indices(1, 50, 50, 1, True)
    assert first != batch_indices(0, 50, 50, 2, True)
    assert first != list(range(50))
    # pinned: another order would change what a resumed run sees
    assert batch_indices(0, 4, 10, 1, True) + batch_indices(1, 4, 10, 1, True) == PINNED


PINNED = [3, 5, 2, 9, 7, 0, 8, 6]


def test_max_steps_outlasts_the_epochs():
    assert total_steps(10, 4, 1, 100) == 100
    assert total_steps(10, 4, 1, -1) == 3
    assert len(batch_indices(99, 4, 10, 1, True)) == 4
