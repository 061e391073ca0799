"""Keys and values that are refused: by name, line and rule, with the nearest valid key."""

import pytest

from config_files import refusal
from vocabtp.opsd.config import load_config


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
def test_unknown_key_names_file_line_and_nearest_key(write_config, extra, line, key, hint):
    path = write_config(extra)
    text = refusal(path)
    assert text.startswith(f"{path}:{line}: unknown key {key}: ")
    assert hint in text


def test_key_that_resembles_none_gets_the_list(write_config):
    assert "parallel has tp, engine" in refusal(write_config("parallel:\n  qqqq: 1\n"))
    assert "the sections are student, teacher" in refusal(write_config("qqqq: 1\n"))


def test_two_unknown_keys_count_the_rest(write_config):
    text = refusal(write_config("training:\n  aaa: 1\nrollout:\n  bbb: 2\n"))
    assert ":8: unknown key training.aaa" in text
    assert "1 more unknown key" in text


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
def test_wrong_value_names_key_line_rule_and_value(write_config, extra, message):
    path = write_config(extra + "\n")
    text = refusal(path)
    assert message in text
    line = 8 if "\n" in extra else 7
    assert text.startswith(f"{path}:{line}: ")


def test_a_float16_student_is_refused(write_config):
    # there is no loss scaling: gradients below 6e-8 would be lost without a word
    text = refusal(write_config(), ["student.dtype=float16"])
    assert text.startswith("override 'student.dtype=float16': student.dtype must be bfloat16 or")
    assert load_config(write_config(), ["teacher.dtype=float16"]).teacher.dtype == "float16"


def test_layers_are_compiled_by_the_torch_engine(write_config):
    text = refusal(write_config("parallel: {engine: deepspeed}\n"), ["training.compile=true"])
    assert "training.compile does not go with parallel.engine deepspeed" in text


def test_template_rules(write_config):
    def told(template):
        return refusal(write_config(), [f"teacher.prompt_template='{template}'"])

    assert "only plain field names" in told("{prompt.x}")
    assert "only plain field names" in told("{}")
    assert "only plain field names" in told("{prompt!r}")
    assert "is no template" in told("{prompt")
    assert load_config(write_config(), ["teacher.prompt_template='a {{b}} {prompt}'"]).teacher


def test_missing_key_says_so(write_config):
    path = write_config(base="student: {model_name_or_path: a/b}\nteacher: {}\n")
    text = refusal(path)
    assert "is missing; it has no default" in text
    assert "data is missing" in text or "teacher.model_name_or_path is missing" in text


class TestOverrides:
    def test_value_is_a_yaml_scalar_and_the_last_one_wins(self, write_config):
        config = load_config(
            write_config("training: {seed: 5}\n"),
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
    def test_error_names_the_override(self, write_config, override, message):
        text = refusal(write_config(), ["rollout.top_k=4", override])
        assert text.startswith(f"override {override!r}: ")
        assert message in text

    def test_override_repairs_the_file(self, write_config):
        path = write_config("training: {seed: -4}\n")
        assert load_config(path, ["training.seed=4"]).training.seed == 4
