"""The four packages share the namespace vocabtp: no package may own it, each fills its layer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vocabtp_pytest import wrong_layers

ROOT = Path(__file__).parents[1]
LAYERS = ["kernels", "dist", "cache", "opsd"]


def owners(packages: Path) -> list[Path]:
    """The files that would turn the namespace into one package's own."""
    return sorted(packages.glob("*/src/vocabtp/__init__.py*"))


def test_no_package_owns_the_namespace():
    assert owners(ROOT / "packages") == []


def test_each_package_holds_its_layer_alone():
    for layer in LAYERS:
        found = sorted((ROOT / f"packages/vocabtp-{layer}/src").glob("*/*"))
        found = [p for p in found if p.name != "__pycache__"]
        assert [p.name for p in found] == [layer], found
        assert (found[0] / "py.typed").is_file()


@pytest.mark.parametrize("owner", LAYERS)
def test_a_stray_init_hides_the_others_and_is_named(tmp_path, owner):
    """Why the guard exists: one such file takes the other three packages away."""
    for layer in LAYERS:
        module = tmp_path / f"vocabtp-{layer}/src/vocabtp/{layer}"
        module.mkdir(parents=True)
        (module / "__init__.py").touch()
    # the owner comes first on the path, as in an installation where its files lie together
    order = [owner, *(layer for layer in LAYERS if layer != owner)]
    path = os.pathsep.join(str(tmp_path / f"vocabtp-{layer}/src") for layer in order)
    code = "import " + ", ".join(f"vocabtp.{layer}" for layer in LAYERS)
    run = [sys.executable, "-S", "-c", code]

    assert subprocess.run(run, env={"PYTHONPATH": path}, check=False).returncode == 0
    stray = tmp_path / f"vocabtp-{owner}/src/vocabtp/__init__.py"
    stray.touch()
    broken = subprocess.run(
        run, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert "No module named 'vocabtp." in broken.stderr
    assert owners(tmp_path) == [stray]


@pytest.mark.parametrize(
    ("layer", "there", "wrong"),
    [
        ("dist", "kernels dist", None),
        ("opsd", "kernels dist cache opsd", None),
        ("dist", "kernels dist opsd", "vocabtp.opsd is importable"),
        ("kernels", "kernels dist", "vocabtp.dist is importable"),
        ("dist", "dist", "vocabtp.kernels cannot be imported"),
        ("kernels", "", "vocabtp.kernels cannot be imported"),
    ],
)
def test_any_other_set_of_layers_is_wrong(layer, there, wrong):
    names = {"vocabtp", *(f"vocabtp.{n}" for n in there.split())} if there else set()
    assert wrong_layers(layer, lambda name: name if name in names else None) == wrong


def test_a_layers_tests_do_not_start_beside_a_higher_layer(tmp_path):
    """What `nox -s kernels` and `gpu_tests` assert: here all four layers are there."""
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "vocabtp_pytest", str(tmp_path)]
    outer = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    path = os.pathsep.join([str(ROOT / "support"), *outer])
    env = {**os.environ, "PYTHONPATH": path}
    codes = {}
    for layer in ("opsd", "kernels"):
        done = subprocess.run(
            [*run, f"--layer={layer}"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        codes[layer] = done.returncode
    assert codes == {"opsd": 0, "kernels": 4}
    assert "--layer=kernels: vocabtp.dist is importable" in done.stderr


def test_lengths_names_a_long_file_and_a_long_function(tmp_path):
    shutil.copy(ROOT / "support/lengths.py", tmp_path)
    run = [sys.executable, str(tmp_path / "lengths.py"), str(tmp_path / "src")]
    (tmp_path / "src").mkdir()
    empty = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (empty.returncode, empty.stdout.split(":")[0][:14]) == (1, "no Python file")

    file = tmp_path / "src/a.py"
    fine = 'def f():\n    """One.\n\n    Two.\n    """\n' + "    x = 1\n" * 59
    file.write_text(fine)
    assert subprocess.run(run, check=False).returncode == 0
    file.write_text(fine + "    y = 2\n" + "z = 3\n" * 240)
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "a.py:1: 301 lines" in done.stdout
    assert "a.py:1: f has 61 lines" in done.stdout
