"""Flags that a device raises, played on the CPU: when they are raised, read, lowered and reused."""

import pytest
import torch

import vocabtp.kernels as vk
from vocabtp.kernels import _flags, _ids
from vocabtp.kernels.testing import run_sharded

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

X = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
GOOD, BAD = torch.tensor([[0], [1], [2]]), torch.tensor([[0], [50], [2]])


class Pretend(_flags.Flag):
    """A flag of a device that is not there, which tells what happens to it."""

    def __init__(self, log, mapped):
        self.cell = torch.zeros(1, dtype=torch.int32)
        self.mapped, self.log = mapped, log

    def settled(self):
        self.log.append("settled")

    def wait(self):
        self.log.append("wait")

    def lower(self):
        up = super().lower()
        self.log.append("up" if up else "down")
        return up


@pytest.fixture(params=[True, False], ids=["mapped", "copied"])
def log(request, monkeypatch):
    """What happens: kernels that start, and all that happens to flags."""
    from vocabtp.kernels._triton import launch

    said = []
    run = launch.run

    def told(kernel, *args, **options):
        run(kernel, *args, **options)
        said.append(kernel.__name__)

    monkeypatch.setattr(launch, "run", told)
    monkeypatch.setattr(_flags, "raised_by", lambda device: True)
    monkeypatch.setattr(_flags, "take", lambda device: Pretend(said, request.param))
    monkeypatch.setattr(_flags, "give", lambda flag: said.append("given"))
    monkeypatch.setattr(_ids, "_captured", [])
    with vk.backend("triton"):
        yield said
    vk.check_ids()


def logprobs(ids, **options):
    return vk.logprobs(X, ids, validate_ids=False, **options)


def test_it_is_known_before_the_logits_are_read(log):
    logprobs(GOOD)
    assert log == ["codes_kernel", "settled", "token_stats_kernel", "finish_tokens_kernel"]
    log.clear()
    logprobs(BAD)
    assert log[:4] == ["wait", "down", "given", "codes_kernel"]
    log.clear()
    with pytest.raises(ValueError, match=r"got 50 at position \[1\]; 1 of 3 rows"):
        vk.entropy(X)
    assert log == ["wait", "up", "given"]


def test_validation_waits_for_the_ids_alone(log):
    vk.logprobs(X, GOOD, validate_ids=True)
    assert log[:2] == ["codes_kernel", "settled"]
    assert log[-3:] == ["wait", "down", "given"]
    with pytest.raises(ValueError, match=r"got 50 at position \[1\]; 1 of 3 rows"):
        vk.logprobs(X, BAD, validate_ids=True)
    assert log[-3:] == ["wait", "up", "given"]
    assert not _ids._pending


def test_a_rank_knows_with_the_statistics_of_all(log):
    def rank(exchange, a, b):
        ids = BAD if exchange.rank == 1 else GOOD
        more = {"exchange": exchange, "vocab_start": a, "vocab_size": 50}
        with vk.backend("triton"):
            return vk.logprobs(X[:, a:b], ids, validate_ids=False, **more)

    run_sharded(rank, [(0, 20), (20, 50)])
    assert log.index("settled") > log.index("finish_tokens_kernel")
    assert log.count("settled") == 2
    with pytest.raises(ValueError, match=r"got 50 at position \[1\] on rank 1"):
        vk.check_ids()
    # both ranks' own flags
    assert log[-6:] == ["wait", "up", "given"] * 2


def test_the_eager_way_copies_it(log):
    with vk.backend("eager"):
        logprobs(BAD)
    assert log == ["settled"]
    with pytest.raises(ValueError, match="got 50"):
        vk.check_ids()


def test_a_captured_call_keeps_its_flag_and_reports_when_asked(log, monkeypatch):
    synchronized = []
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronized.append)
    logprobs(BAD)
    log.clear()
    monkeypatch.setattr(_flags, "capturing", lambda device: True)
    # neither waits for what came before, nor records when it is known, nor validates
    vk.check_ids()
    vk.logprobs(X, BAD, validate_ids=True)
    assert not {"settled", "wait", "given", "up"} & set(log)
    monkeypatch.setattr(_flags, "capturing", lambda device: False)
    with pytest.raises(ValueError, match="got 50"):
        vk.entropy(X)
    assert not synchronized
    vk.entropy(X)
    with pytest.raises(ValueError, match="got 50"):
        vk.check_ids()
    assert synchronized == [X.device]
    vk.check_ids()
    # a replay raises it again
    (watch,) = _ids._captured
    watch._flag.cell.fill_(1)
    vk.entropy(X)
    with pytest.raises(ValueError, match="got 50"):
        vk.check_ids()


def test_a_call_without_rows_gives_its_flag_back(log):
    vk.logprobs(X[:0], GOOD[:0], validate_ids=False)
    vk.check_ids()
    assert log.count("given") == 1


def test_without_a_flag_a_bad_id_is_a_nan(log, monkeypatch):
    monkeypatch.setattr(_flags, "take", lambda device: None)
    monkeypatch.setattr(_flags, "capturing", lambda device: True)
    assert logprobs(BAD).isnan().flatten().tolist() == [False, True, False]


def test_tables(monkeypatch):
    tables = []

    def table():
        tables.append(torch.zeros(300, 4, dtype=torch.int32))
        return tables[-1][:, :1]

    device = torch.device("meta")
    monkeypatch.setattr(_flags, "_table", table)
    monkeypatch.setattr(_flags, "_free", {})
    monkeypatch.setattr(torch, "Event", lambda device: None)
    capturing = True
    monkeypatch.setattr(_flags, "capturing", lambda device: capturing)
    assert _flags.take(device) is None
    capturing = False
    flags = [_flags.take(device) for _ in range(60)]
    assert len(tables) == 2
    assert len({flag.cell.data_ptr() for flag in flags}) == 60
    # a capture lives on what is there
    capturing = True
    flags += [_flags.take(device) for _ in range(540)]
    assert _flags.take(device) is None
    assert len(tables) == 2
    for flag in flags:
        _flags.give(flag)
    assert _flags.take(device) is flags[-1]
