import json
import logging

import pytest
import yaml

from vocabtp.opsd.config import Config, load_config, reference
from vocabtp.opsd.errors import ConfigError

BASE = """\
student:
  model_name_or_path: org/student
teacher:
  model_name_or_path: org/teacher
data:
  path: prompts.jsonl
"""


@pytest.fixture
def write(tmp_path):
    def call(extra="", name="run.yaml", base=BASE):
        path = tmp_path / name
        path.write_text(base + extra, encoding="utf-8")
        return path

    return call


def refusal(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults_are_the_documented_ones(write):
    config = load_config(write())
    assert config.rollout.model_dump() == {
        "max_prompt_length": 1024,
        "max_response_length": 1024,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "n_samples_per_prompt": 1,
        "engine": "local",
    }
    assert config.distillation.loss_type == "reverse_kl"
    assert config.distillation.temperature_squared is True
    assert config.student.dtype == "bfloat16"
    assert (config.parallel.tp, config.parallel.nproc) == (1, None)


def test_configuration_is_frozen(write):
    config = load_config(write())
    with pytest.raises(ValueError, match="frozen"):
        config.training.seed = 3


# B55: one line, the key, file and line, and the nearest valid key
@pytest.mark.parametrize(
    ("extra", "line", "key", "hint"),
    [
        (
            "training:\n  learnign_rate: 1.0\n",
            8,
            "training.learnign_rate",
            "training.learning_rate?",
        ),
        ("  learning_rate: 1.0\n", 7, "data.learning_rate", "training.learning_rate, not data."),
        ("training:\n  num-epochs: 3\n", 8, "training.num-epochs", "training.num_train_epochs?"),
        ("rollout:\n  num-epochs: 3\n", 8, "rollout.num-epochs", "training.num_train_epochs?"),
        ("training:\n  train-batch-size: 3\n", 8, "training.train-batch-size", "train_batch_size?"),
        ("learning_rate: 1.0\n", 7, "learning_rate", "training.learning_rate, not learning_rate"),
        ("trainnig:\n  seed: 1\n", 7, "trainnig", "training?"),
        ("temperature: 1\n", 7, "temperature", "rollout.temperature or distillation.temperature"),
        ("Training:\n  seed: 1\n", 7, "Training", "training?"),
        ("training:\n  Seed: 1\n", 8, "training.Seed", "training.seed?"),
    ],
)
def test_unknown_key_names_file_line_and_nearest_key(write, extra, line, key, hint):
    path = write(extra)
    text = refusal(path)
    assert text.startswith(f"{path}:{line}: unknown key {key}: ")
    assert hint in text


def test_key_that_resembles_none_gets_the_list(write):
    assert "parallel has tp, engine" in refusal(write("parallel:\n  qqqq: 1\n"))
    assert "the sections are student, teacher" in refusal(write("qqqq: 1\n"))


def test_two_unknown_keys_count_the_rest(write):
    text = refusal(write("training:\n  aaa: 1\nrollout:\n  bbb: 2\n"))
    assert ":8: unknown key training.aaa" in text
    assert "1 more unknown key" in text


@pytest.mark.parametrize("name", ["run.yaml", "run.json"])
def test_key_set_twice_names_both_lines(write, name):
    if name == "run.json":
        text = '{"training": {\n\t"seed": 1,\n\t"seed": 2}}'
        path = write(name=name, base=text)
        expected = f"{path}:3: training.seed is set twice, first on line 2"
    else:
        path = write("training:\n  seed: 1\n  logging_steps: 3\n  seed: 2\n")
        expected = f"{path}:10: training.seed is set twice, first on line 8"
    assert refusal(path) == expected


def test_section_set_twice_is_refused(write):
    assert "data is set twice, first on line 5" in refusal(write("data:\n  shuffle: true\n"))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("training: {learning_rate: .nan}", "training.learning_rate must be a finite number, got"),
        ("training: {learning_rate: .inf}", "training.learning_rate must be a finite number, got"),
        ("training: {learning_rate: 'nan'}", "training.learning_rate must be a number, got 'nan'"),
        ("training: {learning_rate: 0}", "training.learning_rate must be above 0, got 0"),
        ("training: {learning_rate: true}", "training.learning_rate must be a number, got true"),
        ("training: {weight_decay: -1}", "training.weight_decay must be at least 0, got -1"),
        ("training: {seed: 1.0}", "training.seed must be a whole number, got 1.0"),
        ("training: {seed: '8'}", "training.seed must be a whole number, got '8'"),
        ("training: {seed: -1}", "training.seed must be at least 0, got -1"),
        ("training: {seed: 9223372036854775808}", "training.seed must be below"),
        ("training: {max_steps: 0}", "training.max_steps must be -1 (off) or at least 1, got 0"),
        ("training: {adam_betas: [0.9]}", "training.adam_betas"),
        ("training: {adam_betas: [0.9, 1]}", "training.adam_betas must be below 1, got 1"),
        ("training: {adam_betas: 3}", "training.adam_betas must be a list, got 3"),
        ("training: {lr_scheduler: cosin}", "one of cosine, linear, constant; got 'cosin'; did"),
        ("training: {eval_steps: 3}", "training.eval_steps is 3, but data.eval_path is not set"),
        ("training:\n  save_dir:", "training.save_dir must be a string, got null"),
        ("rollout: {temperature: -0.1}", "rollout.temperature must be at least 0, got -0.1"),
        ("rollout: {top_p: 0}", "rollout.top_p must be above 0, got 0"),
        ("rollout: {top_p: 1.1}", "rollout.top_p must be at most 1, got 1.1"),
        ("rollout: {top_k: 0}", "rollout.top_k must be -1 (all tokens) or at least 1, got 0"),
        ("rollout: {top_k: -2}", "rollout.top_k must be at least -1, got -2"),
        ("rollout: {max_prompt_length: 0}", "rollout.max_prompt_length must be at least 1, got 0"),
        ("rollout: {n_samples_per_prompt: 2}", "rollout.temperature 0 gives equal answers"),
        ("rollout: {engine: vllm}", "rollout.engine must be local; got 'vllm'"),
        ("rollout: 3", "rollout is a section with keys of its own, got 3"),
        ("distillation: {temperature: 0}", "distillation.temperature must be above 0, got 0"),
        ("distillation: {beta: 1.5, loss_type: jsd}", "distillation.beta must be at most 1, got"),
        ("distillation: {beta: .nan, loss_type: jsd}", "distillation.beta must be a finite number"),
        ("distillation: {beta: 0.1}", "distillation.beta has no effect with distillation.loss_ty"),
        ("distillation: {rescale: true}", "distillation.rescale has no effect"),
        ("distillation: {rescale: 'true', loss_type: jsd}", "must be true or false, got 'true'"),
        ("distillation: {rescale: 1, loss_type: jsd}", "rescale must be true or false, got 1"),
        ("distillation: {pointwise_clip: 0}", "distillation.pointwise_clip must be above 0, got 0"),
        ("distillation: {chunk_size: 0}", "distillation.chunk_size must be at least 1, got 0"),
        ("parallel: {tp: 0}", "parallel.tp must be at least 1, got 0"),
        ("parallel: {tp: 2, nproc: 3}", "parallel.nproc is 3, which parallel.tp 2 does not"),
        ("parallel: {shard: zero1}", "parallel.shard must be one of none, zero2, zero3; got 'z"),
        ("parallel: {engine: fsdp}", "parallel.engine must be one of torch, deepspeed; got 'fsdp'"),
        ("deepspeed_config: ''", "deepspeed_config must not be empty"),
    ],
)
def test_wrong_value_names_key_line_rule_and_value(write, extra, message):
    path = write(extra + "\n")
    text = refusal(path)
    assert message in text
    line = 8 if "\n" in extra else 7
    assert text.startswith(f"{path}:{line}: ")


