"""Every check of this repository as one nox session each; `nox -l` lists them.

A session gets an environment of its own with wheels built from this tree: a layer's session has
that layer and the ones below it, nothing above. With `--no-venv`, and in gpu_tests and xpu_tests
always, nothing is installed: the interpreter that runs nox sees the sources through PYTHONPATH.

Environment variables:
    VOCABTP_CONSTRAINTS: another constraints file than constraints/tests.txt.
    VOCABTP_MINIMUM_TORCH: the torch that `minimums` runs with.
    PIP_FIND_LINKS and the like are the installers' own; find-links is passed on to uv.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "layers", "tests"]

ROOT = Path(__file__).parent.resolve()
LAYERS = ["kernels", "dist", "cache", "opsd"]  # lowest first
CONSTRAINTS = os.environ.get("VOCABTP_CONSTRAINTS", str(ROOT / "constraints" / "tests.txt"))
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
# groups that help where they can be installed and that --no-venv does without
OPTIONAL = {"triton", "workers"}
LAYER = nox.parametrize("layer", [nox.param(name, id=name) for name in LAYERS])

if "PIP_FIND_LINKS" in os.environ:  # uv ignores pip's variable
    os.environ.setdefault("UV_FIND_LINKS", ",".join(os.environ["PIP_FIND_LINKS"].split()))

# PYTHONDONTWRITEBYTECODE would make every rank and every subprocess compile torch anew
RUN_ENV = {"PYTHONDONTWRITEBYTECODE": None, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
CPU_ENV = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}

DOCS_ENV = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}

_built: dict[str, Path] = {}  # what this nox process has made already: wheels, shared packages


def upto(layer: str) -> list[str]:
    """The layer and the ones below it, lowest first."""
    return LAYERS[: LAYERS.index(layer) + 1]


def package(layer: str) -> Path:
    """The folder of a layer's distribution."""
    return ROOT / "packages" / f"vocabtp-{layer}"


def project(layer: str) -> dict[str, Any]:
    """The [project] table of a layer's distribution."""
    return nox.project.load_toml(package(layer) / "pyproject.toml")["project"]


def group(*names: str) -> list[str]:
    """The requirements of dependency groups of the root pyproject."""
    return list(nox.project.dependency_groups(PROJECT, *names))


def uses_uv(session: nox.Session) -> bool:
    """Whether uv made this session's environment."""
    return session.venv_backend == "uv"


def wheels(session: nox.Session) -> Path:
    """The folder with a wheel of every layer, built once a run."""
    if "wheels" not in _built:
        out = Path(session.cache_dir).resolve() / "wheels"
        shutil.rmtree(out, ignore_errors=True)
        paths = [str(package(layer)) for layer in LAYERS]
        if uses_uv(session):
            for path in paths:
                session.run_install("uv", "build", "--wheel", "-q", "-o", str(out), path)
        else:
            pip = ["python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out)]
            session.run_install(*pip, *paths)
        _built["wheels"] = out
    return _built["wheels"]


def share_packages(session: nox.Session, constraints: str) -> None:
    """Install torch and the test tools once, and show them to this pip environment by a .pth file.

    pip writes every file of torch and triton anew (over a minute an environment); uv links them.
    """
    site = Path(session.cache_dir).resolve() / "site"  # a .pth line is relative to its own folder
    requirements = ["torch", *group("test", "triton", "workers")]
    stamp, wanted = site / "requirements.txt", "\n".join([*requirements, constraints, sys.version])
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(site, ignore_errors=True)
        session.install("--target", str(site), "-c", constraints, *requirements)
        stamp.write_text(wanted)
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = session.run_install("python", "-c", query, silent=True, log=False)
    if purelib:
        Path(purelib.strip(), "shared_packages.pth").write_text(f"{site}\n")


def check_installed(session: nox.Session, requirements: list[str]) -> None:
    """Stop with the list of what --no-venv would need and this interpreter lacks."""
    missing = []
    for requirement in map(Requirement, requirements):
        if requirement.name.startswith("vocabtp"):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"'{requirement}'" + (f" (has {version})" if version else ""))
    if missing:
        session.error(
            f"{session.name} installs nothing here and {sys.executable} lacks: {', '.join(missing)}"
        )


def sources(layers: list[str]) -> str:
    """A PYTHONPATH of these layers' sources; other layers' sources are taken off it."""
    outer = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [p for p in outer if p and not Path(p).resolve().is_relative_to(ROOT / "packages")]
    return os.pathsep.join([*(str(package(layer) / "src") for layer in layers), *kept])


