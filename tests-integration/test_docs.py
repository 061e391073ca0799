"""The documentation says what the code does: its Python runs, its keys and commands exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import yaml

from vocabtp.opsd.config import reference

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in ("README.md", "packages/*/README.md", "docs/**/*.md", "examples/**/README.md")
    for page in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```(?P<info>[^\n`]+)\n(?P<code>.*?)^```$", re.M | re.S)
TITLE = re.compile(r'title="([\w.]+\.py)"')


class Block(NamedTuple):
    """A fenced block, and where its first line is."""

    page: Path
    line: int
    info: str
    code: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    """The blocks of one language on all pages, in order."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match["info"].split()[0] == language:
                line = text.count("\n", 0, match.start("code")) + 1
                found.append(Block(page, line, match["info"], match["code"]))
    return found


PYTHON = blocks("python")
SCRIPTS = [block for block in PYTHON if TITLE.search(block.info)]
INLINE = sorted({block.page for block in PYTHON if block not in SCRIPTS})


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_pages_are_found():
    assert {"docs/index.md", "docs/semantics.md", "docs/api/cache.md"} <= set(map(name, PAGES))
    assert len(INLINE) >= 4
    assert SCRIPTS


@pytest.mark.parametrize("page", INLINE, ids=name)
def test_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    scope: dict[str, object] = {"__name__": "__page__"}
    for block in PYTHON:
        if block.page == page and block not in SCRIPTS:
            # a failure then shows the page's own line
            padded = "\n" * (block.line - 1) + block.code
            exec(compile(padded, str(page), "exec"), scope)


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: block.place)
def test_a_script_runs_on_two_ranks(block, tmp_path):
    script = tmp_path / TITLE.search(block.info)[1]
    script.write_text(block.code, encoding="utf-8")
    # gloo's threads now and then abort a process that shuts its interpreter down after all its work
    runner = tmp_path / "runner.py"
    # and neither torch nor the layers that these scripts are for bring numpy
    runner.write_text(
        "import os, runpy, sys\nsys.modules['numpy'] = None\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\nos._exit(0)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", str(runner)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.place)
def test_configurations_use_keys_that_exist(block):
    known = {f"{row.section}.{row.key}".lstrip(".") for row in reference()}
    for section, values in yaml.safe_load(block.code).items():
        inside = isinstance(values, dict) and section not in known
        keys = {f"{section}.{key}" for key in values} if inside else {section}
        assert keys <= known, f"{block.place}: {sorted(keys - known)}"


def test_keys_in_the_text_exist():
    sections = {row.section for row in reference() if row.section}
    known = {f"{row.section}.{row.key}" for row in reference()}
    word = re.compile(rf"\b({'|'.join(sections)})\.([a-z_]+)(?=[=:`\s])")
    for page in PAGES:
        # in Python, student.shape is no key
        text = re.sub(
            r"^```python.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S
        )
        # the one that a shown error message is about
        wrong = {m[0] for m in word.finditer(text)} - known - {"training.learnign_rate"}
        assert not wrong, f"{name(page)} names keys that do not exist: {sorted(wrong)}"


def test_source_files_in_the_text_exist():
    named = re.findall(r"`vocabtp/(\w+)/([\w/]+\.py)`", (ROOT / "docs/walk.md").read_text())
    assert len(named) >= 5
    for layer, file in named:
        assert (ROOT / f"packages/vocabtp-{layer}/src/vocabtp/{layer}" / file).is_file(), file


def configuration_script() -> ModuleType:
    file = ROOT / "docs/scripts/configuration.py"
    spec = importlib.util.spec_from_file_location("docs_configuration", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_page_is_current():
    script = configuration_script()
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), (
        "run: python docs/scripts/configuration.py"
    )
