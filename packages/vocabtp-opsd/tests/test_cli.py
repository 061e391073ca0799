import signal
import subprocess
import sys
import types

import pytest

from vocabtp.opsd import cli, launch
from vocabtp.opsd.config import load_config
from vocabtp.opsd.data import load_examples
from vocabtp.opsd.errors import Interrupted, ModelError


class FakeTrainer:
    """Records calls; `fail` is what its methods raise."""

    calls: list = []  # noqa: RUF012
    fail: BaseException | None = None

    def __init__(self, config):
        self.config = config

    def _do(self, *call):
        self.calls.append(call)
        if self.fail is not None:
            raise self.fail

    def train(self):
        self._do("train", self.config.training.gradient_accumulation_steps)

    def check(self):
        self._do("check")
        return {"steps": 3}

    def evaluate(self):
        self._do("evaluate")
        return {"exact_match": 0.25, "prompts": 4}

    def rollout(self, path):
        self._do("rollout", path)

    def export(self, path):
        self._do("export", path)


@pytest.fixture
def trainer(monkeypatch):
    module = types.ModuleType("vocabtp.opsd.trainer")
    module.Trainer = FakeTrainer
    monkeypatch.setitem(sys.modules, "vocabtp.opsd.trainer", module)
    monkeypatch.setattr(FakeTrainer, "calls", [])
    monkeypatch.setattr(FakeTrainer, "fail", None)
    return FakeTrainer


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    path = tmp_path / "run.yaml"
    path.write_text(
        "student: {model_name_or_path: a/b}\nteacher: {model_name_or_path: a/c}\n"
        "data: {path: p.jsonl, eval_path: p.jsonl}\n"
    )
    return str(path)


def test_each_command_calls_its_method(trainer, run_file, capsys):
    assert cli.run(["train", run_file]) == 0
    assert cli.run(["check", run_file]) == 0
    assert cli.run(["eval", run_file]) == 0
    assert cli.run(["rollout", run_file, "--output", "answers.jsonl"]) == 0
    assert cli.run(["export", "--output", "model", run_file]) == 0
    assert trainer.calls == [
        ("train", 8),
        ("check",),
        ("evaluate",),
        ("rollout", "answers.jsonl"),
        ("export", "model"),
    ]
    out = capsys.readouterr().out
    assert "exact_match: 0.25\nprompts: 4\nanswers.jsonl\nmodel\n" in out


def test_check_prints_the_resolved_configuration(trainer, run_file, capsys, tmp_path):
    assert cli.run(["check", run_file, "training.seed=9", "--debug", "parallel.tp=1"]) == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    assert shown.read_text().startswith("# steps: 3\nstudent:\n")
    expected = load_config(run_file, ["training.seed=9"]).for_world(1)
    assert load_config(shown) == expected


@pytest.mark.parametrize("parent", [False, True])
def test_a_notice_is_given_once_by_the_command_or_by_its_first_rank(
    trainer, run_file, capsys, monkeypatch, tmp_path, parent
):
    log = cli._log
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"answer": "b"}\n')
    if parent:
        monkeypatch.setenv("VOCABTP_OPSD_NOTES", str(tmp_path))

    def check(self):
        load_examples(self.config.data.path, self.config.data)
        log.warning("found with the models")
        return {}

    monkeypatch.setattr(trainer, "check", check)
    for _ in range(2):  # the next run in the same process says it again
        assert cli.run(["check", run_file, "data.on_error=skip", "data.eval_path=null"]) == 0
        err = capsys.readouterr().err
        assert err.count("left out 1 of 2 rows") == (0 if parent else 1)
        assert err.count("found with the models") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "'trian'"),
        (["train"], "the following arguments are required: CONFIG (see"),
        (["train", "none.yaml", "--fast"], "unrecognized arguments: --fast"),
        (["train", "a", "--deepspeed_config=d"], "--deepspeed_config=d (write deepspeed_config=V"),
        (["train", "a", "--temperature", "1"], "temperature=VALUE or distillation.temperature=V"),
        (["train", "none.yaml"], "none.yaml: cannot read the configuration: No such file"),
        (["train", "RUN", "training.learnign_rate=1"], "did you mean training.learning_rate?"),
        (["train", "RUN", "seed"], "override 'seed': write it as section.key=value"),
        (["train", "RUN", "data.path=none.jsonl"], "none.jsonl: cannot read the prompts: No such"),
        (["train", "RUN", "data.eval_path=none"], "none: cannot read the prompts: No such"),
        (["eval", "RUN", "data.eval_path=null"], "data.eval_path is not set"),
        (["train", "RUN", "parallel.tp=2"], "parallel.tp is 2, but the run has 1 rank(s)"),
        (["train", "RUN", "training.train_batch_size=5", "training.micro_batch_size_per_gpu=2"],
         "train_batch_size 5"),
        (["train", "RUN", "training.save_dir=p.jsonl"], "p.jsonl is a file"),
        (["train", "RUN", "training.save_dir=" + "x" * 300], "training.save_dir: File name too"),
        (["rollout", "RUN", "--output", "."], "--output: . is a directory"),
        (["export", "RUN", "--output", "p.jsonl"], "--output: p.jsonl is there already"),
        (["export", "RUN", "--output", "."], "--output: . is there already"),
        (["export", "RUN", "--output", "p.jsonl/model"], "p.jsonl is a file"),
        (["rollout", "RUN", "--output", "x" * 300], "--output: "),
        (["rollout", "RUN"], "the following arguments are required: --output"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line_and_code_2_before_any_model(
    trainer, run_file, capsys, arguments, message
):
    code = cli.run([run_file if a == "RUN" else a for a in arguments])
    out, err = capsys.readouterr()
    assert (code, out, trainer.calls) == (2, "", [])
    assert err.startswith("vocabtp-opsd: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_folder_without_permission(trainer, run_file, capsys, monkeypatch):
    monkeypatch.setattr("vocabtp.opsd.cli.os.access", lambda *_: False)
    assert cli.run(["train", run_file]) == 2
    assert "training.save_dir: cannot write in " in capsys.readouterr().err


def test_broken_prompts_list_their_lines(trainer, run_file, capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": 1}\n{"prompt": ""}\n')
    assert cli.run(["train", run_file]) == 2
    assert "p.jsonl:2: the field 'prompt' is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ModelError("heads differ"), 2, "heads differ\n"),
        (RuntimeError("a\n  b"), 1, "RuntimeError: a b (--debug shows the traceback)\n"),
        (KeyError(), 1, "KeyError (--debug shows the traceback)\n"),
    ],
)
def test_error_while_running(trainer, run_file, capsys, error, code, message):
    trainer.fail = error
    assert cli.run(["train", run_file]) == code
    assert capsys.readouterr().err == f"vocabtp-opsd: error: {message}"
    assert cli.run(["train", run_file, "--debug"]) == code
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "raise self.fail" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [(Interrupted(signal.SIGTERM), 143), (KeyboardInterrupt(), 130)],
)
def test_interrupted_run_is_not_an_error(trainer, run_file, capsys, error, code):
    trainer.fail = error
    assert cli.run(["train", run_file]) == code
    assert capsys.readouterr().err == ""


