"""Comm hooks and sparse gradients: arguments, allowed results, and refusals."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nc10d.ops import AVG, MAX, SUM
from nc10d.reducer import hooks
from nc10d.reducer.buckets.sparse_bucket import SparseBucket
from nc10d.reducer.gradients import SparseGradient
from nc10d.reducer.hooks import powersgd, quantization
from nc10d.reducer.hooks.local_sgd import PostLocalSGDState, post_localSGD_hook
from nc10d.reducer.plan import plan_buckets
from nc10d.reducer.reducer import Reducer
from nc10d.testing import run_local, run_ranks
from nc10d.work import Future, Work

SHAPE = (5, 2)
NAMES = ["head", "rows", "tail"]


def parameters():
    return [np.zeros(3, np.float32), np.zeros(SHAPE, np.float32), np.zeros(2, np.float32)]


def rows_of(rank, step=0):
    """Rows of a rank: a random number, with repeated places; every third pass has none."""
    rng = np.random.default_rng(10 * step + rank)
    count = 0 if step % 3 == 2 else int(rng.integers(0, 7))
    values = rng.normal(size=(count, SHAPE[1])).astype(np.float32)
    return SparseGradient(rng.integers(0, SHAPE[0], (1, count)), values)


def reducer_of(group, hook, state=None, params=None):
    options = {"names": NAMES, "expect_sparse": [name == "rows" for name in NAMES]}
    return Reducer(params or parameters(), group, hook=hook, state=state, **options)


def one_pass(reducer, rank, step=0):
    """Return the reduced rows as bytes; the dense gradients are the rank numbers."""
    reducer.begin()
    for param in (2, 0):
        reducer.grad_ready(param, np.full(reducer.specs[param].shape, rank, np.float32))
    reducer.grad_ready(1, rows_of(rank, step))
    reducer.finish()
    return bits(reducer.gradients[1])


def bits(gradient):
    return gradient.indices.tobytes(), gradient.values.tobytes()


def following(group, bucket):
    outcome = hooks.allreduce_hook(group, bucket)
    return outcome.then(lambda done: [done.value()]) if isinstance(outcome, Future) else outcome


def waiting(group, bucket):
    """Wait inside of the hook, for the mean and for the Future of its `then`."""
    outcome = following(group, bucket)
    outcome.wait()
    return outcome


def prescaled(group, bucket):
    """Replace the bucket's rows by other rows, and reduce these."""
    if isinstance(bucket.buffer(), SparseGradient):
        mine = bucket.buffer()
        bucket.set_buffer(SparseGradient(mine.indices, mine.values * np.float32(0.5)))
        return bucket.all_reduce(group, SUM)
    return hooks.allreduce_hook(group, bucket)


def chained(group, bucket):
    """Reduce the rows, then reduce the result again; the second result counts."""
    if not isinstance(bucket.buffer(), SparseGradient):
        return hooks.allreduce_hook(group, bucket)
    return bucket.all_reduce(group, SUM).then(lambda _: bucket.all_reduce(group, AVG))


def chained_and_waiting(group, bucket):
    """Do the same, and wait for the second reduction in the hook."""
    outcome = chained(group, bucket)
    outcome.wait()
    return outcome


def waiting_in_a_callback(group, bucket):
    if not isinstance(bucket.buffer(), SparseGradient):
        return hooks.allreduce_hook(group, bucket)
    return bucket.all_reduce(group, SUM).then(lambda _: bucket.all_reduce(group, AVG).wait())


HOOKS = [hooks.allreduce_hook, following, waiting, prescaled]
HOOKS += [chained, chained_and_waiting, waiting_in_a_callback]


def passes(group, hook, count=4):
    reducer = reducer_of(group, hook)
    return [(one_pass(reducer, group.rank, step), reducer.rebuild())[0] for step in range(count)]


def on_the_engine(function, size, *given):
    return run_ranks(function, size, "threads", *given)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("run", [run_local, on_the_engine])
def test_a_mean_by_a_hook_is_the_mean_without_one_to_the_bit(run, hook):
    size = 2  # halving is exact, so it may come before or after the sum
    expected = run_local(passes, size, [None] * size)
    assert run(passes, size, [hook] * size) == expected
    assert expected[0] == expected[1]


