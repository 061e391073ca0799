"""The addition example: its files are what its script makes, and its sets share no prompt."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "addition"
SETS = ("train", "heldout", "untouched")


@pytest.fixture(scope="module")
def task() -> ModuleType:
    spec = importlib.util.spec_from_file_location("addition_task", FOLDER / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, str]]]:
    texts = {name: (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8") for name in SETS}
    return {name: [json.loads(line) for line in text.splitlines()] for name, text in texts.items()}


def test_the_task_writes_the_files_that_are_there(task, tmp_path):
    sides = task.write_files(tmp_path)

    assert sum(map(len, sides.values())) == 1000 * 1000
    for name in SETS:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (FOLDER / f"{name}.jsonl").read_bytes()


def test_no_prompt_is_in_two_sets_or_twice_in_one(rows):
    prompts = [row["prompt"] for name in SETS for row in rows[name]]

    assert len(prompts) == len(set(prompts)) == 17_000


def test_each_set_holds_only_prompts_of_its_side(task, rows):
    for name in SETS:
        assert {task.side(row["prompt"]) for row in rows[name]} == {name}


def test_every_answer_is_the_sum_of_its_prompt(task, rows):
    for row in rows["train"] + rows["heldout"] + rows["untouched"]:
        a, b = (task.read_number(text) for text in row["prompt"].rstrip("=").split("+"))
        assert row == {"prompt": task.write_prompt(a, b), "answer": task.write_answer(a, b)}
        assert task.read_number(row["answer"]) == a + b


@pytest.mark.parametrize("name", ["teacher", "student"])
def test_the_tokenizer_has_one_id_a_character_and_reads_back(name, rows):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / name)
    text = rows["train"][0]["prompt"] + rows["train"][0]["answer"]

    ids = tokenizer(text)["input_ids"]

    assert tokenizer.convert_ids_to_tokens(ids) == list(text)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.eos_token_id not in (None, tokenizer.pad_token_id)
    assert len(tokenizer) == 15


def test_both_models_have_the_same_tokenizer():
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (FOLDER / "teacher" / file).read_bytes() == (FOLDER / "student" / file).read_bytes()


@torch.no_grad()
def exact_match(model, tokenizer, rows):
    tokens = torch.tensor(tokenizer([row["prompt"] for row in rows])["input_ids"])
    start = tokens.shape[1]
    for _ in range(6):
        tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1:].argmax(-1)], 1)
    answers = (
        text.split(tokenizer.eos_token)[0] for text in tokenizer.batch_decode(tokens[:, start:])
    )
    return sum(text == row["answer"] for text, row in zip(answers, rows, strict=True)) / len(rows)


def test_the_teacher_knows_the_task_and_the_student_only_begins_to(rows):
    shares = {}
    sizes = {}
    for name in ("teacher", "student"):
        model = AutoModelForCausalLM.from_pretrained(FOLDER / name)
        tokenizer = AutoTokenizer.from_pretrained(FOLDER / name)
        shares[name] = exact_match(model, tokenizer, rows["heldout"])
        sizes[name] = sum(parameter.numel() for parameter in model.parameters())
        # the head of 15 rows is cut unevenly over two ranks, the attention heads are not
        assert model.config.vocab_size % 2 == 1
        assert model.config.num_attention_heads % 2 == model.config.num_key_value_heads % 2 == 0

    assert shares["teacher"] >= 0.97
    assert 0.10 <= shares["student"] <= 0.50
    assert sizes["student"] < sizes["teacher"] / 2


def test_the_configuration_names_files_that_are_there():
    config = yaml.safe_load((FOLDER / "opsd.yaml").read_text(encoding="utf-8"))

    for path in (
        config["student"]["model_name_or_path"],
        config["teacher"]["model_name_or_path"],
        config["data"]["path"],
        config["data"]["eval_path"],
    ):
        assert (FOLDER / path).exists(), path
    assert Path(config["data"]["path"]).name == "train.jsonl"
    assert Path(config["data"]["eval_path"]).name == "heldout.jsonl"
