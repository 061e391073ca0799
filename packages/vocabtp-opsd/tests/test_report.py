import html.parser
import io
import math
import re

import pytest

from vocabtp.opsd.config import load_config
from vocabtp.opsd.metrics import MetricsWriter
from vocabtp.opsd.report import Sample, Summary, curves, environment, print_summary, write_report

SUMMARY = Summary(
    steps=120,
    skipped_steps=2,
    seconds=83.25,
    exact_match=(0.305, 0.9675),
    reverse_kl=(1.25, 0.0625),
    tokens_per_s=1234.4,
    peak_memory=[512 * 2**20, 640 * 2**20],
)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "student: {model_name_or_path: org/small}\nteacher: {model_name_or_path: org/large}\n"
        "data: {path: p.jsonl, prompt_field: '<script>'}\n"
    )
    return load_config(path)


class Page(html.parser.HTMLParser):
    """Tags, what they load, and the visible text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads, self.text, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [
            value
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "data", "srcset") and not value.startswith("#")
        ]

    def handle_data(self, data):
        self.text.append(data)


def test_report_shows_everything_and_loads_nothing(tmp_path, config):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"exact_match": 0.3}, kind="eval")
        for step in range(1, 4):
            writer.write(step, {"loss": 1.0 / step, "grad_norm": math.nan, "other": 3.0})
    samples = [Sample(prompt="1+2=", before="<b>4</b>", after="3", answer="3")]
    path = write_report(tmp_path, config=config, summary=SUMMARY, samples=samples)
    assert path == tmp_path / "report.html"
    source = path.read_text("utf-8")
    page = Page(source)
    assert page.loads == []
    assert not {"script", "link", "iframe", "img", "b"} & set(page.tags)
    assert not re.search(r"@import|url\((?!#)", source)
    text = " ".join(page.text)
    for part in (
        "small learns from large",
        "30.5%",
        "96.8%",
        "1.2500",
        "0.0625",
        "512, 640",
        "120 (2)",
        "1+2=",
        "<b>4</b>",
        "prompt_field: <script>",
        "torch",
        "exact match",
    ):
        assert part in text, part
    # a chart each for loss and exact match; none for what is never finite or not known
    assert page.tags.count("svg") == 2
    assert list(tmp_path.glob("*.tmp")) == []


def test_report_without_metrics_or_evaluation(tmp_path, config):
    empty = Summary(
        steps=0,
        skipped_steps=0,
        seconds=0.0,
        exact_match=(None, None),
        reverse_kl=(None, 0.5),
        tokens_per_s=0.0,
        peak_memory=[],
    )
    page = Page(write_report(tmp_path, config=config, summary=empty).read_text("utf-8"))
    assert "svg" not in page.tags
    assert ("reverse KL to the teacher", "-", "0.5000") in empty.rows()


def test_equal_records_give_equal_charts():
    records = [{"step": s, "kind": "train", "loss": s / 7} for s in range(1, 5)]
    first, second = curves(records), curves(records)
    assert first == second
    assert [label for label, _ in first] == ["loss"]
    assert curves([*records, {"step": 5, "kind": "train", "loss": 9.0}]) != first


def test_table_names_before_after_and_the_report(tmp_path):
    stream = io.StringIO()
    path = tmp_path / ("long" * 40) / "report.html"
    print_summary(SUMMARY, path, stream)
    rows = [" ".join(re.split(r"[│┃]\s*", line)) for line in stream.getvalue().splitlines()]
    assert any(re.search(r"exact match, held out\s+30\.5%\s+96\.8%", row) for row in rows)
    assert any(re.search(r"reverse KL to the teacher\s+1\.2500\s+0\.0625", row) for row in rows)
    assert any(re.search(r"tokens/s\s+1,234", row) for row in rows)
    assert stream.getvalue().splitlines()[-1] == f"report: {path}"


def test_environment_names_versions():
    import torch

    facts = environment()
    assert facts["torch"] == torch.__version__
    for layer in ("kernels", "dist", "cache", "opsd"):
        assert facts[f"vocabtp-{layer}"].count(".") == 2
    assert facts["deepspeed"]
    assert facts["accelerators"]