def environment(
    session: nox.Session,
    layers: list[str],
    groups: tuple[str, ...] = (),
    constraints: str = CONSTRAINTS,
) -> tuple[str, dict[str, str | None]]:
    """Make these layers and groups importable: the python to run, and its variables."""
    if session.venv_backend == "none":
        needed = group(*(name for name in groups if name not in OPTIONAL))
        for layer in layers:
            needed += project(layer)["dependencies"]
        check_installed(session, sorted(set(needed)))
        return sys.executable, {**RUN_ENV, "PYTHONPATH": sources(layers)}
    files: list[str] = []
    if layers:
        if not uses_uv(session):
            share_packages(session, constraints)
        built = wheels(session)
        # none with nox -R, which skips every install
        files = [str(w) for layer in layers for w in built.glob(f"vocabtp_{layer}-*.whl")]
    session.install("-c", constraints, *group(*groups), *files)
    if files:  # an environment that is used again may hold an older build of the same version
        session.install("--no-deps", "--force-reinstall", *files)
    return "python", {**RUN_ENV, "PYTHONPATH": None}


def layer_tests(session: nox.Session, layer: str, constraints: str = CONSTRAINTS) -> None:
    """The tests of one layer, in an environment without the layers above it."""
    groups = ("test", "triton", "workers")
    python, env = environment(session, upto(layer), groups, constraints)
    pytest = [python, "-m", "pytest", f"--layer={layer}"]
    if layer == "kernels" and session.venv_backend != "none":
        # a process a core; the tests of the other layers start ranks of their own
        pytest += ["-n", "2"]
    tests = str(package(layer) / "tests")
    session.run(*pytest, tests, *session.posargs, env={**env, **CPU_ENV})


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """All of them: every layer's tests in its own environment, then tests-integration."""
    for name in [*LAYERS, "integration"]:
        session.notify(name)


@nox.session
def kernels(session: nox.Session) -> None:
    """Tests of vocabtp.kernels, alone."""
    layer_tests(session, "kernels")


@nox.session
def dist(session: nox.Session) -> None:
    """Tests of vocabtp.dist, with kernels below it."""
    layer_tests(session, "dist")


@nox.session
def cache(session: nox.Session) -> None:
    """Tests of vocabtp.cache, with dist and kernels below it."""
    layer_tests(session, "cache")


@nox.session
def opsd(session: nox.Session) -> None:
    """Tests of vocabtp.opsd, with the three layers below it."""
    layer_tests(session, "opsd")


