"""The nets that keep the layers apart: green on this tree, and red when a layer is broken."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LAYERS = ["kernels", "dist", "cache", "opsd"]  # lowest first
LINT_IMPORTS = "from importlinter.cli import lint_imports_command as c; c()"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """import-linter with the root pyproject's contracts, over the sources under `root`."""
    path = os.pathsep.join(str(root / f"packages/vocabtp-{n}/src") for n in LAYERS)
    return subprocess.run(
        [sys.executable, "-c", LINT_IMPORTS, "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def ruff_banned(root: Path) -> subprocess.CompletedProcess[str]:
    """ruff's banned imports over the packages under `root`."""
    run = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=TID251", "packages"]
    return subprocess.run(run, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture
def tree(tmp_path):
    """A copy of the packages and of the tools' settings, to break."""
    ignored = shutil.ignore_patterns("__pycache__", "tests", ".*_cache")
    shutil.copytree(ROOT / "packages", tmp_path / "packages", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def plant(tree: Path, layer: str, code: str) -> None:
    module = tree / f"packages/vocabtp-{layer}/src/vocabtp/{layer}/planted.py"
    module.write_text(f"{code}\n")


def test_this_tree_keeps_every_contract():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout
    assert re.search(r"[1-9]\d* kept, 0 broken", done.stdout)
    assert (done := ruff_banned(ROOT)).returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("layer", "code"),
    [
        ("kernels", "import vocabtp.dist"),
        ("kernels", "from vocabtp.opsd import __version__"),
        ("dist", "def f():\n    from vocabtp import cache\n    return cache"),
        ("cache", "from vocabtp.opsd._version import __version__"),
        ("kernels", "import transformers"),
        ("dist", "from transformers.utils import logging"),
        ("cache", "def f():\n    import deepspeed\n    return deepspeed"),
        ("dist", "from vocabtp.kernels import _eager"),
        ("opsd", "import vocabtp.kernels._autograd"),
    ],
)
def test_import_linter_is_red_on_an_import_that_breaks_a_contract(tree, layer, code):
    plant(tree, layer, code)
    done = lint_imports(tree)
    assert done.returncode == 1, done.stdout
    assert f"vocabtp.{layer}.planted" in done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_gather",
        "import torch\n\n\ndef f(x):\n    torch.distributed.all_reduce(x)",
        "def f():\n    from torch.distributed.device_mesh import DeviceMesh\n    return DeviceMesh",
    ],
)
def test_ruff_is_red_on_torch_distributed_in_kernels(tree, code):
    plant(tree, "kernels", code)
    done = ruff_banned(tree)
    assert done.returncode == 1
    assert "planted.py" in done.stdout
    assert "belongs to vocabtp.dist" in done.stdout


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import torch\n\n\ndef f():\n    torch.cuda.synchronize()", "torch.accelerator"),
        ("from torch import cuda", "torch.accelerator"),
        ("from torch.cuda import Stream", "torch.accelerator"),
        ("import torch.xpu", "torch.accelerator"),
        ("import torch.distributed", "belongs to vocabtp.dist"),
    ],
)
def test_ruff_is_red_on_one_device_and_on_communication_in_cache(tree, code, why):
    plant(tree, "cache", code)
    done = ruff_banned(tree)
    assert done.returncode == 1
    assert "planted.py" in done.stdout
    assert why in done.stdout


@pytest.mark.parametrize("layer", LAYERS)
def test_ruff_reads_every_layer(tree, layer):
    """Its default excludes hold the name "dist"."""
    plant(tree, layer, "import os")
    run = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=F401", "."]
    done = subprocess.run(run, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"vocabtp/{layer}/planted.py" in done.stdout


def distributed_uses(packages: Path) -> list[str]:
    """Run-time uses of torch.distributed below opsd, collectives.py aside."""
    found = []
    for file in sorted(packages.glob("*/src/vocabtp/**/*.py")):
        if "opsd" in file.parts or file.name == "collectives.py":
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        guarded = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            for statement in node.body
            for inner in ast.walk(statement)
        }
        for node in ast.walk(tree):
            if node in guarded or not isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute):
                continue
            if re.search(
                r"\btorch\.distributed\b|from torch import .*\bdistributed\b", ast.unparse(node)
            ):
                found.append(f"{file.name}:{node.lineno}")
    return sorted(set(found))


def test_collectives_alone_uses_torch_distributed():
    assert distributed_uses(ROOT / "packages") == []