def test_three_ranks_end_with_the_same_bits_with_and_without_the_hook():
    expected = run_local(passes, 3, [None] * 3)
    assert run_local(passes, 3, [hooks.allreduce_hook] * 3) == expected
    whole = sum(rows_of(rank).dense(SHAPE) for rank in range(3)) / 3
    indices, values = (
        np.frombuffer(x, t) for x, t in zip(expected[0][0], (int, "f4"), strict=True)
    )
    found = SparseGradient(indices.reshape(1, -1), values.reshape(-1, 2)).dense(SHAPE)
    assert np.allclose(found, whole, rtol=1e-6)


def test_a_hook_sees_the_gradient_and_its_parameter_in_plan_order():
    def run(group):
        seen = []

        def spy(state, bucket):
            seen.append((bucket.index(), bucket.is_last(), type(bucket.buffer()).__name__))
            if isinstance(bucket.buffer(), SparseGradient):
                (parameter,), (gradient,) = bucket.parameters(), bucket.gradients()
                assert parameter is params[1]
                assert gradient is bucket.buffer()
                assert bits(gradient) == bits(rows_of(group.rank))
            return hooks.allreduce_hook(state, bucket)

        params = parameters()
        reducer = reducer_of(group, spy, params=params)
        one_pass(reducer, group.rank)
        return seen, [bucket.sparse for bucket in reducer.plan.buckets]

    (seen, sparse), other = run_local(run, 2)
    assert (seen, sparse) == other
    assert [index for index, _, _ in seen] == list(range(len(sparse)))
    assert [last for _, last, _ in seen] == [False] * (len(sparse) - 1) + [True]
    assert [kind == "SparseGradient" for _, _, kind in seen] == sparse
    assert sum(sparse) == 1


@pytest.mark.ranks(2)
def test_noop_leaves_the_rows_unchanged(world):
    assert one_pass(reducer_of(world, hooks.noop_hook), world.rank) == bits(rows_of(world.rank))


def test_post_local_sgd_averages_rows_among_all_and_then_leaves_them():
    def run(group, hook):
        state = PostLocalSGDState(group, None, 1, post_local_gradient_allreduce=False)
        local = hook is post_localSGD_hook
        reducer = reducer_of(group, hook, state if local else None)
        first = one_pass(reducer, group.rank)
        return first, one_pass(reducer, group.rank, 1) == bits(rows_of(group.rank, 1))

    means = [first for first, _ in run_local(run, 2, [None] * 2)]
    assert run_local(run, 2, [post_localSGD_hook] * 2) == [(mean, True) for mean in means]


def test_ranks_without_a_batch_do_not_count():
    def run(group):
        reducer = reducer_of(group, None)
        here = np.array([group.rank < 2], np.int64)
        work = group.all_reduce(here, async_op=True)
        reducer.set_forward_pass_work_handle(work)
        return reducer.shadow_pass() if group.rank == 2 else one_pass(reducer, group.rank)

    two = run_local(lambda group: one_pass(reducer_of(group, None), group.rank), 2)
    assert run_local(run, 3)[:2] == two


def bucket_of_rows(rank=0):
    plan = plan_buckets(parameters()[1:2], expect_sparse=[True]).buckets[0]
    bucket = SparseBucket(0, plan, parameters()[1:2], True, ["rows"])
    bucket.set_buffer(rows_of(rank, 1))
    return bucket


STATE = powersgd.PowerSGDState(None, start_powerSGD_iter=10)
REFUSING = {
    "fp16": (hooks.fp16_compress_hook, None),
    "bf16": (hooks.bf16_compress_hook, None),
    "fp16 around": (hooks.fp16_compress_wrapper(hooks.allreduce_hook), None),
    "bf16 around": (hooks.bf16_compress_wrapper(hooks.noop_hook), None),
    "a tensor": (quantization.quantization_pertensor_hook, None),
    "a channel": (quantization.quantization_perchannel_hook, None),
    "powerSGD": (powersgd.powerSGD_hook, STATE),
    "batched": (powersgd.batched_powerSGD_hook, STATE),
}


@pytest.mark.parametrize(("hook", "state"), REFUSING.values(), ids=list(REFUSING))
def test_hooks_that_compress_refuse_rows_by_name_before_any_communication(hook, state):
    with pytest.raises(TypeError, match="gradient of rows is sparse"):  # the hook has no group
        hook(state, bucket_of_rows())