@nox.session
def integration(session: nox.Session) -> None:
    """What no layer can test alone: all layers together, wheels, layering, code in the docs."""
    python, env = environment(session, LAYERS, ("test", "triton", "layers", "deepspeed"))
    run = [python, "-m", "pytest", "--layer=opsd", "tests-integration"]
    session.run(*run, *session.posargs, env={**env, **CPU_ENV})


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and format, spelling, length of files and functions."""
    python, env = environment(session, [], ("lint",))
    session.run(python, "-m", "ruff", "check", ".", env=env)
    session.run(python, "-m", "ruff", "format", "--check", ".", env=env)
    session.run(python, "-m", "codespell_lib", env=env)
    session.run(python, "support/lengths.py", env=env)


@nox.session
def types(session: nox.Session) -> None:
    """Strict mypy over the four layers."""
    python, env = environment(session, LAYERS, ("types",))
    session.run(python, "-m", "mypy", *(f"-pvocabtp.{layer}" for layer in LAYERS), env=env)


@nox.session
def layers(session: nox.Session) -> None:
    """No import goes up or around: import-linter, ruff's banned imports, pins, and their tests."""
    python, env = environment(session, [], ("pytest", "layers"))
    env = {**env, "PYTHONPATH": sources(LAYERS)}
    lint_imports = [python, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    session.run(*lint_imports, env=env)
    session.run(python, "-m", "ruff", "check", "-q", "--select=TID251", "packages", env=env)
    files = ["tests-integration/test_layers.py", "tests-integration/test_namespace.py"]
    session.run(python, "-m", "pytest", *files, *session.posargs, env=env)


@nox.session(name="wheels")
def wheels_session(session: nox.Session) -> None:
    """Source distributions and wheels of all layers in dist/, and what they may contain."""
    python, env = environment(session, [], ("pytest", "layers"))
    for layer in LAYERS:
        hatch = [python, "-m", "hatchling", "build", "-d", str(ROOT / "dist")]
        with session.chdir(package(layer)):
            session.run(*hatch, env=env)
    session.run(python, "-m", "pytest", "tests-integration/test_wheels.py", env=env)


@nox.session
@LAYER
def minimums(session: nox.Session, layer: str) -> None:
    """A layer's tests with the lowest versions that it allows.

    torch is the exception: its floor, 2.11, exists as a CPU build only on an index of its own,
    and elsewhere as a CUDA build of several GB. So the torch of the constraints file is used,
    unless VOCABTP_MINIMUM_TORCH names another (2.11.0, where it can be had). The layers below are
    this tree's: until one is released they are the lowest version there is.
    """
    torch = os.environ.get("VOCABTP_MINIMUM_TORCH")
    pins = {}
    for line in Path(CONSTRAINTS).read_text().splitlines():
        if line.startswith(("torch==", "triton==")):
            pins[line.partition("==")[0]] = line
    if torch:  # torch 2.11 brings triton 3.6
        pins = {"torch": f"torch=={torch}", "triton": "triton>=3.6"}
    for name in upto(layer):
        for requirement in map(Requirement, project(name)["dependencies"]):
            floor = next(s.version for s in requirement.specifier if s.operator in (">=", "=="))
            if not requirement.name.startswith("vocabtp"):
                pins.setdefault(requirement.name, f"{requirement.name}=={floor}")
    # the lowest matplotlib calls what later versions of pyparsing warn about
    pins["pyparsing"] = "pyparsing<3.3"
    file = Path(session.create_tmp(), "minimums.txt")
    file.write_text("\n".join(pins.values()) + "\n")
    layer_tests(session, layer, str(file))


@nox.session
def demo(session: nox.Session) -> None:
    """A real distillation on two CPU ranks; arguments after -- override its configuration."""
    python, env = environment(session, LAYERS)
    command = [python, "-m", "vocabtp.opsd"] if python == sys.executable else ["vocabtp-opsd"]
    config = "examples/addition/opsd.yaml"
    env = {**env, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    # what an earlier demo left is finished: train would resume it and have nothing to do
    shutil.rmtree(ROOT / "runs" / "addition", ignore_errors=True)
    # Ctrl-C: time to write a checkpoint and stop the ranks
    patience = {"interrupt_timeout": 20.0, "terminate_timeout": 10.0}
    session.run(*command, "train", config, *session.posargs, env=env, **patience)


def device_tests(session: nox.Session, layer: str, device: str) -> None:
    """The tests marked gpu of one layer, with the torch of the interpreter that runs nox."""
    probe = f"import torch; print(torch.{device}.is_available(), torch.__version__)"
    asked = [sys.executable, "-c", probe]
    env = {k: v for k, v in os.environ.items() if k not in RUN_ENV}
    found = subprocess.run(asked, capture_output=True, text=True, env=env)
    if not found.stdout.startswith("True"):
        seen = (found.stdout or found.stderr).strip().splitlines() or ["nothing"]
        session.error(f"no {device} device: {sys.executable} answers {seen[-1]!r} to {probe!r}")
    python, env = environment(session, upto(layer), ("test",))
    pytest = [python, "-m", "pytest", "-m", "gpu", f"--layer={layer}"]
    # pytest exits with 5 when it runs no test, which fails the session like any other code
    tests = str(package(layer) / "tests")
    session.run(*pytest, tests, *session.posargs, env={**env, "TRITON_INTERPRET": None})


@nox.session(venv_backend="none")
@LAYER
def gpu_tests(session: nox.Session, layer: str) -> None:
    """One layer's tests on a CUDA or ROCm device; red without one.

    Several processes (`-- -n 8 -m "gpu and not large"`, then `-- -m "gpu and large"`) are faster.
    """
    device_tests(session, layer, "cuda")


@nox.session(venv_backend="none")
@LAYER
def xpu_tests(session: nox.Session, layer: str) -> None:
    """One layer's tests on an Intel XPU; red without one."""
    device_tests(session, layer, "xpu")


@nox.session(venv_backend="none")
def sanitize(session: nox.Session) -> None:
    """compute-sanitizer over small GPU tests of the kernels; arguments are pytest's."""
    python, env = environment(session, upto("kernels"), ("test",))
    session.run(python, "support/sanitize.py", *session.posargs, env=env)


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, strictly and offline, into site/."""
    python, env = environment(session, [], ("docs",))
    # without -q: with it mkdocs exits 0 in spite of strict
    session.run(python, "-m", "mkdocs", "build", "--strict", env={**env, **DOCS_ENV})


@nox.session
def bench(session: nox.Session) -> None:
    """Measures the ops beside other implementations: a table and JSON; see benchmarks/README.md."""
    python, env = environment(session, upto("dist"))
    env = {**env, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
    session.run(python, "benchmarks/ops.py", *session.posargs, env=env)