def test_a_float16_student_is_refused(write):
    # there is no loss scaling: gradients below 6e-8 would be lost without a word
    text = refusal(write(), ["student.dtype=float16"])
    assert text.startswith("override 'student.dtype=float16': student.dtype must be bfloat16 or")
    assert load_config(write(), ["teacher.dtype=float16"]).teacher.dtype == "float16"


def test_layers_are_compiled_by_the_torch_engine(write):
    text = refusal(write("parallel: {engine: deepspeed}\n"), ["training.compile=true"])
    assert "training.compile does not go with parallel.engine deepspeed" in text


def test_template_rules(write):
    def told(template):
        return refusal(write(), [f"teacher.prompt_template='{template}'"])

    assert "only plain field names" in told("{prompt.x}")
    assert "only plain field names" in told("{}")
    assert "only plain field names" in told("{prompt!r}")
    assert "is no template" in told("{prompt")
    assert load_config(write(), ["teacher.prompt_template='a {{b}} {prompt}'"]).teacher


def test_missing_key_says_so(write):
    path = write(base="student: {model_name_or_path: a/b}\nteacher: {}\n")
    text = refusal(path)
    assert "is missing; it has no default" in text
    assert "data is missing" in text or "teacher.model_name_or_path is missing" in text


def test_numeric_strings_are_floats_as_yaml_writes_them(write):
    config = load_config(write("training:\n  learning_rate: 1e-5\n  adam_betas: [9e-1, .95]\n"))
    assert config.training.learning_rate == 1e-5
    assert config.training.adam_betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the configuration is empty"),
        ("# only a comment\n", "the configuration is empty"),
        ("- a\n- b\n", "a configuration is a mapping of sections"),
        ("training: [a\n", "not valid YAML"),
        ("training:\n\tseed: 1\n", ":2: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("training: *seed\n", ":1: not valid YAML"),
        ("training: !!python/object:os.system {}\n", ":1: not valid YAML"),
        ("1: 2\n", ":1: a key must be a name: 1"),
        ("? [a]\n: 1\n", ":1: a key must be a name: a list or mapping"),
        ("a: \x07\n", "not valid YAML"),
    ],
)
def test_broken_file_is_one_line(write, text, message):
    path = write(base=text)
    told = refusal(path)
    assert told.startswith(str(path))
    assert message in told


