"""Rollouts over cut heads against the whole model's `generate`, and across layouts."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

import vocabtp.opsd.rollout as rollout_module
from tiny_models import tiny_model
from vocabtp.opsd.loading import place_model
from vocabtp.opsd.parallel import Layout, make_layout
from vocabtp.opsd.rollout import generate

PROMPTS = [[5, 2, 6], [9, 1, 4, 8, 7, 3, 11, 2, 30, 31, 12], [20], [3, 3, 3, 17, 36, 1, 0]]
CASES = [(kind, tied) for kind in ("qwen2", "qwen3", "llama", "gemma2", "gpt2") for tied in (0, 1)]


def settings(**changes):
    defaults = {"max_response_length": 20, "temperature": 0.0, "top_p": 1.0, "top_k": -1}
    return SimpleNamespace(**(defaults | {"n_samples_per_prompt": 1} | changes))


def specials(**changes):
    return SimpleNamespace(**({"eos_ids": (2,), "pad_id": 2, "vocab": 37} | changes))


def answer(model, prompts=PROMPTS, ids=None, seed=7, step=3, special=None, stop=None, **changes):
    ids = list(range(len(prompts))) if ids is None else ids
    return generate(
        model,
        prompts,
        ids,
        config=settings(**changes),
        specials=special or specials(),
        seed=seed,
        step=step,
        stop=stop,
    )


def _stopped(rank, world):
    rollout_module._STOP_EVERY = 4
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    model = place_model(tiny_model("llama"), layout, name="llama", trainable=True)
    asked = []

    def stop():
        asked.append(1)
        return rank == 1 and len(asked) == 2

    found = answer(model, special=specials(eos_ids=()), stop=stop)
    return found.response_lengths, found.truncated, len(asked)


def test_all_peers_stop_answering_when_one_asks(ranks):
    assert ranks(_stopped, 2) == [([8] * 4, [True] * 4, 2)] * 2


def whole_generate(module, prompts, n):
    """The library's own greedy answers on the whole model, the end token included."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    options = {"do_sample": False, "max_new_tokens": n, "eos_token_id": 2, "pad_token_id": 0}
    out = module.generate(input_ids=tokens, attention_mask=mask, **options)[:, width:].tolist()
    return [row[: row.index(2) + 1] if 2 in row else row for row in out]


def _greedy(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    torch.manual_seed(rank)
    seen = {}
    for kind, tied in CASES:
        dense, other = tiny_model(kind, tied=bool(tied)), tiny_model(kind, tied=bool(tied))
        expected = whole_generate(dense, PROMPTS, 20)
        model = place_model(other, layout, name=kind, trainable=True)
        model.module.train()
        result = answer(model)
        assert result.responses() == expected, (kind, tied)
        assert all(part.training for part in model.module.modules())
        assert result.truncated == [row[-1] != 2 for row in expected]
        assert result.response_lengths == [len(row) for row in expected]
        seen[kind, tied] = sorted(len(row) for row in expected)
    return seen


def test_greedy_equals_generate_of_the_whole_model(ranks):
    lengths = ranks(_greedy, 2, limit=120)[0]
    # the cases must hold answers that end early beside answers that are cut
    assert any(len(set(case)) > 1 and case[-1] == 20 for case in lengths.values())
    _greedy(0, 1)


SAMPLING = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 8, "top_p": 0.7, "n_samples_per_prompt": 2},
    {"temperature": 0.0},
]
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6}