class TestUnderTorchrun:
    @pytest.fixture
    def rank_one(self, monkeypatch, run_file):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setattr("vocabtp.opsd.launch.watch_parent", lambda: None)
        monkeypatch.setattr("vocabtp.opsd.cli.time.sleep", lambda s: None)
        before = signal.getsignal(signal.SIGTERM)
        yield run_file
        signal.signal(signal.SIGTERM, before)

    def test_takes_the_ranks_as_they_are(self, trainer, rank_one, capsys):
        assert cli.run(["train", rank_one, "parallel.tp=2", "parallel.nproc=2"]) == 0
        assert cli.run(["check", rank_one]) == 0
        assert trainer.calls == [("train", 8), ("check",)]
        assert capsys.readouterr().out == ""

    def test_other_number_of_ranks_than_asked_for(self, trainer, rank_one, capsys):
        assert cli.run(["train", rank_one, "parallel.nproc=4"]) == 2
        assert "parallel.nproc is 4, but torchrun started 2" in capsys.readouterr().err

    def test_own_error_names_the_rank(self, trainer, rank_one, capsys):
        for trainer.fail in (ModelError("no such file here"), RuntimeError("broken")):
            cli.run(["train", rank_one])
            assert "error: [rank 1] " in capsys.readouterr().err

    def test_notices_come_from_rank_zero(self, trainer, rank_one, capsys):
        cli.run(["train", rank_one, "rollout.engine=hybrid_engine"])
        assert capsys.readouterr().err == ""

    def test_crash_of_rank_zero_names_it_too(self, trainer, rank_one, capsys, monkeypatch):
        monkeypatch.setenv("RANK", "0")
        trainer.fail = RuntimeError("broken")
        cli.run(["train", rank_one])
        trainer.fail = ModelError("heads differ")
        cli.run(["train", rank_one])
        assert [line[21:29] for line in capsys.readouterr().err.splitlines()] == [
            "[rank 0]",
            "heads di",
        ]


def test_the_argument_that_deepspeeds_launcher_adds(trainer, run_file, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vocabtp-opsd", "--local_rank=0", "train", run_file])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert trainer.calls[0][0] == "train"


def test_several_ranks_are_launched_with_the_same_arguments(trainer, run_file, capsys, monkeypatch):
    seen = []
    note = launch.Failure(1, "crash", "KeyError: 3", 1, 5.0, "Traceback of rank 1\n")

    def fake_launch(nproc, arguments):
        seen.append((nproc, arguments))
        return launch.Outcome(1, note)

    monkeypatch.setattr("vocabtp.opsd.launch.launch", fake_launch)
    arguments = ["train", run_file, "parallel.nproc=2", "--debug"]
    assert cli.run(arguments) == 1
    assert (seen, trainer.calls) == ([(2, arguments)], [])
    assert capsys.readouterr().err == (
        "Traceback of rank 1\nvocabtp-opsd: error: [rank 1] KeyError: 3\n"
    )
    # nothing is started for input that is wrong
    assert cli.run([*arguments, "data.path=none"]) == 2
    assert len(seen) == 1


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version(capsys, option):
    assert cli.run([option]) == 0
    out = capsys.readouterr().out
    assert "vocabtp-opsd" in out
    if option == "--help":
        assert all(f"  {name} " in out for name in cli._COMMANDS)


def test_module_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "vocabtp.opsd", "train", str(tmp_path / "none.yaml")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"vocabtp-opsd: error: {tmp_path / 'none.yaml'}: ")
    assert done.stderr.count("\n") == 1
