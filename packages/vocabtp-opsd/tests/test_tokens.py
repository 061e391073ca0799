import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from vocabtp.opsd.config import load_config
from vocabtp.opsd.data import Example
from vocabtp.opsd.errors import ConfigError, DataError, ModelError
from vocabtp.opsd.tokens import (
    compare_tokenizers,
    encode_examples,
    encode_prompt,
    load_tokenizer,
    special_ids,
    teacher_prompt,
)

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
BOS, EOS = 1, 2


def make_tokenizer(*, template=CHAT, pad=None, more=(), bos=True):
    vocab = {"<unk>": 0, "<s>": BOS, "</s>": EOS, "<pad>": 3}
    for text in [*"0123456789+=[]abcdefghijklmnopqrstuvwxyz ", *more]:
        vocab[text] = len(vocab)
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token=pad
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def configure(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "student: {model_name_or_path: a/b}\nteacher: {model_name_or_path: a/c}\n"
        "data: {path: p.jsonl}\n"
    )
    return lambda *overrides: load_config(path, overrides)


def user(text):
    return [{"role": "user", "content": text}]


def example(prompt, line=1, **fields):
    return Example(index=line - 1, line=line, prompt=prompt, fields={"prompt": prompt, **fields})


class TestOneBos:
    """B57: the tokenizer's own one-step encoding is the oracle."""

    def test_messages(self, configure):
        tokenizer = make_tokenizer()
        ids = encode_prompt(tokenizer, user("1+2="), configure())
        expected = tokenizer.apply_chat_template(
            user("1+2="), tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert ids == expected
        assert ids.count(BOS) == 1
        assert tokenizer.decode(ids[-3:]).replace(" ", "") == "[a]"

    def test_plain_text(self, configure):
        tokenizer = make_tokenizer()
        ids = encode_prompt(tokenizer, "1+2=", configure())
        assert ids == tokenizer("1+2=")["input_ids"]
        assert ids.count(BOS) == 1

    def test_plain_text_that_brings_its_own(self, configure):
        ids = encode_prompt(make_tokenizer(), "<s>1+2=", configure())
        assert ids == encode_prompt(make_tokenizer(), "1+2=", configure())

    def test_tokenizer_that_adds_none(self, configure):
        ids = encode_prompt(make_tokenizer(bos=False), "1+2=", configure())
        assert ids.count(BOS) == 0


class TestChatTemplate:
    def test_messages_without_a_template_are_an_error(self, configure):
        with pytest.raises(ConfigError, match=r"no chat template: set data\.chat_template"):
            encode_prompt(make_tokenizer(template=None), user("1"), configure())

    def test_so_is_the_tokenizers_own_where_it_has_none(self, configure):
        config = configure("data.chat_template=tokenizer")
        with pytest.raises(ConfigError, match=r"chat_template is `tokenizer`, but .* has none"):
            encode_prompt(make_tokenizer(template=None), "1+2=", config)

    def test_plain_text_needs_none(self, configure):
        assert encode_prompt(make_tokenizer(template=None), "1", configure())

    def test_tokenizer_makes_each_string_a_user_message(self, configure):
        tokenizer = make_tokenizer()
        config = configure("data.chat_template=tokenizer")
        assert encode_prompt(tokenizer, "1+2=", config) == encode_prompt(
            tokenizer, user("1+2="), config
        )

    def test_own_template_as_text_and_as_file(self, configure, tmp_path):
        tokenizer = make_tokenizer(template=None)
        source = "{% for m in messages %}{{ m.content }}=={% endfor %}"
        file = tmp_path / "own.jinja"
        file.write_text(source)
        ids = tokenizer("1==", add_special_tokens=False)["input_ids"]
        for value in (source, str(file)):
            config = configure(f"data.chat_template={json.dumps(value)}")
            assert encode_prompt(tokenizer, user("1"), config) == ids
            assert encode_prompt(tokenizer, "1", config) == ids

    def test_neither_template_nor_file(self, configure):
        config = configure("data.chat_template=none.jinja")
        with pytest.raises(ConfigError, match="is no Jinja template, and no file"):
            encode_prompt(make_tokenizer(), "1", config)

    def test_template_that_refuses_is_an_error_of_the_line(self, configure):
        tokenizer = make_tokenizer(template="{{ raise_exception('no system role') }}")
        rows = [example(user("1"), line=4)]
        with pytest.raises(DataError, match=r"p:4: the chat template refuses it: no system role"):
            encode_examples(tokenizer, rows, configure(), path="p")


class TestTeacherPrompt:
    def test_null_is_the_students(self, configure):
        tokenizer, config = make_tokenizer(), configure()
        row = example("1+2=")
        assert teacher_prompt(tokenizer, row, config) == encode_prompt(tokenizer, "1+2=", config)
        assert encode_examples(tokenizer, [row], config, path="p")[2] is None

    def test_fields_are_filled_in(self, configure):
        tokenizer = make_tokenizer()
        config = configure("teacher.prompt_template='a {solution} b {prompt}'")
        row = example("1+2=", solution="3{x}")
        expected = encode_prompt(tokenizer, "a 3{x} b 1+2=", config)
        assert teacher_prompt(tokenizer, row, config) == expected
        used, ids, theirs = encode_examples(tokenizer, [row], config, path="p")
        assert (used, theirs) == ([row], [expected])
        assert ids == [encode_prompt(tokenizer, "1+2=", config)]

    def test_last_user_message_is_replaced(self, configure):
        tokenizer = make_tokenizer()
        config = configure("teacher.prompt_template='{prompt} is {answer}'")
        messages = [*user("x"), {"role": "assistant", "content": "y"}, *user("1+2=")]
        row = example(messages, answer=3)
        assert teacher_prompt(tokenizer, row, config) == encode_prompt(
            tokenizer, [*messages[:2], *user("1+2= is 3")], config
        )
        assert messages[-1]["content"] == "1+2="

    def test_unknown_placeholder_is_named(self, configure):
        config = configure("teacher.prompt_template='{solutoin} {prompt}'")
        rows = [example("1", solution="s")]
        with pytest.raises(ConfigError, match=r"names \{solutoin\}.*prompt, solution"):
            encode_examples(make_tokenizer(), rows, config, path="p")

    def test_row_without_the_field_is_an_error_of_its_line(self, configure):
        config = configure("teacher.prompt_template='{solution}'")
        rows = [example("1", solution="s"), example("2", line=2), example("3", 3, solution=None)]
        with pytest.raises(DataError) as caught:
            encode_examples(make_tokenizer(), rows, config, path="p")
        assert "p:2: the field 'solution' of teacher.prompt_template is missing" in str(
            caught.value
        )
        assert "p:3: the field 'solution' of teacher.prompt_template is no text" in str(
            caught.value
        )


class TestTooLong:
    def rows(self):
        return [example("1"), example("1" * 8, line=2), example("12", line=5)]

    def test_refused_with_line_and_lengths(self, configure):
        config = configure("rollout.max_prompt_length=8")
        with pytest.raises(DataError) as caught:
            encode_examples(make_tokenizer(), self.rows(), config, path="p")
        assert "p:2: the prompt has 9 tokens, rollout.max_prompt_length is 8" in str(caught.value)

    def test_skipped_rows_close_up(self, configure):
        config = configure("rollout.max_prompt_length=8", "data.on_error=skip")
        used, ids, _ = encode_examples(make_tokenizer(), self.rows(), config, path="p")
        assert [(e.index, e.line) for e in used] == [(0, 1), (1, 5)]
        assert [len(i) for i in ids] == [2, 3]

    def test_exactly_the_limit_is_used(self, configure):
        config = configure("rollout.max_prompt_length=9")
        assert len(encode_examples(make_tokenizer(), self.rows(), config, path="p")[0]) == 3


class TestSpecialIds:
    def test_no_pad_token_uses_the_end_token(self):
        """B31, B57"""
        specials = special_ids(make_tokenizer())
        assert (specials.eos_ids, specials.pad_id) == ((EOS,), EOS)

    def test_pad_token_is_used(self):
        assert special_ids(make_tokenizer(pad="<pad>")).pad_id == 3

    @pytest.mark.parametrize("more", [5, [5, 2, 7], None])
    def test_ends_of_the_generation_configuration_count(self, more):
        specials = special_ids(make_tokenizer(), GenerationConfig(eos_token_id=more))
        expected = {EOS} | ({5, 7} if isinstance(more, list) else {more} - {None})
        assert specials.eos_ids == tuple(sorted(expected))

    @pytest.mark.parametrize("odd", ["</s>", [2, None, "x"], True, 1.5])
    def test_end_that_is_no_id_is_an_error(self, odd):
        ends = GenerationConfig()
        ends.eos_token_id = odd
        with pytest.raises(ModelError, match="eos_token_id must be a whole number"):
            special_ids(make_tokenizer(), ends)

    def test_no_end_at_all_is_an_error(self):
        tokenizer = make_tokenizer()
        tokenizer.eos_token = None
        with pytest.raises(ModelError, match="names an end token"):
            special_ids(tokenizer)
        assert special_ids(tokenizer, GenerationConfig(eos_token_id=9)).pad_id == 9

    def test_number_of_ids(self):
        """B27: an added token counts, and so would a gap below it."""
        tokenizer = make_tokenizer()
        n = len(tokenizer)
        assert special_ids(tokenizer).vocab == n
        tokenizer.add_tokens(["extra"])
        assert special_ids(tokenizer).vocab == n + 1


class TestCompare:
    def test_equal(self):
        compare_tokenizers(make_tokenizer(), make_tokenizer(template=None, pad="<pad>"))

    def test_first_differing_id_with_both_tokens(self):
        with pytest.raises(ModelError) as caught:
            compare_tokenizers(
                make_tokenizer(more=["x1", "x2", "x3"]), make_tokenizer(more=["x1", "y2", "y3"])
            )
        n = len(make_tokenizer())
        assert f"differ at 2 id(s), first at id {n + 1}: 'x2' and 'y2'" in str(caught.value)

    def test_one_id_more(self):
        more = make_tokenizer()
        more.add_tokens(["extra"])
        for pair, shown in (
            ((more, make_tokenizer()), "'extra' and no token"),
            ((make_tokenizer(), more), "no token and 'extra'"),
        ):
            with pytest.raises(ModelError, match=shown):
                compare_tokenizers(*pair)


def test_tokenizer_from_disk_and_none_there(tmp_path, configure):
    make_tokenizer().save_pretrained(tmp_path / "good")
    loaded = load_tokenizer(tmp_path / "good")
    assert encode_prompt(loaded, user("1+2="), configure()) == encode_prompt(
        make_tokenizer(), user("1+2="), configure()
    )
    (tmp_path / "bad").mkdir()
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path / "bad")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'bad'}: cannot load the tokenizer: ")
