import math

import pytest
import torch
import torch.distributed as dist

from vocabtp.dist import VocabShard, sampling_keys, vocab_parallel_argmax, vocab_parallel_sample
from vocabtp.dist._order import pack, unpack
from vocabtp.dist.testing import layouts, piece

INF = math.inf
NAN = math.nan
OPTIONS = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k above a shard": {"top_k": 11},
    "top_k all": {"top_k": 100},
    "top_p": {"top_p": 0.8},
    "top_p small": {"top_p": 1e-9},
    "top_p hot": {"top_p": 0.6, "temperature": 2.0},
    "min_p": {"min_p": 0.3},
    "all": {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    "top_p and min_p": {"top_p": 0.95, "min_p": 0.2},
}


def _logits(rows=24, vocab=17, dtype=torch.float32):
    g = torch.Generator().manual_seed(5)
    x = (torch.randn(rows, vocab, generator=g) * 3).to(dtype)
    x[0] = 0.0
    x[1] = torch.where(torch.arange(vocab) % 2 == 0, -0.0, 0.0)
    x[2] = -INF
    x[3] = -INF
    x[3, -1] = -5.0
    x[4, 3:] = -INF
    x[5] = x[5].round()  # ties
    x[6, ::3] = 2.0
    x[7, 4] = NAN
    x[8] = NAN
    x[9, -2] = INF
    x[10] = NAN
    x[10, 6] = -3.0
    x[11] += 1e4
    return x


def _dense_argmax(x):
    """The lowest id among the largest numbers of a row, by a plain loop."""
    out = []
    for row in x.float().tolist():
        numbers = [-INF if v != v else v for v in row]
        out.append(numbers.index(max(numbers)))
    return torch.tensor(out)


