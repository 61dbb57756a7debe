"""After a pass, gradients are the means over the ranks, in any order of arrival."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.arrays.buffer import as_buffer, register
from nc10d.errors import Aborted, CollectiveMismatch
from nc10d.reducer.hooks import allreduce_hook, fp16_compress_hook, noop_hook
from nc10d.reducer.reducer import Reducer
from nc10d.testing import run_local, run_ranks
from nc10d.work import Future

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from([np.float32, np.float64])
PARAMS = st.lists(st.builds(np.zeros, SHAPES, DTYPES), min_size=1, max_size=6)


def gradient(param, rank, step, index):
    """Whole numbers: their sums over ranks are exact, and so are means over 1, 2 and 4."""
    numbers = np.arange(param.size).reshape(param.shape) + 10 * index + 100 * step
    return np.array(numbers * (rank + 1), param.dtype)


def mean(param, size, step, index):
    return sum(gradient(param, rank, step, index) for rank in range(size)) / size


def run_steps(group, params, orders, own, options):
    """Run a pass for each of `orders[step][rank]`; return the gradients after each pass."""
    reducer = Reducer(params, group, **options)
    found = []
    for step, order in enumerate(orders):
        reducer.begin()
        given = [gradient(x, group.rank, step, i) for i, x in enumerate(params)]
        for param in order[group.rank]:
            if own:
                reducer.grad_ready(param, given[param])
            else:
                reducer.gradients[param][...] = given[param]
                reducer.grad_ready(param)
        reducer.finish()
        found.append([g.copy() for g in (given if own else reducer.gradients)])
        assert reducer.rebuild() == (step == 0)
    return found


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(),
    params=PARAMS,
    size=st.sampled_from([1, 2, 4]),
    caps=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    own=st.booleans(),
    static=st.booleans(),
)
def test_gradients_are_the_means_in_any_order_of_arrival(data, params, size, caps, own, static):
    order = st.permutations(range(len(params)))
    orders = data.draw(st.lists(st.lists(order, min_size=size, max_size=size), max_size=3))
    options = {"cap_bytes": caps[0], "first_bytes": caps[1], "static_graph": static}
    each = [[value] * size for value in (params, orders, own, options)]
    for found in run_local(run_steps, size, *each):
        for step, gradients in enumerate(found):
            for index, (x, g) in enumerate(zip(params, gradients, strict=True)):
                assert g.shape == x.shape
                assert g.tolist() == mean(x, size, step, index).tolist()


def mark_from_threads(group, params):
    reducer = Reducer(params, group, cap_bytes=64, first_bytes=16)
    reducer.begin()

    def mark(index):
        reducer.grad_ready(index, gradient(params[index], group.rank, 0, index))

    threads = [threading.Thread(target=mark, args=(i,)) for i in range(len(params))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reducer.finish()
    return [g.tolist() for g in reducer.gradients]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_gradients_may_come_from_any_thread_over_the_engine(kind):
    params = [np.zeros((i, 3), np.float32) for i in range(1, 9)]
    expected = [mean(x, 2, 0, i).tolist() for i, x in enumerate(params)]
    assert run_ranks(mark_from_threads, 2, kind, [params] * 2) == [expected] * 2


def rebuilt_plans(group, orders):
    reducer = Reducer([np.zeros(4)] * 3, group, cap_bytes=32, first_bytes=32)
    before = [bucket.params for bucket in reducer.plan.buckets]
    assert not reducer.rebuild()
    reducer.begin()
    for param in orders[group.rank]:
        reducer.gradients[param][...] = param
        reducer.grad_ready(param)
    reducer.finish()
    assert reducer.rebuild()
    assert not reducer.rebuild()
    after = [bucket.params for bucket in reducer.plan.buckets]
    return before, after, [g.tolist() for g in reducer.gradients]


def test_buckets_are_rebuilt_once_in_rank_0s_order_and_keep_the_gradients():
    orders = [[1, 2, 0], [0, 1, 2]]
    kept = [[float(p)] * 4 for p in range(3)]
    expected = ([[2], [1], [0]], [[1], [2], [0]], kept)
    assert run_local(rebuilt_plans, 2, [orders] * 2) == [expected] * 2


def some_unused(group, used, late):
    reducer = Reducer([np.zeros(1)] * 4, group, cap_bytes=8, find_unused_parameters=True)
    for g in reducer.gradients:
        g[...] = 0.1
    mine = used[group.rank]
    unused = set(range(4)) - mine
    reducer.begin(unused=unused - late)
    for param in mine:
        reducer.gradients[param][...] = 6
        reducer.grad_ready(param)
    for param in unused & late:
        reducer.declare_unused(param)
    reducer.finish()
    assert not reducer.rebuild()
    return [float(g[0]) for g in reducer.gradients]


@settings(deadline=None, max_examples=20)
@given(
    used=st.lists(st.sets(st.integers(0, 3)), min_size=3, max_size=3),
    late=st.sets(st.integers(0, 3)),
)
def test_a_gradient_that_no_rank_used_stays_unchanged(used, late):
    # Three times 0.1, divided by 3, is not 0.1: only an unchanged gradient is.
    assert (0.1 + 0.1 + 0.1) / 3 != 0.1
    votes = [sum(param in mine for mine in used) for param in range(4)]
    for found in run_local(some_unused, 3, [used] * 3, [late] * 3):
        for value, count in zip(found, votes, strict=True):
            assert value == (
                0.1 if count == 0 else pytest.approx((6 * count + 0.1 * (3 - count)) / 3)
            )


@pytest.mark.ranks(2)
def test_a_parameter_used_in_an_accumulating_pass_counts_as_used(world):
    reducer = Reducer([np.zeros(2)] * 2, world, find_unused_parameters=True)
    reducer.gradients[0] += 4 * world.rank
    reducer.grad_ready(0)  # outside of a pass: the gradient accumulates
    reducer.begin(unused=[0])
    reducer.gradients[1] += world.rank
    reducer.grad_ready(1)
    reducer.finish()
    assert [g.tolist() for g in reducer.gradients] == [[2, 2], [0.5, 0.5]]


def static_passes(group):
    sent = []

    def spy(state, bucket):
        sent.append(bucket.index())
        return allreduce_hook(state, bucket)

    options = {"cap_bytes": 8, "first_bytes": 8, "static_graph": True}
    reducer = Reducer([np.zeros(1)] * 3, group, hook=spy, **options)
    progress = []
    for _ in range(2):
        reducer.begin()
        for param in (2, 0, 2):
            reducer.gradients[param] += group.rank
            reducer.grad_ready(param)
            progress.append(len(sent))
        reducer.finish()
        progress.append(len(sent))
    return progress, [g.tolist() for g in reducer.gradients]


def test_a_static_graph_learns_how_often_gradients_come_and_which_never_do():
    progress, gradients = zip(*run_local(static_passes, 2), strict=True)
    # Buckets are launched as [2], [1], [0]; in the first pass all at its end.
    assert progress == ([0, 0, 0, 3, 3, 3, 6, 6],) * 2
    assert gradients[0] == gradients[1]


@pytest.mark.ranks(3)
def test_a_static_graph_learns_the_parameters_that_no_rank_uses(world):
    reducer = Reducer([np.zeros(1)] * 2, world, static_graph=True, find_unused_parameters=True)
    reducer.gradients[0][...] = 0.1
    found = []
    for _ in range(2):
        reducer.begin()
        reducer.grad_ready(1)
        reducer.finish()
        found.append(float(reducer.gradients[0][0]))
    assert found == [0.1, 0.1]


def with_hooks(group, hook, late):
    params = [np.zeros(3, np.float32)]
    reducer = Reducer(params, group, hook=None if late else hook)
    if late:
        reducer.register_comm_hook(group, hook)
    reducer.begin()
    reducer.grad_ready(0, np.full(3, group.rank + 1, np.float32))
    reducer.finish()
    with pytest.raises(RuntimeError, match="comm hook"):
        reducer.register_comm_hook(group, noop_hook)
    return reducer.gradients[0].tolist()


@pytest.mark.parametrize("late", [True, False])
def test_a_hook_reduces_the_buckets(late):
    for hook, expected in [(noop_hook, [[1] * 3, [2] * 3]), (fp16_compress_hook, [[1.5] * 3] * 2)]:
        assert run_local(with_hooks, 2, [hook] * 2, [late] * 2) == expected


def alone(function):
    return run_local(function, 1)[0]


@pytest.mark.ranks(3)
def test_a_hook_can_be_tried_on_buckets_of_zeros(world):
    reducer = Reducer([np.zeros(3), np.zeros(2), np.zeros(4, int)], world)
    for gradient in reducer.gradients:
        gradient[...] = 7
    buckets = reducer.zeros_like_buckets()
    assert [bucket.is_last() for bucket in buckets] == [False, True]
    for bucket in buckets:
        bucket.buffer()[...] += world.rank
        allreduce_hook(world, bucket).wait()
    sums = sorted(x.tolist() for bucket in buckets for x in bucket.gradients())
    assert sums == [[1] * 2, [1] * 3, [1] * 4]
    assert all((x == 7).all() for x in reducer.gradients)


def test_a_result_of_the_hooks_own_lands_in_the_gradients():
    def doubling(_state, bucket):
        done = Future()
        done.set_result([(2 * bucket.buffer()).astype(np.float16)])
        return done

    def run(group):
        reducer = Reducer([np.zeros(2)], group, hook=doubling)
        reducer.begin()
        reducer.grad_ready(0, np.ones(2))
        reducer.finish()
        return reducer.gradients[0]

    found = alone(run)
    assert found.tolist() == [2, 2]
    assert found.dtype == np.float64


def three(group, **options):
    names = ["a.weight", "a.bias", "b.weight"]
    return Reducer([np.zeros(2)] * 3, group, names=names, cap_bytes=16, first_bytes=16, **options)


def test_gradients_that_are_missing_are_named_and_the_next_pass_is_free():
    def run(group):
        reducer = three(group)
        reducer.begin()
        reducer.grad_ready(1)
        with pytest.raises(RuntimeError, match=r"without the gradients of a\.weight, b\.weight\."):
            reducer.finish()
        reducer.begin()
        for param in range(3):
            reducer.grad_ready(param)
        reducer.finish()

    alone(run)


def test_a_gradient_that_comes_twice_is_refused_by_name_before_it_is_copied():
    def run(group):
        reducer = three(group)
        reducer.begin()
        reducer.grad_ready(1, np.ones(2))
        with pytest.raises(RuntimeError, match=r"a\.bias was marked ready twice"):
            reducer.grad_ready(1, np.full(2, 7.0))
        assert reducer.gradients[1].tolist() == [1, 1]

    alone(run)


@pytest.mark.parametrize("what", ["begin", "rebuild", "zero_grad"])
def test_a_pass_must_be_finished_before_anything_else(what):
    def run(group):
        reducer = three(group)
        reducer.begin()
        with pytest.raises(RuntimeError, match=f"{what}: the last pass has not been finished"):
            getattr(reducer, what)()

    alone(run)


def test_mistakes_at_the_beginning():
    def run(group):
        with pytest.raises(RuntimeError, match="no pass has begun"):
            three(group).finish()
        with pytest.raises(ValueError, match="find_unused_parameters=True"):
            three(group).begin(unused=[0])
        with pytest.raises(ValueError, match="must be parameters' indices"):
            three(group, find_unused_parameters=True).begin(unused=[3])
        with pytest.raises(ValueError, match="needs find_unused_parameters"):
            three(group).declare_unused(0)
        with pytest.raises(RuntimeError, match="no pass has begun"):
            three(group, find_unused_parameters=True).declare_unused(0)
        with pytest.raises(ValueError, match="1 names for 2"):
            Reducer([np.zeros(1)] * 2, group, names=["x"])
        with pytest.raises(TypeError, match="no option 'bucket_cap_mb'"):
            Reducer([np.zeros(1)], group, bucket_cap_mb=1)
        with pytest.raises(ValueError, match="at least one parameter"):
            Reducer([], group)

    alone(run)


@pytest.mark.parametrize("index", [-1, 3])
def test_a_parameter_that_is_not_there_is_refused_and_changes_nothing(index):
    def run(group):
        reducer = three(group, find_unused_parameters=True)
        reducer.begin()
        for call in (reducer.grad_ready, reducer.declare_unused):
            with pytest.raises(ValueError, match=f"no parameter has index {index}; there are 3"):
                call(index)
        reducer.grad_ready(0)
        reducer.grad_ready(1)
        with pytest.raises(RuntimeError, match=r"without the gradients of b\.weight\."):
            reducer.finish()

    alone(run)


def test_a_hook_that_fails_fails_only_its_pass():
    broken = [True]

    def sometimes(state, bucket):
        if broken[0] and bucket.index() == 1:
            raise Aborted("not today")
        return allreduce_hook(state, bucket)

    def run(group):
        reducer = three(group, hook=sometimes)
        for wrong in (True, False):
            broken[0] = wrong
            reducer.begin()
            reducer.grad_ready(2)
            if wrong:
                with pytest.raises(Aborted, match="not today"):
                    reducer.grad_ready(1)
                with pytest.raises(Aborted, match="not today"):
                    reducer.finish()
            else:
                reducer.grad_ready(1)
                reducer.grad_ready(0)
                reducer.finish()

    alone(run)


READ_ONLY = np.zeros(2)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("gradient", "error", "words"),
    [
        (np.zeros(1), ValueError, r"a\.weight must have shape \(2,\), it has \(1,"),
        (np.zeros(2, np.float32), TypeError, r"a\.weight is of float64, its gradient of float32"),
        (READ_ONLY, ValueError, r"gradient of a\.weight is read-only"),
        (np.float64(1), TypeError, "NumPy scalar"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(gradient, error, words):
    def run(group):
        reducer = three(group)
        reducer.begin()
        with pytest.raises(error, match=words):
            reducer.grad_ready(0, gradient)
        return reducer.gradients[0].tolist()

    assert alone(run) == [0, 0]


def test_no_bucket_is_launched_after_a_bucket_that_failed():
    """Other ranks launch the failed bucket first: a later bucket would be matched with it."""
    left = []

    def hook(_state, bucket):
        left.append(bucket.index())
        if bucket.index() == 1:
            raise KeyError("the hook's own")
        return noop_hook(None, bucket)

    def run(group):
        params = [np.zeros(4) for _ in range(4)]
        reducer = Reducer(params, group, hook=hook, cap_bytes=8, first_bytes=8)
        reducer.begin()
        reducer.grad_ready(3)
        with pytest.raises(KeyError):
            reducer.grad_ready(2)
        reducer.grad_ready(1)
        reducer.grad_ready(0)
        with pytest.raises(KeyError):
            reducer.finish()

    run_local(run, 1)
    assert left == [0, 1]


def test_a_hook_that_returns_no_handle_is_a_type_error():
    def run(group):
        reducer = Reducer([np.zeros(1)], group, hook=lambda _state, bucket: bucket.buffer())
        reducer.begin()
        with pytest.raises(TypeError, match="must return a Work or a Future"):
            reducer.grad_ready(0)

    alone(run)


@pytest.mark.ranks(2, strict=False)  # the abort may come before any wait
def test_a_peer_that_is_aborted_ends_the_pass(world):
    def go_on(reducer):
        for param in range(3):
            reducer.grad_ready(param)
        reducer.finish()

    reducer = three(world)
    reducer.begin()
    if world.rank == 1:
        world.store.wait(["rank 0 has begun"])
        world.abort("rank 1 gives up")
    else:
        world.store.set("rank 0 has begun", "")
    with pytest.raises(Aborted, match="gives up"):
        go_on(reducer)


def test_times_of_arrival_are_counted_from_the_beginning():
    def run(group):
        reducer = three(group)
        reducer.begin()
        for param in (2, 0, 1):
            reducer.grad_ready(param)
        reducer.finish()
        return reducer.get_backward_stats()

    times = alone(run)
    assert 0 < times[2] < times[0] < times[1]


def finish_with_one(reducer):
    reducer.grad_ready(0, np.ones(8))
    reducer.finish()


@pytest.mark.ranks(2, strict=False)
def test_passes_swapped_between_reducers_are_recognised_by_bucket_names(world):
    reducers = [Reducer([np.zeros(8)], world, names=[name]) for name in ("encoder", "decoder")]
    first = reducers[world.rank]  # the other rank runs the other model's pass
    first.begin()
    with pytest.raises(CollectiveMismatch, match=r"bucket 0 of reducer 1 \(encoder\)") as caught:
        finish_with_one(first)
    assert "bucket 0 of reducer 2 (decoder)" in str(caught.value)


@pytest.mark.ranks(2)
def test_delayed_buckets_are_launched_in_plan_order_when_the_pass_ends(world):
    sent = []

    def spy(state, bucket):
        sent.append(bucket.index())
        return allreduce_hook(state, bucket)

    reducer = three(world, hook=spy, delay_all_reduce=True)
    reducer.begin()
    for param in range(3):
        reducer.grad_ready(param, np.full(2, float(world.rank)))
    before = list(sent)
    reducer.finish()
    assert before == []
    assert sent == [0, 1, 2]
    assert [g.tolist() for g in reducer.gradients] == [[0.5, 0.5]] * 3


def test_a_delayed_pass_that_lacks_gradients_sends_nothing():
    def run(group):
        sent = []

        def spy(_state, bucket):
            sent.append(bucket.index())
            return noop_hook(None, bucket)

        reducer = three(group, hook=spy, delay_all_reduce=True)
        reducer.begin()
        reducer.grad_ready(2)
        with pytest.raises(RuntimeError, match=r"without the gradients of a\.weight, a\.bias\."):
            reducer.finish()
        return sent

    assert alone(run) == []


class Elsewhere(np.ndarray):
    """An array that claims to be on another device."""


def elsewhere(x):
    buffer = as_buffer(np.asarray(x))
    return replace(buffer, device="gpu:1", owner=x)


register(Elsewhere, elsewhere)


def two_devices(group):
    made = []

    def there(count, dtype):
        made.append(count)
        return np.zeros(count, dtype).view(Elsewhere)

    params = [np.zeros(2), np.zeros(3).view(Elsewhere), np.zeros(4)]
    with pytest.raises(TypeError, match="parameters are on gpu:1, `allocate` knows of cpu alone"):
        Reducer(params, group, allocate={"cpu": np.zeros})
    allocate = {"cpu": np.zeros, "gpu:1": there}
    reducer = Reducer(params, group, allocate=allocate, hook=noop_hook)
    reducer.begin()
    for param in range(3):
        reducer.gradients[param][...] = param
        reducer.grad_ready(param)
    reducer.finish()
    devices = [(bucket.params, bucket.device) for bucket in reducer.plan.buckets]
    return made, devices, [g.tolist() for g in reducer.gradients]


def test_parameters_of_several_devices_have_buckets_of_their_own():
    made, devices, gradients = alone(two_devices)
    assert made == [3]
    assert devices == [([1], "gpu:1"), ([0, 2], "cpu")]
    assert gradients == [[0] * 2, [1] * 3, [2] * 4]


@pytest.mark.ranks(2, strict=False)
def test_buckets_are_peer_readable_memory_without_an_allocator(world):
    arena = world.backend("cpu").group.context.arena.mapping.data
    for allocate, readable in ((None, True), (np.zeros, False)):
        reducer = Reducer([np.zeros(5)], world, allocate=allocate)
        assert np.may_share_memory(reducer.gradients[0], arena) == readable