def refused(group):
    """A pass whose hook refuses; then a pass without traces of the failure."""
    chosen = [hooks.fp16_compress_hook]
    reducer = reducer_of(group, lambda state, bucket: chosen[0](state, bucket))
    with pytest.raises(TypeError, match="gradient of rows is sparse"):
        one_pass(reducer, group.rank)
    with pytest.raises((TypeError, RuntimeError)):
        reducer.finish()
    chosen[0] = hooks.allreduce_hook
    return one_pass(reducer, group.rank)


def test_after_a_pass_with_refused_rows_the_next_pass_works():
    expected = run_local(lambda group: one_pass(reducer_of(group, None), group.rank), 2)
    assert run_local(refused, 2) == expected


@pytest.mark.ranks(1)
def test_rows_are_not_reduced_at_a_moment_that_other_ranks_do_not_share(world):
    """A Work's callback runs at another moment on each rank: reductions would not be matched."""

    def elsewhere(group, bucket):
        if not isinstance(bucket.buffer(), SparseGradient):
            return hooks.allreduce_hook(group, bucket)
        with ThreadPoolExecutor() as threads:
            return threads.submit(bucket.all_reduce, group, AVG).result()

    with pytest.raises(RuntimeError, match="rows of rows must be reduced in the comm hook"):
        one_pass(reducer_of(world, elsewhere), world.rank)


def failing_after_rows(group):
    """The hook fails at the bucket after the rows, when their exchange is in flight."""
    failing = [True]

    def hook(state, bucket):
        if failing[0] and bucket.is_last():
            raise KeyError("last")
        outcome = hooks.allreduce_hook(state, bucket)
        return Work.from_future(outcome) if isinstance(outcome, Future) else outcome

    reducer = reducer_of(group, hook)
    assert not reducer.plan.buckets[-1].sparse
    reducer.begin()
    reducer.grad_ready(2, np.ones(2, np.float32))
    reducer.grad_ready(1, rows_of(group.rank))
    with pytest.raises(KeyError):
        reducer.grad_ready(0, np.ones(3, np.float32))
    with pytest.raises(KeyError):
        reducer.finish()
    failing[0] = False
    return one_pass(reducer, group.rank)


def test_after_a_pass_that_fails_with_rows_in_flight_the_next_pass_works():
    expected = run_local(lambda group: one_pass(reducer_of(group, None), group.rank), 2)
    assert run_local(failing_after_rows, 2) == expected


def ending_with(make):
    def hook(state, bucket):
        if not isinstance(bucket.buffer(), SparseGradient):
            return hooks.noop_hook(state, bucket)
        future = Future()
        future.set_result(make(bucket.buffer()))
        return future

    return hook


def outside(mine):
    return SparseGradient(np.array([[SHAPE[0]]]), np.zeros((1, SHAPE[1]), np.float32))


ANSWERS = {
    "an array": (lambda mine: mine.dense(SHAPE), TypeError, "rows must be a SparseGradient"),
    "a word": (lambda mine: "done", TypeError, "rows must be a SparseGradient"),
    "outside": (outside, ValueError, "index of rows's gradient is outside"),
    "wide": (
        lambda mine: SparseGradient(mine.indices, mine.values.astype(np.float64)),
        TypeError,
        "its gradient of float64",
    ),
}


@pytest.mark.parametrize(("make", "error", "words"), ANSWERS.values(), ids=list(ANSWERS))
def test_a_result_that_is_no_gradient_of_the_parameter_is_refused(make, error, words):
    def run(group):
        with pytest.raises(error, match=words):
            one_pass(reducer_of(group, ending_with(make)), group.rank)

    run_local(run, 1)
    bucket = bucket_of_rows()
    before = bucket.buffer()
    with pytest.raises(error, match=words):
        bucket.set_buffer(make(before))
    assert bucket.buffer() is before


def test_a_hook_may_end_with_rows_of_its_own_a_list_of_them_or_nothing():
    def run(group, make):
        return one_pass(reducer_of(group, ending_with(make)), group.rank)

    own = SparseGradient(np.array([[4]]), np.ones((1, 2), np.float32))
    assert run_local(run, 1, [lambda mine: own]) == [bits(own)]
    assert run_local(run, 1, [lambda mine: [own]]) == [bits(own)]
    assert run_local(run, 1, [lambda mine: None]) == [bits(rows_of(0))]


def test_rows_have_sums_and_means_only():
    with pytest.raises(ValueError, match="there is no MAX"):
        run_local(lambda group: bucket_of_rows().all_reduce(group, MAX), 1)
