"""What is in the four wheels, built here from the tree."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ["kernels", "dist", "cache", "opsd"]


def build(package: Path, out: Path) -> Path:
    """The wheel of a package, by its own build backend."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


def strangers(wheel: Path, layer: str) -> list[str]:
    """Files that a layer's wheel must not bring: all but its own folder and its metadata."""
    names = zipfile.ZipFile(wheel).namelist()
    info = next(n for n in names if n.endswith("/METADATA")).partition("/")[0]
    own = (f"vocabtp/{layer}/", f"{info}/")
    return [n for n in names if not n.startswith(own) or "__pycache__" in n or "/tests/" in n]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    root = tmp_path_factory.mktemp("wheels")
    return {n: build(ROOT / f"packages/vocabtp-{n}", root / n) for n in LAYERS}


@pytest.mark.parametrize("layer", LAYERS)
def test_wheel_holds_its_layer_typed_and_licensed(wheels, layer):
    assert strangers(wheels[layer], layer) == []
    names = zipfile.ZipFile(wheels[layer]).namelist()
    source = ROOT / f"packages/vocabtp-{layer}/src"
    expected = {str(p.relative_to(source)) for p in source.rglob("*.py")}
    assert expected | {f"vocabtp/{layer}/py.typed"} <= set(names)
    assert [n for n in names if n.endswith("licenses/LICENSE")]


@pytest.mark.parametrize("layer", LAYERS)
def test_metadata_has_the_trees_version_license_and_long_text(wheels, layer):
    archive = zipfile.ZipFile(wheels[layer])
    name = next(n for n in archive.namelist() if n.endswith("/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    scope: dict[str, str] = {}
    source = ROOT / f"packages/vocabtp-{layer}/src/vocabtp/{layer}/_version.py"
    exec(source.read_text(), scope)
    assert metadata["Version"] == scope["__version__"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_payload().startswith(f"# vocabtp-{layer}")


def test_wheels_unpacked_together_import_as_one_namespace(wheels, tmp_path):
    for wheel in wheels.values():
        zipfile.ZipFile(wheel).extractall(tmp_path)
    specs = [f"print(importlib.util.find_spec('vocabtp.{n}').origin)" for n in LAYERS]
    code = "; ".join(["import importlib.util", *specs])
    # -S: the layers that this environment itself has stay out of sight
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(tmp_path / "vocabtp" / n / "__init__.py") for n in LAYERS]


@pytest.mark.parametrize(
    "stray", ["src/vocabtp/__init__.py", "src/vocabtp/cache/x.py", "src/vocabtp/dist/tests/x.py"]
)
def test_a_stray_file_in_a_wheel_is_named(tmp_path, stray):
    package = tmp_path / "vocabtp-dist"
    ignored = shutil.ignore_patterns("tests", "__pycache__")
    shutil.copytree(ROOT / "packages/vocabtp-dist", package, ignore=ignored)
    (package / stray).parent.mkdir(exist_ok=True)
    (package / stray).touch()
    wheel = build(package, tmp_path / os.path.basename(stray))
    assert strangers(wheel, "dist") == [stray.removeprefix("src/")]