def test_broken_json_names_the_line(write):
    path = write(base='{"training": {\n  "seed": 1,\n}}', name="run.json")
    assert refusal(path).startswith(f"{path}:3: not valid JSON")


def test_unreadable_file(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.yaml")
    assert "Is a directory" in refusal(tmp_path)
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"training: {save_dir: \xe9}")
    assert refusal(path) == f"{path}: not UTF-8 text (byte 21)"


def test_byte_order_mark_and_tabbed_json_are_read(tmp_path):
    values = yaml.safe_load(BASE)
    values["data"]["prompt_field"] = "\U0001f600"
    path = tmp_path / "run.json"
    path.write_text("\ufeff" + json.dumps(values, indent="\t"), encoding="utf-8")
    assert load_config(path).data.prompt_field == "\U0001f600"


def test_section_without_keys_is_all_defaults(write):
    assert load_config(write("rollout:\n")).rollout == load_config(write()).rollout


class TestOverrides:
    def test_value_is_a_yaml_scalar_and_the_last_one_wins(self, write):
        config = load_config(
            write("training: {seed: 5}\n"),
            [
                "training.seed=1",
                "training.learning_rate=2e-4",
                "training.seed=7",
                "data.shuffle=off",
            ],
        )
        assert (config.training.seed, config.data.shuffle) == (7, False)
        assert config.training.learning_rate == 2e-4

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("training.seed", "write it as section.key=value"),
            ("=3", "write it as section.key=value"),
            ("training=3", "names no key"),
            ("a.b.c=3", "names no key"),
            ("training.sead=3", "unknown key training.sead: did you mean training.seed?"),
            ("trainin.seed=3", "unknown key trainin.seed"),
            ("data.seed=3", "use training.seed, not data.seed"),
            ("seed=3", "use training.seed, not seed"),
            ("training.seed=x", "training.seed must be a whole number, got 'x'"),
            ("training.seed=[", "not valid YAML"),
            ("distillation.beta=0.2", "distillation.beta has no effect"),
        ],
    )
    def test_error_names_the_override(self, write, override, message):
        text = refusal(write(), ["rollout.top_k=4", override])
        assert text.startswith(f"override {override!r}: ")
        assert message in text

    def test_override_repairs_the_file(self, write):
        path = write("training: {seed: -4}\n")
        assert load_config(path, ["training.seed=4"]).training.seed == 4