def _layouts(rank, world, tp):
    torch.manual_seed(1000 * rank + 1)  # must not matter
    layout = make_layout(SimpleNamespace(tp=tp, device="cpu", shard="none"))
    model = place_model(tiny_model("qwen3", **SIX_HEADS), layout, name="m", trainable=True)
    mine = slice(layout.dp_rank * 4 // layout.dp, (layout.dp_rank + 1) * 4 // layout.dp)
    out = []
    for case in SAMPLING:
        result = answer(model, PROMPTS[mine], [0, 10, 20, 31][mine], **case)
        out.append((result.responses(), result.truncated, result.sample_ids))
    return out


def test_equal_tokens_at_every_layout(ranks):
    """B60 and the trainer's rule: noise depends on (seed, step, sample, position, id) alone."""
    alone = _layouts(0, 1, 1)
    assert len({str(case) for case in alone}) == len(SAMPLING)
    for world, tp in ((2, 2), (3, 3), (2, 1), (4, 2)):
        results = ranks(_layouts, world, tp, limit=120)
        for first in range(0, world, tp):
            assert all(results[first + peer] == results[first] for peer in range(tp))
        copies = results[::tp]
        for case, expected in enumerate(alone):
            parts = zip(*(copy[case] for copy in copies), strict=True)
            joined = [list(itertools.chain(*part)) for part in parts]
            assert tuple(joined) == expected, (world, tp, SAMPLING[case])


def test_noise_differs_between_seeds_steps_samples_and_positions():
    model = place_model(tiny_model("llama"), Layout(), name="m", trainable=True)
    base = answer(model, temperature=2.0).responses()
    assert answer(model, temperature=2.0).responses() == base
    assert answer(model, temperature=2.0, seed=8).responses() != base
    assert answer(model, temperature=2.0, step=4).responses() != base
    same = answer(model, [PROMPTS[0]] * 2, [0, 1], temperature=2.0).responses()
    assert same[0] == base[0]
    assert same[1] != same[0]
    twice = answer(model, [PROMPTS[0]], [0], temperature=2.0, n_samples_per_prompt=2)
    assert twice.responses() == same
    assert twice.sample_ids == [0, 1]
    # flat logits: a key that ignored the position would repeat one token
    with torch.no_grad():
        model.module.get_output_embeddings().weight.zero_()
    assert len(set(answer(model, [[5]], [0], temperature=1.0).responses()[0])) > 5


def test_another_batch_mate_changes_nothing():
    model = place_model(tiny_model("qwen2"), Layout(), name="m", trainable=True)
    for changes in ({}, {"temperature": 1.0}):
        together = answer(model, **changes).responses()
        alone = [answer(model, [p], [i], **changes).responses()[0] for i, p in enumerate(PROMPTS)]
        assert together == alone


def _ties(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    module = tiny_model("llama")
    with torch.no_grad():
        rows = module.get_output_embeddings().weight
        rows[5] = rows[30] = 1000 * rows[5]
        rows[6] = rows[31] = -rows[5]
    model = place_model(module, layout, name="m", trainable=True)
    return answer(model, special=specials(eos_ids=())).responses()


def test_ties_over_shards_go_to_the_lower_id(ranks):
    """B60: ids 5 and 30, or 6 and 31, always share the top logit."""
    first, second = ranks(_ties, 2)
    assert first == second == _ties(0, 1)
    assert {token for row in first for token in row} == {5, 6}


def greedy_over(module, prompt, usable, n):
    """By hand: the whole sequence forward for each token, the best of the first columns."""
    tokens = list(prompt)
    for _ in range(n):
        logits = module(torch.tensor([tokens])).logits[0, -1, :usable]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def _beyond(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))

    def module():
        made = tiny_model("llama")
        with torch.no_grad():
            rows = made.get_output_embeddings().weight
            rows[36] = 1000 * rows[36]
            rows[35] = -rows[36]
        return made

    model, dense = place_model(module(), layout, name="m", trainable=True), module()
    for usable in (35, 19, 8):
        special = specials(eos_ids=(), vocab=usable)
        expected = [greedy_over(dense, p, usable, 6) for p in PROMPTS]
        greedy = answer(model, special=special, max_response_length=6).responses()
        assert greedy == expected, usable
        for case in SAMPLING[:4]:
            drawn = answer(model, special=special, max_response_length=6, **case).responses()
            assert max(token for row in drawn for token in row) < usable
    # without the tokenizer's limit the columns beyond it would win
    free = answer(model, special=specials(eos_ids=()), max_response_length=6).responses()
    assert {token for row in free for token in row} <= {35, 36}


def test_ids_beyond_the_tokenizer_are_never_picked(ranks):
    """B27."""
    ranks(_beyond, 2)
    _beyond(0, 1)


def _disagreeing(rank, world, what):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    model = place_model(tiny_model("llama"), layout, name="m", trainable=True)
    pick = rollout_module.vocab_parallel_sample
    calls = []

    def differently(*args, **options):
        calls.append(1)
        token = pick(*args, **options)
        # the last position of the first row, so that both ranks decode equally long
        return token + torch.tensor([1, 0, 0, 0]) if len(calls) == 8 and rank == 1 else token

    rollout_module.vocab_parallel_sample = differently
    prompts = [list(p) for p in PROMPTS]
    if what == "prompts" and rank == 1:
        prompts[2] = [21]
    expected = {
        "tokens": "rollout of .* tokens must be the same",
        "prompts": "inputs of .* prompts",
    }
    with pytest.raises(ValueError, match=expected[what]) as caught:
        answer(
            model,
            prompts,
            special=specials(eos_ids=()),
            temperature=1.0,
            max_response_length=8 if what == "tokens" else 2,
        )
    return str(caught.value)


@pytest.mark.parametrize("what", ["tokens", "prompts"])
def test_peers_that_disagree_raise_on_every_rank(ranks, what):
    """B60."""
    first, second = ranks(_disagreeing, 2, what)
    assert first == second


def _empty_prompt(rank, world):
    layout = make_layout(SimpleNamespace(tp=world, device="cpu", shard="none"))
    model = place_model(tiny_model("llama"), layout, name="m", trainable=True)
    with pytest.raises(ValueError, match="a prompt has no token"):
        answer(model, [[4], []] if rank == 1 else [[4], [5]])


def test_a_prompt_without_tokens_is_refused_on_every_rank(ranks):
    ranks(_empty_prompt, 2)


def test_masks_come_from_lengths_when_pad_is_end(monkeypatch):
    """B31, and the same with an end token inside the prompt of a row that is not cut."""
    script = iter([[7, 7], [8, 7], [2, 7], [9, 7], [9, 7]])
    monkeypatch.setattr(
        rollout_module, "vocab_parallel_argmax", lambda *_: torch.tensor(next(script))
    )
    model = place_model(tiny_model("llama"), Layout(), name="m", trainable=True)
    result = answer(model, [[5, 2, 6], [4, 2, 2, 3]], max_response_length=5)
    assert result.tokens.tolist() == [[2, 5, 2, 6, 7, 8, 2, 2, 2], [4, 2, 2, 3, 7, 7, 7, 7, 7]]
    assert result.attention_mask.tolist() == [[0, 1, 1, 1, 1, 1, 1, 0, 0], [1] * 9]
    assert result.response_mask.long().tolist() == [
        [0, 0, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1, 1],
    ]
    assert result.response_lengths == [3, 5]
    assert result.truncated == [False, True]
    assert result.responses() == [[7, 8, 2], [7] * 5]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_prompt_that_fills_the_context_gets_an_empty_answer(kind):
    """B37's input: the context of 64 leaves room for 0, 2 and 5 tokens."""
    model = place_model(tiny_model(kind), Layout(), name="m", trainable=True)
    full, nearly, short = [3] * 64, [4] * 62, [5, 6]
    special = specials(eos_ids=())
    result = answer(model, [full, nearly, short], special=special, max_response_length=5)
    assert result.response_lengths == [0, 2, 5]
    assert result.truncated == [True] * 3
    assert result.response_mask.sum(1).tolist() == [0, 2, 5]
    assert result.responses()[2] == greedy_over(tiny_model(kind), short, 37, 5)
    alone = answer(model, [full], special=special)
    assert alone.tokens.tolist() == [full]
    assert alone.responses() == [[]]
    logits = model.response_logits(alone.tokens, alone.attention_mask, alone.response_mask)
    assert logits.shape == (0, 37)
    assert answer(model, [], special=special).tokens.shape == (0, 0)


def test_rows_cut_off_the_padding_of_the_others():
    model = place_model(tiny_model("llama"), Layout(), name="m", trainable=False)
    result = answer(model, temperature=1.5)
    assert len(set(result.response_lengths)) > 1
    whole = model.response_logits(result.tokens, result.attention_mask, result.response_mask)
    parts = []
    for start, stop in ((0, 1), (1, 2), (2, 4)):
        part = result.rows(start, stop)
        assert part.responses() == result.responses()[start:stop]
        width = max(part.prompt_lengths) + max(part.response_lengths)
        assert part.tokens.shape == (stop - start, width)
        parts.append(model.response_logits(part.tokens, part.attention_mask, part.response_mask))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)