def numpy_uses(packages: Path) -> list[str]:
    """Uses of numpy, also through a tensor, in layers that do not declare it."""
    found = []
    for project in sorted(packages.glob("*/pyproject.toml")):
        needs = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
        if "numpy" in {Requirement(text).name for text in needs}:
            continue
        for file in sorted(project.parent.glob("src/vocabtp/**/*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                names = {getattr(node, key, None) or "" for key in ("attr", "id", "name", "module")}
                if any(re.match(r"numpy\b|from_numpy$|__array__$", name) for name in names):
                    found.append(f"{file.name}:{node.lineno}")
    return found


def test_numpy_is_used_where_it_is_declared():
    assert numpy_uses(ROOT / "packages") == []


@pytest.mark.parametrize("layer", ["kernels", "dist", "cache"])
@pytest.mark.parametrize(
    "code",
    [
        "import numpy as np",
        "from numpy.random import default_rng",
        "def f(x):\n    return x.cpu().numpy()",
        "import torch\n\n\ndef f(x):\n    return torch.from_numpy(x)",
    ],
)
def test_another_user_of_numpy_is_named(tree, layer, code):
    plant(tree, layer, code)
    (named,) = numpy_uses(tree / "packages")
    assert named.startswith("planted.py:")


@pytest.mark.parametrize("layer", ["dist", "cache"])
@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed as d",
        "from torch import distributed",
        "from torch.distributed.tensor import DTensor",
        "import torch\n\n\ndef f(x):\n    torch.distributed.all_reduce(x)",
    ],
)
def test_another_user_of_torch_distributed_is_named(tree, layer, code):
    plant(tree, layer, code)
    assert [use.partition(":")[0] for use in distributed_uses(tree / "packages")] == ["planted.py"]


def private_imports(packages: Path) -> list[str]:
    """Imports of another layer's private module or private name."""
    found = []
    for file in sorted(packages.glob("*/src/vocabtp/**/*.py")):
        own = file.relative_to(packages).parts[3]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                top, _, rest = name.partition(".")
                layer, _, inside = rest.partition(".")
                if top == "vocabtp" and layer != own and re.search(r"(^|\.)_(?!_)", inside):
                    found.append(f"{file.name}:{node.lineno}: {name}")
    return found


def test_no_layer_imports_anothers_private_names():
    assert private_imports(ROOT / "packages") == []


@pytest.mark.parametrize(
    "code",
    [
        "from vocabtp.kernels._version import __version__",
        "from vocabtp.kernels import _version",
        "import vocabtp.kernels._version",
        "def f():\n    from vocabtp.kernels.ops import _check\n    return _check",
    ],
)
def test_an_import_of_anothers_private_name_is_named(tree, code):
    plant(tree, "dist", code)
    assert [line.partition(":")[0] for line in private_imports(tree / "packages")] == ["planted.py"]


def version(root: Path, layer: str) -> str:
    text = (root / f"packages/vocabtp-{layer}/src/vocabtp/{layer}/_version.py").read_text()
    return re.search(r'__version__ = "(.+)"', text)[1]


def wrong_pins(root: Path) -> list[str]:
    """Requirements on a layer below that are missing or refuse the version in this tree."""
    found = []
    for i, layer in enumerate(LAYERS):
        file = root / f"packages/vocabtp-{layer}/pyproject.toml"
        project = tomllib.loads(file.read_text())["project"]
        pins = {r.name: r for r in map(Requirement, project["dependencies"])}
        if i and f"vocabtp-{LAYERS[i - 1]}" not in pins:
            found.append(f"{layer} does not require {LAYERS[i - 1]}")
        for name, pin in pins.items():
            below = name.removeprefix("vocabtp-")
            if below == name:
                continue
            if below not in LAYERS[:i]:
                found.append(f"{layer} requires {below}")
            elif not pin.specifier.contains(version(root, below), prereleases=True):
                found.append(f"{layer} refuses {below} {version(root, below)}: {pin}")
            elif not {">=", "<"} <= {s.operator for s in pin.specifier}:
                found.append(f"{layer} leaves {below} open: {pin}")
    return found


def test_each_pin_admits_the_layer_below_in_this_tree():
    assert wrong_pins(ROOT) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("vocabtp-kernels>=0.1,<0.2", "vocabtp-kernels>=0.2,<0.3", "dist refuses kernels"),
        ("vocabtp-kernels>=0.1,<0.2", "vocabtp-kernels>=0.1", "dist leaves kernels open"),
        ('"vocabtp-kernels>=0.1,<0.2",', "", "dist does not require kernels"),
        ("vocabtp-kernels>=0.1,<0.2", "vocabtp-opsd>=0.1,<0.2", "dist requires opsd"),
    ],
)
def test_a_wrong_pin_is_named(tree, old, new, complaint):
    file = tree / "packages/vocabtp-dist/pyproject.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    assert complaint in "; ".join(wrong_pins(tree))