def _kept(row, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """Filters over one row by their definition, fp64: {id: probability}."""
    order = sorted((i for i, v in enumerate(row) if v > -INF), key=lambda i: (-row[i], i))
    order = order[:top_k]
    w = {i: math.exp((row[i] - row[order[0]]) / temperature) for i in order}
    if top_p is not None:
        total, mass, last = sum(w.values()), 0.0, 0
        for last, i in enumerate(order):  # noqa: B007
            mass += w[i]
            if mass >= top_p * total:
                break
        order = order[: last + 1]
    if min_p is not None:
        order = [i for i in order if w[i] >= min_p * w[order[0]]]
    total = sum(w[i] for i in order)
    return {i: w[i] / total for i in order}


def test_order_is_by_value_then_by_lowest_id():
    values = torch.tensor([3.0, 3.0, -0.0, 0.0, 1e-45, -1e-45, -INF, INF, -2.5, 65504.0])
    ids = torch.arange(10)
    packed = pack(values, ids)
    assert packed.argsort(descending=True).tolist() == [7, 9, 0, 1, 4, 2, 3, 5, 8, 6]
    back, same_ids = unpack(packed)
    assert torch.equal(back, values + 0.0)
    assert torch.equal(same_ids, ids)
    assert pack(torch.tensor(1.0), torch.tensor(2**32 - 2)) > torch.iinfo(torch.int64).min


def test_argmax_of_one_process():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = _logits(dtype=dtype)
        assert torch.equal(vocab_parallel_argmax(x), _dense_argmax(x)), dtype
    x = _logits()
    good = x.nan_to_num(nan=-INF, posinf=INF, neginf=-INF)
    assert torch.equal(vocab_parallel_argmax(x), good.argmax(-1))
    assert vocab_parallel_argmax(x.view(2, 12, 17)).shape == (2, 12)
    assert vocab_parallel_argmax(x[3]).item() == 16
    assert vocab_parallel_argmax(x[:0]).shape == (0,)
    assert torch.equal(vocab_parallel_argmax(x[::2, 1:9]), _dense_argmax(x[::2, 1:9]))
    # fp64 that differ below fp32 are equal: the lower id wins, as on any other cut
    close = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    assert vocab_parallel_argmax(close).item() == 0


def _all_layouts(rank, world, x, keys):
    """Every layout, dtype and option on this rank's group: {name: ids}."""
    out = {}
    cuts = layouts(x.shape[-1], world)
    for cut in cuts if world == 3 else ("even", "empty first"):
        bounds = cuts[cut]
        start, end = bounds[rank]
        shard = VocabShard(start, end, x.shape[-1], dist.group.WORLD).check()
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            local = piece(x.to(dtype), bounds[rank])
            name = f"{cut} {dtype}"
            out[f"{name} argmax"] = vocab_parallel_argmax(local, shard)
            for option in OPTIONS if dtype is torch.float32 else ("plain", "all"):
                values = OPTIONS[option]
                out[f"{name} {option}"] = vocab_parallel_sample(local, shard, keys=keys, **values)
        # views: a transposed leading dimension, and columns of a wider buffer
        wide = torch.full((4, 6, end - start + 3), NAN)
        wide[..., 1:-2] = x.view(6, 4, -1).transpose(0, 1)[..., start:end]
        view = wide[..., 1:-2].transpose(0, 1)
        k = keys.view(6, 4)
        out[f"{cut} view argmax"] = vocab_parallel_argmax(view, shard).flatten()
        out[f"{cut} view all"] = vocab_parallel_sample(
            view, shard, keys=k, **OPTIONS["all"]
        ).flatten()
        out[f"{cut} view top_p"] = vocab_parallel_sample(view, shard, keys=k, top_p=0.8).flatten()
        none = vocab_parallel_sample(piece(x[:0], bounds[rank]), shard, keys=keys[:0], top_p=0.5)
        assert none.shape == vocab_parallel_argmax(local[:0], shard).shape == (0,)
    return out


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_layout_picks_the_same_tokens(ranks, world):
    x = _logits()
    keys = sampling_keys(7, 3, torch.arange(24))
    for result in ranks(_all_layouts, world, x, keys):
        for name, ids in result.items():
            dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
            option = name.split(" view ")[-1].split("float32 ")[-1]
            option = option.split("bfloat16 ")[-1].split("float64 ")[-1]
            if option == "argmax":
                expected = _dense_argmax(x.to(dtype))
            else:
                expected = vocab_parallel_sample(x.to(dtype), keys=keys, **OPTIONS[option])
            assert torch.equal(ids, expected), name


@pytest.mark.parametrize("option", OPTIONS)
def test_only_tokens_that_the_filters_keep_are_drawn(option):
    """400 draws of each row: inside the set of the definition, and all of its likely members."""
    x = _logits()
    x[9] = x[12]  # no +inf in the definition above
    draws = 400
    keys = sampling_keys(torch.arange(draws)[:, None], torch.arange(24))
    ids = vocab_parallel_sample(x.expand(draws, -1, -1), keys=keys, **OPTIONS[option])
    for row in range(24):
        clean = [-INF if v != v else v for v in x[row].tolist()]
        drawn = set(ids[:, row].tolist())
        if max(clean) == -INF:
            assert drawn == {0}
            continue
        kept = _kept(clean, **OPTIONS[option])
        assert drawn <= set(kept), (row, option)
        likely = {i for i, p in kept.items() if p > 0.05}
        assert likely <= drawn, (row, option)


def _chi_square(counts, probabilities):
    """The statistic and its degrees of freedom."""
    expected = probabilities * counts.sum()
    live = expected > 0
    assert counts[~live].sum() == 0
    return ((counts - expected)[live] ** 2 / expected[live]).sum().item(), int(live.sum()) - 1


def _draws(rank, world, x, draws, options):
    shard = VocabShard.even(x.shape[-1], dist.group.WORLD)
    local = piece(x, (shard.start, shard.end)).expand(draws, -1)
    keys = sampling_keys(11, torch.arange(draws))
    return vocab_parallel_sample(local, shard, keys=keys, **options).bincount(minlength=len(x))


@pytest.mark.parametrize("option", ["plain", "hot", "all", "top_p and min_p"])
def test_draws_follow_the_dense_softmax(ranks, option):
    """Equal shards: one noise for all ranks, a real mistake, shows at four equal shards only."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(36, generator=g) * 1.5
    kept = _kept(x.tolist(), **OPTIONS[option])
    p = torch.zeros(36, dtype=torch.float64)
    p[list(kept)] = torch.tensor(list(kept.values()), dtype=torch.float64)
    counts = ranks(_draws, 4, x, 20_000, OPTIONS[option])
    assert all(torch.equal(c, counts[0]) for c in counts)
    chi, df = _chi_square(counts[0].double(), p)
    # mean df, variance 2 df: five deviations
    assert chi < df + 5 * math.sqrt(2 * df), (chi, df)


def test_rare_tokens_are_drawn_as_often_as_they_should():
    """One token of logit 12 among 150,000 of logit 0: p = 0.52; the tail of the noise matters."""
    vocab, draws = 150_000, 100
    x = torch.zeros(vocab)
    x[77] = 12.0
    p = math.exp(12) / (math.exp(12) + vocab - 1)
    hits = 0
    for i in range(0, draws, 50):
        keys = sampling_keys(5, torch.arange(i, i + 50))
        ids = vocab_parallel_sample(x.expand(50, -1), keys=keys)
        hits += int((ids == 77).sum())
    assert abs(hits - draws * p) < 5 * math.sqrt(draws * p * (1 - p))


def test_draws_of_different_keys_are_independent_and_equal_keys_repeat():
    x = torch.zeros(2000, 4)
    keys = sampling_keys(0, torch.arange(2000))
    state = torch.get_rng_state()
    first = vocab_parallel_sample(x, keys=keys)
    torch.manual_seed(99)  # ranks' own generators play no part, nor are they moved
    assert torch.equal(first, vocab_parallel_sample(x, keys=keys))
    torch.set_rng_state(state)
    vocab_parallel_sample(x, keys=keys, top_k=2)
    assert torch.equal(torch.get_rng_state(), state)
    for other in (keys + 1, sampling_keys(1, torch.arange(2000)), keys ^ (1 << 63) - 1):
        second = vocab_parallel_sample(x, keys=other)
        pairs = (first * 4 + second).bincount(minlength=16).double()
        chi, df = _chi_square(pairs, torch.full((16,), 1 / 16, dtype=torch.float64))
        assert chi < df + 5 * math.sqrt(2 * df)


def test_sampling_keys_depend_on_every_part_and_on_their_order():
    rows = torch.arange(50)
    keys = torch.cat(
        [sampling_keys(*p) for p in [(1, 2, rows), (2, 1, rows), (1, rows), (rows, 1)]]
    )
    assert keys.dtype == torch.int64
    # (1, rows) and (rows, 1) share rows = 1 alone
    assert len(keys.unique()) == 199
    assert sampling_keys(2**64 + 3).item() == sampling_keys(3).item() != sampling_keys(-3).item()
    assert sampling_keys(0, rows[:, None], rows).shape == (50, 50)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 0}, "temperature must be a finite number > 0, got 0; use vocab_parallel"),
        ({"temperature": NAN}, "temperature must be"),
        ({"temperature": INF}, "temperature must be"),
        ({"top_k": 0}, "top_k must be an int >= 1 or None"),
        ({"top_k": 2.5}, "top_k must be an int"),
        ({"top_k": INF}, "top_k must be an int"),
        ({"temperature": 10**400}, "temperature must be a number that a float can hold"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": NAN}, "top_p must be in"),
        ({"top_p": 1.1}, "top_p must be in"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\]"),
        ({"min_p": NAN}, "min_p must be in"),
        ({"keys": torch.arange(3)}, r"one entry a row, \[2\], got \[3\]"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(ValueError, match=f"^vocab_parallel_sample: .*{says}"):
        vocab_parallel_sample(torch.zeros(2, 4), **{"keys": torch.arange(2), **options})


def test_wrong_types_and_shards_are_refused():
    x, keys = torch.zeros(2, 4), torch.arange(2)
    with pytest.raises(TypeError, match=r"keys must be an int64 tensor, got torch\.int32"):
        vocab_parallel_sample(x, keys=keys.int())
    with pytest.raises(TypeError, match="keys must be an int64 tensor, got list"):
        vocab_parallel_sample(x, keys=[1, 2])
    for option in ("temperature", "top_k", "top_p", "min_p"):
        for bad in ("a", True, [1], torch.tensor(1)):
            with pytest.raises(TypeError, match=f"^vocab_parallel_sample: {option} must be a num"):
                vocab_parallel_sample(x, keys=keys, **{option: bad})
    for call in (vocab_parallel_argmax, lambda *a: vocab_parallel_sample(*a, keys=keys)):
        with pytest.raises(TypeError, match=r"floating-point, got torch\.int64"):
            call(x.long())
        with pytest.raises(TypeError, match="shard must be a VocabShard, got tuple"):
            call(x, (0, 4))
        with pytest.raises(ValueError, match="the vocabulary is empty"):
            call(x[:, :0])
        with pytest.raises(ValueError, match=r"has 4 columns, but the shard is columns \[0, 3\)"):
            call(x, VocabShard(0, 3, 3))
        with pytest.raises(ValueError, match="these look like gathered logits"):
            call(x, VocabShard(0, 2, 4))


def _unequal_keys(rank, world):
    shard = VocabShard.even(6, dist.group.WORLD)
    keys = sampling_keys(1, torch.arange(3)) + (rank == 1)
    out = []
    for options in ({}, {"top_k": 2}, {"top_p": 0.5}):
        try:
            vocab_parallel_sample(torch.zeros(3, shard.width), shard, keys=keys, **options)
        except ValueError as error:
            out.append(str(error))
    return out


def test_unequal_keys_raise_on_every_rank(ranks):
    first, second = ranks(_unequal_keys, 2)
    assert first == second
    assert len(first) == 3
    assert all("keys of rank 0 differ" in m or "those of rank 0 differ" in m for m in first)
