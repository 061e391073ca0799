"""Every op inside torch.compile: one graph, the bits of the call outside, no recompiling.

Sharded calls: test_torch_compile_shards.py.
"""

import pytest
import torch

import vocabtp.kernels as vk
from compiled_calls import ONE_OF_EACH, assert_same, compiled, inputs, run
from vocabtp.kernels import _eager
from vocabtp.kernels._operators import define, pairs, tokens

# inductor imports parts of torch that torch deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

TWO = pytest.mark.parametrize("call", ["logprobs", "jsd_1"], indirect=True)


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled before."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("dtype", "needs"), [(torch.float32, (True, True)), (torch.bfloat16, (True, False))]
)
def test_one_graph_and_the_same_bits(call, dtype, needs):
    sides, ids = inputs(5, dtype)

    def function(student, teacher):
        # neighbours that the compiler works on, and a mask in place
        values = call(student, teacher, index=ids)
        values[0][:, 0] *= 2
        return values

    inside, counter = compiled(function)
    assert_same(run(inside, sides, needs), run(function, sides, needs))
    assert counter.frame_count == 1


@pytest.mark.parametrize("call", ["logprobs_and_entropy", "jsd"], indirect=True)
def test_inductor_runs_the_same_operators(call):
    sides, ids = inputs(4)
    inside, _ = compiled(lambda p, q: call(p, q, index=ids), "inductor")
    assert_same(run(inside, sides), run(lambda p, q: call(p, q, index=ids), sides))


@ONE_OF_EACH
def test_row_counts_do_not_recompile(call):
    inside, counter = compiled(lambda p, q, ids: call(p, q, index=ids))
    for rows in (3, 5, 8, 13, 64):
        sides, ids = inputs(rows)
        got = run(lambda p, q, ids=ids: inside(p, q, ids), sides)
        assert_same(got, run(lambda p, q, ids=ids: call(p, q, index=ids), sides))
    assert counter.frame_count <= 2


@TWO
def test_rows_marked_dynamic_compile_once(call):
    inside, counter = compiled(lambda p, q, ids: call(p, q, index=ids))
    for rows in (3, 5, 8):
        sides, ids = inputs(rows)
        parts = [*sides, ids]
        for x in parts:
            torch._dynamo.mark_dynamic(x, 1)
        inside(*parts)
    assert counter.frame_count == 1


@ONE_OF_EACH
@pytest.mark.parametrize("rows", [0, 1])
def test_no_row_and_one_row(call, rows):
    sides, ids = inputs(rows)
    inside, _ = compiled(lambda p, q: call(p, q, index=ids))
    assert_same(run(inside, sides), run(lambda p, q: call(p, q, index=ids), sides))


def test_the_backend_in_force_is_followed_and_kept_for_the_backward(monkeypatch):
    seen = []
    real = define.choose

    def choose(caller, *tensors, name=None):
        seen.append(name)
        return real(caller, *tensors, name=name)

    monkeypatch.setattr(define, "choose", choose)
    sides, _ = inputs(3)
    inside, counter = compiled(lambda p, q: (vk.kl_div(p, q),))
    run(inside, sides)
    with vk.backend("eager"):
        leaf = sides[0].clone().requires_grad_()
        (value,) = inside(leaf, sides[1].clone().requires_grad_())
    value.nansum().backward()
    assert seen == ["auto", "auto", "eager", "eager"]
    run(inside, sides)
    assert seen[4:] == ["auto", "auto"]
    assert counter.frame_count == 2


@pytest.mark.parametrize("call", ["forward_kl", "jsd"], indirect=True)
def test_a_frozen_side_costs_no_gradient(call, monkeypatch):
    written = []

    class Watched:
        def __getattr__(self, name):
            function = getattr(_eager, name)
            if not name.endswith("_grad"):
                return function

            def grad(a, b, *rest):
                written.append(
                    sum(isinstance(x, torch.Tensor) and x.shape == (6, 11) for x in rest)
                )
                return function(a, b, *rest)

            return grad

    choice = define.choose("a test", torch.zeros(1, 1))._replace(implementation=Watched())
    monkeypatch.setattr(define, "choose", lambda *_, **__: choice)
    inside, _ = compiled(call)
    sides, _ = inputs(3)
    run(inside, sides, (True, False))
    assert written == [1]
    run(inside, sides, (True, True))
    assert written == [1, 2]


def test_a_backend_chosen_inside_ends_there():
    def function(p, q):
        with vk.backend("eager"):
            return vk.kl_div(p, q)

    sides, _ = inputs(3)
    inside, _ = compiled(function)
    assert torch.equal(inside(*sides).isnan(), function(*sides).isnan())
    assert vk.which_backend(*sides)[1] == "the tensors are on the CPU"