class TestPaths:
    def test_beside_the_file_before_the_working_directory(self, write, tmp_path, monkeypatch):
        elsewhere = tmp_path / "cwd"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        path = write()
        (elsewhere / "prompts.jsonl").touch()
        assert load_config(path).data.path == str(elsewhere / "prompts.jsonl")
        (tmp_path / "prompts.jsonl").touch()
        assert load_config(path).data.path == str(tmp_path / "prompts.jsonl")
        override = ["data.path=prompts.jsonl"]
        assert load_config(path, override).data.path == str(elsewhere / "prompts.jsonl")

    def test_a_word_is_no_path_though_there_is_a_file_of_that_name(
        self, write, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        given = {
            "teacher.payload": "hidden",
            "parallel.engine": "torch",
            "student.dtype": "float32",
        }
        for word in given.values():
            (tmp_path / word).mkdir()
        config = load_config(write(), [f"{key}={word}" for key, word in given.items()])
        assert config.teacher.payload == "hidden"
        assert (config.parallel.engine, config.student.dtype) == ("torch", "float32")

    def test_model_directory_or_hub_name(self, write, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        path = write()
        assert load_config(path).student.model_name_or_path == "org/student"
        (tmp_path / "org/student").mkdir(parents=True)
        assert load_config(path).student.model_name_or_path == str(tmp_path / "org/student")

    @pytest.mark.parametrize("name", ["./student", "models/a/b", "/no/such/model"])
    def test_model_that_is_neither_is_refused(self, write, name):
        text = refusal(write(base=BASE.replace("org/student", name)))
        assert f":2: student.model_name_or_path: no directory '{name}'" in text

    def test_template_text_is_left_alone(self, write):
        template = "{% for m in messages %}" + "x" * 5000
        config = load_config(write(), [f"data.chat_template='{template}'"])
        assert config.data.chat_template == template


class TestBatch:
    @pytest.mark.parametrize(
        ("train", "micro", "steps", "expected"),
        [
            (None, None, None, (8, 1, 4)),
            (8, 2, None, (8, 2, 2)),
            (8, None, 2, (8, 2, 2)),
            (None, 2, 2, (8, 2, 2)),
            (8, 2, 2, (8, 2, 2)),
            (None, 3, None, (6, 3, 1)),
            (None, None, 3, (6, 1, 3)),
            (4, None, None, (4, 1, 2)),
        ],
    )
    def test_what_is_left_out_is_derived(self, write, train, micro, steps, expected):
        keys = ("train_batch_size", "micro_batch_size_per_gpu", "gradient_accumulation_steps")
        given = zip(keys, (train, micro, steps), strict=True)
        overrides = [f"training.{k}={v}" for k, v in given if v is not None]
        config = load_config(write(), [*overrides, "parallel.tp=2"]).for_world(4)
        assert tuple(getattr(config.training, k) for k in keys) == expected
        assert config.for_world(4) == config

    def test_samples_per_prompt_count(self, write):
        extra = ["rollout.n_samples_per_prompt=4", "rollout.temperature=1"]
        config = load_config(write(), ["training.train_batch_size=2", *extra]).for_world(2)
        assert config.training.gradient_accumulation_steps == 4

    @pytest.mark.parametrize(
        "sizes", [(8, 3, 2), (8, 16, None), (7, 1, None), (8, None, 3), (8, 2, 2)]
    )
    def test_contradiction_names_the_numbers(self, write, sizes):
        keys = ("train_batch_size", "micro_batch_size_per_gpu", "gradient_accumulation_steps")
        given = zip(keys, sizes, strict=True)
        overrides = [f"training.{k}={v}" for k, v in given if v is not None]
        with pytest.raises(ConfigError) as caught:
            load_config(write(), overrides).for_world(4 if sizes == (8, 2, 2) else 2)
        for key, size in zip(keys, sizes, strict=True):
            if size is not None:
                assert f"{key} {size}" in str(caught.value)

    def test_tp_has_to_divide_the_ranks(self, write):
        with pytest.raises(ConfigError, match=r"parallel\.tp is 2, but the run has 3"):
            load_config(write(), ["parallel.tp=2"]).for_world(3)


# what a key needs beside it, and a value that is not its default where the rule is not enough
COMPANIONS = {
    "parallel.teacher_shard": ["parallel.engine=deepspeed"],
    "parallel.tp_by": ["parallel.engine=deepspeed"],
    "rollout.n_samples_per_prompt": ["rollout.temperature=1"],
    "distillation.beta": ["distillation.loss_type=jsd"],
    "distillation.rescale": ["distillation.loss_type=jsd"],
    "training.eval_steps": ["data.eval_path=held.jsonl"],
}
OTHER = {
    "rollout.top_p": 0.5,
    "rollout.temperature": 0.25,
    "distillation.beta": 0.25,
    "training.max_steps": 7,
    "training.adam_betas": [0.5, 0.625],
    "data.chat_template": "tokenizer",
    "deepspeed_config": {"steps_per_print": 7},
}


def other_value(row):
    name = f"{row.section}.{row.key}".lstrip(".")
    if name in OTHER:
        return OTHER[name]
    if row.allowed and row.type == "string" and "not empty" not in row.allowed:
        choices = row.allowed.split(", ")
        return next((c for c in choices if c != row.default), None)
    return {
        "string": "something",
        "string or null": "something",
        "int": 3,
        "int or null": 3,
        "float": 0.125,
        "float or null": 0.125,
        "bool": row.default == "false",
    }[row.type]


def test_every_documented_key_reaches_the_resolved_configuration(write):
    """B55: a key that is declared and never wired would not show."""
    single = set()
    for row in reference():
        name = f"{row.section}.{row.key}".lstrip(".")
        value = other_value(row)
        if value is None:
            single.add(name)
            continue
        overrides = [*COMPANIONS.get(name, []), f"{name}={json.dumps(value)}"]
        config = load_config(write(), overrides)
        shown = yaml.safe_load(config.dump())
        found = shown[row.section][row.key] if row.section else shown[row.key]
        assert found == value, name
        assert config.flat()[name] == value
        assert str(value) != row.default
    # keys with one value so far: nothing to change them to
    assert single == {"teacher.kind", "rollout.engine"}


def test_reference_covers_every_field_with_a_description():
    rows = reference()
    fields = {
        f"{name}.{key}"
        for name in ("student", "teacher", "rollout")
        for key in Config.model_fields[name].annotation.model_fields
    }
    assert fields <= {f"{r.section}.{r.key}" for r in rows}
    assert all(len(r.description) > 10 and r.description.endswith((".", ")")) for r in rows)
    seed = next(r for r in rows if r.key == "seed")
    assert (seed.section, seed.type, seed.default, seed.allowed.split(",")[0]) == (
        "training",
        "int",
        "42",
        ">= 0",
    )
    betas = next(r for r in rows if r.key == "adam_betas")
    assert (betas.type, betas.default, betas.allowed) == (
        "[float, float]",
        "[0.9, 0.999]",
        ">= 0, < 1",
    )


def test_dump_is_read_back_to_an_equal_configuration(write, tmp_path):
    overrides = ["distillation.loss_type=jsd", "distillation.beta=1e-3", "parallel.tp=2"]
    config = load_config(write(), overrides).for_world(2)
    again = tmp_path / "again.yaml"
    again.write_text(config.dump(), encoding="utf-8")
    assert load_config(again) == config


def test_settings_without_effect_are_noticed(write, caplog):
    with caplog.at_level(logging.WARNING, logger="vocabtp.opsd"):
        load_config(write(), ["rollout.top_k=3", "training.max_steps=4", "training.warmup_steps=4"])
    assert "no effect with rollout.temperature 0" in caplog.text
    assert "never reaches its peak" in caplog.text


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("2020-13-45", "no timestamp"),
        ("!!timestamp abc", "no timestamp"),
        ("!!int abc", "no int"),
        ("!!float abc", "no float"),
        ("!!bool abc", "no bool"),
        ("9" * 5000, "no int"),
    ],
)
def test_value_that_yaml_cannot_make_names_the_line(write, value, problem):
    path = write(f"training:\n  max_steps: 3\n  seed: {value}\n")
    text = refusal(path)
    assert f"{path}:9: not valid YAML" in text
    assert problem in text
    assert "quote it" in refusal(write(), [f"training.seed={value}"])


def test_numbers_and_nesting_beyond_the_parsers(write):
    path = write('{"training": {"seed": ' + "9" * 5000 + "}}", name="run.json", base="")
    assert "too many digits" in refusal(path)
    assert "quote it" in refusal(write(), ["training.seed=" + "[" * 2000])


@pytest.mark.parametrize("text", ["\\0", "\\ud800"])
@pytest.mark.parametrize(
    "key", ["data.path", "data.chat_template", "training.save_dir", "student.model_name_or_path"]
)
def test_text_that_no_file_can_hold_is_refused(write, key, text):
    section, name = key.split(".")
    values = yaml.safe_load(BASE)
    values.setdefault(section, {})[name] = "HERE"
    body = json.dumps(values).replace("HERE", "a" + text.replace("\\0", "\\u0000") + "b")
    path = write(body, name="run.json", base="")
    assert f"{path}:1: {key} must be a text without NUL" in refusal(path)