def test_gradients_stay_on_and_every_end_id_ends():
    model = place_model(tiny_model("llama"), Layout(), name="m", trainable=True)
    plain = answer(model, special=specials(eos_ids=()))
    assert torch.is_grad_enabled()
    assert plain.truncated == [True] * 4
    token = plain.responses()[0][4]
    ended = answer(model, special=specials(eos_ids=(2, token)))
    for before, after, cut in zip(
        plain.responses(), ended.responses(), ended.truncated, strict=True
    ):
        ends = [at for at, t in enumerate(before) if t in (2, token)]
        assert after == (before[: ends[0] + 1] if ends else before)
        assert cut == (not ends)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_what_attention_makes_of_padding_reaches_no_answer(monkeypatch, kind):
    """Padding before a prompt sees no key: kernels may answer such rows with any number."""
    window = {"sliding_window": 5} if kind == "mistral" else {}
    model = place_model(tiny_model(kind, **window), Layout(), name="m", trainable=True)
    expected = answer(model).responses()
    attend, empty = torch.nn.functional.scaled_dot_product_attention, []

    def attend_and_spoil(query, key, value, attn_mask=None, **options):
        out = attend(query, key, value, attn_mask=attn_mask, **options)
        if attn_mask is None:
            return out
        rows = ~attn_mask.any(dim=-1, keepdim=True)
        empty.append(int(rows.sum()))
        return out.masked_fill(rows, 1e4)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend_and_spoil)
    assert answer(model).responses() == expected
    assert sum(empty) > 0