@pytest.mark.parametrize("call", ["logprobs", "jsd_high_clip"], indirect=True)
def test_triton_by_the_interpreter(call, interpreter):
    sides, ids = inputs(3, torch.bfloat16)
    inside, _ = compiled(lambda p, q: call(p, q, index=ids))
    with vk.backend("triton"):
        assert_same(run(inside, sides), run(lambda p, q: call(p, q, index=ids), sides))


def test_calls_on_a_whole_vocabulary_may_be_merged_and_dropped(monkeypatch):
    runs = []
    real = define.choose

    def choose(caller, *tensors, name=None):
        runs.append(caller)
        return real(caller, *tensors, name=name)

    monkeypatch.setattr(define, "choose", choose)

    def function(p, q):
        vk.kl_div(p, q)
        return vk.jsd(p, q)

    inside, _ = compiled(function)
    inside(*inputs(3)[0])
    assert runs == ["jsd"]


@TWO
def test_wrong_arguments_say_the_same_thing(call):
    sides, ids = inputs(3)
    for options in ({"temperature": 0.0}, {"temperature": "hot"}):
        with pytest.raises((ValueError, TypeError)) as outside:
            call(*sides, index=ids, **options)
        inside, _ = compiled(lambda p, q, options=options: call(p, q, index=ids, **options))
        with pytest.raises(torch._dynamo.exc.Unsupported) as traced:
            inside(*sides)
        assert str(outside.value) in str(traced.value)
        # without fullgraph torch steps aside, and the error is the error
        with pytest.raises(type(outside.value)) as plain:
            torch.compile(lambda p, q, o=options: call(p, q, index=ids, **o), backend="eager")(
                *sides
            )
        assert str(plain.value) == str(outside.value)


@TWO
def test_a_second_backward_raises(call):
    sides, ids = inputs(3)
    inside, _ = compiled(lambda p, q: call(p, q, index=ids))
    leaf = sides[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(inside(leaf, sides[1])[0].sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("operator", [pairs.KL_DIV, pairs.JSD], ids=["kl_div", "jsd"])
def test_operators_are_what_they_say(operator, clip):
    sides = torch.randn(2, 2, 3, 11, generator=torch.Generator().manual_seed(0))
    options = [1.7, clip, 0.3, 2.0, "local:", "auto", "a test"]
    args = [x.requires_grad_() for x in sides.unbind(0)]
    for form in (operator.plain, operator.sharded):
        torch.library.opcheck(form, (*args, *options))
    values, saved = operator.plain(*sides, *options)
    for needs in ([True, False], [False, True]):
        args = (torch.ones_like(values), *sides, saved, needs, *options)
        torch.library.opcheck(operator.gradient, args)
        assert len(operator.gradient(*args)) == 1


@pytest.mark.parametrize(
    ("operator", "columns"),
    [(tokens.LOGPROBS, 2), (tokens.ENTROPY, None), (tokens.LOGPROBS_AND_ENTROPY, 2)],
    ids=["logprobs", "entropy", "logprobs_and_entropy"],
)
def test_token_operators_are_what_they_say(operator, columns):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 11, generator=g)
    ids = None if columns is None else torch.randint(0, 11, (2, 3, columns), generator=g)
    options = [1.7, -100, 0, 11, True, "local:", "auto", "a test"]
    for form in (operator.plain, operator.sharded):
        torch.library.opcheck(form, (logits.clone().requires_grad_(), ids, *options))
        # CUDA graphs would overwrite what a report of bad ids needs
        unsafe = torch.Tag.cudagraph_unsafe in form._opoverload.tags
        assert unsafe == (ids is not None)
    values, entropies, stats = operator.plain(logits, ids, *options)
    grads = [torch.ones_like(x) if x.numel() else None for x in (values, entropies)]
    torch.library.opcheck(operator.gradient, (*grads, logits, ids, stats, *options))


def test_a_bad_id_raises_when_the_graph_runs():
    logits, ids = torch.randn(3, 11), torch.tensor([1, 11, 2])
    inside, counter = compiled(vk.logprobs)
    inside(logits, ids.clamp(max=10))
    with pytest.raises(ValueError, match=r"^logprobs: an id must be in \[0, 11\).* got 11 at"):
        inside(logits, ids)
    assert counter.frame_count == 1

    later, _ = compiled(lambda x, i: vk.logprobs(x, i, validate_ids=False))
    assert later(logits, ids).isnan().tolist() == [False, True, False]
    # the next op says it, compiled or not, and once
    with pytest.raises(ValueError, match="got 11 at"):
        compiled(vk.entropy)[0](logits)
    vk.check_ids()


def test_gradients_of_one_of_two_values():
    sides, ids = inputs(4)
    logits = sides[0]
    for kept in (0, 1):

        def function(x, kept=kept):
            return (vk.logprobs_and_entropy(x, ids)[kept],)

        assert_same(run(compiled(function)[0], [logits], [True]), run(function, [logits], [True]))
