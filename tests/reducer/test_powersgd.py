"""PowerSGD's factors approximate the mean, and later passes add the error; torch's hook agrees."""

import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.reducer.hooks import GradBucket, reduced_array
from nc10d.reducer.hooks.powersgd import (
    PowerSGDState,
    batched_powerSGD_hook,
    orthonormal,
    powerSGD_hook,
)
from nc10d.reducer.plan import Slot
from nc10d.reducer.reducer import Reducer
from nc10d.testing import run_local, run_ranks

SHAPES = [(20, 30), (7,), (30, 4, 5), (2, 2)]
COUNTS = [int(np.prod(shape)) for shape in SHAPES]
STARTS = [0, *np.cumsum(COUNTS)]


@settings(deadline=None)
@given(n=st.integers(1, 12), r=st.integers(1, 4), seed=st.integers(0, 99))
def test_orthonormal_columns_keep_the_span(n, r, seed):
    columns = np.random.default_rng(seed).normal(size=(n, min(n, r)))
    found = orthonormal(columns)
    assert np.allclose(found.T @ found, np.eye(found.shape[1]), atol=1e-8)
    assert np.allclose(found @ (found.T @ columns), columns, atol=1e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("make", [np.ones, np.random.default_rng(0).normal])
def test_dependent_columns_become_zero(dtype, make):
    column = make(size=(30, 1)) if make is not np.ones else np.ones((30, 1))
    column = column.astype(dtype)
    found = orthonormal(np.concatenate([column, 3 * column, column / 7], axis=1))
    assert np.allclose(found[:, :1] * np.linalg.norm(column), column, atol=1e-6)
    assert not found[:, 1:].any()


def test_a_column_of_zeros_stays_zero():
    columns = np.array([[0.0, 3.0], [0.0, 4.0]])
    assert orthonormal(columns).tolist() == [[0, 0.6], [0, 0.8]]


def bucket_of(flat):
    slots = [
        Slot(i, int(at), count, shape)
        for i, (at, count, shape) in enumerate(zip(STARTS, COUNTS, SHAPES, strict=False))
    ]
    return GradBucket(0, flat, slots, SHAPES, True)


def steps(group, hook, flats, options):
    """Reduce `flats[step][rank]` step by step; return the results and the state."""
    state = PowerSGDState(group, **{"start_powerSGD_iter": 2, **options})
    found = []
    for arrays in flats:
        bucket = bucket_of(arrays[group.rank].copy())
        reduced_array(hook(state, bucket), bucket)
        found.append(bucket.buffer())
    return found, state


def gradients(passes, size, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [[rng.normal(size=STARTS[-1]).astype(dtype) for _ in range(size)] for _ in range(passes)]


def in_parts(flat):
    ends = zip(STARTS, STARTS[1:], SHAPES, strict=False)
    return [flat[a:b].reshape(shape[0], -1) for a, b, shape in ends]


HOOKS = [powerSGD_hook, batched_powerSGD_hook]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_first_passes_are_plain_means_and_all_ranks_have_the_same_bits(hook, dtype):
    flats = gradients(4, 3, dtype=dtype)
    ranks = run_local(steps, 3, [hook] * 3, [flats] * 3, [{}] * 3)
    for step, arrays in enumerate(flats):
        mean = np.mean(arrays, axis=0)
        first = ranks[0][0][step]
        assert np.allclose(first, mean, atol=1e-6) == (step < 2)
        assert all(found[step].tobytes() == first.tobytes() for found, _ in ranks)


@pytest.mark.parametrize("feedback", [True, False])
def test_an_incompressible_gradient_is_a_plain_mean(feedback):
    flats = gradients(5, 2)
    options = {"use_error_feedback": feedback}
    found, state = run_local(steps, 2, [powerSGD_hook] * 2, [flats] * 2, [options] * 2)[0]
    for mean, mine in zip([np.mean(x, axis=0) for x in flats], found, strict=True):
        expected, parts = in_parts(mean), in_parts(mine)
        assert np.allclose(parts[1], expected[1], atol=1e-6)
        assert np.allclose(parts[3], expected[3], atol=1e-6)
    assert np.linalg.matrix_rank(parts[0], tol=1e-4) == 1
    assert np.linalg.matrix_rank(parts[2], tol=1e-4) == 1
    rate, before, after = state.compression_stats()
    assert before == 3 * STARTS[-1]
    assert after == 3 * (20 + 30 + 30 + 20 + 7 + 4)
    assert rate == before / after


def test_a_mean_of_low_rank_is_exact():
    def low(seed):
        rng = np.random.default_rng(seed)
        flat = np.zeros(STARTS[-1])
        for x, left in zip(in_parts(flat), (1, 0, 1, 0), strict=True):
            x[...] = left * np.outer(rng.normal(size=x.shape[0]), rng.normal(size=x.shape[1]))
        return flat

    one = low(1)
    flats = [[one, 3 * one]] * 3
    found, _ = run_local(steps, 2, [powerSGD_hook] * 2, [flats] * 2, [{}] * 2)[1]
    assert np.allclose(found[-1], 2 * one, atol=1e-9)


@pytest.mark.parametrize("hook", HOOKS)
def test_error_feedback_loses_nothing(hook):
    """The sum of all results is the sum of all gradients, minus the errors that are still kept."""
    flats = gradients(30, 2, dtype=np.float64)
    ranks = run_local(steps, 2, [hook] * 2, [flats] * 2, [{}] * 2)
    total_in = sum(np.mean(arrays, axis=0) for arrays in flats)
    total_out = sum(ranks[0][0])
    kept = np.mean([state.errors[0] for _, state in ranks], axis=0)
    missing = total_in - total_out
    if hook is batched_powerSGD_hook:
        assert np.allclose(missing, kept[: STARTS[-1]], atol=1e-8)
    else:
        left = np.concatenate([x.ravel() for x in (in_parts(missing)[0], in_parts(missing)[2])])
        assert np.allclose(left, kept, atol=1e-8)


def distance(found, expected):
    return np.linalg.norm(found - expected)


def test_a_warm_start_finds_the_best_approximation_of_a_constant_gradient():
    constant = gradients(1, 1, dtype=np.float64)[0][0]
    flats = [[constant, constant]] * 40
    best = in_parts(constant)[0]
    s = np.linalg.svd(best, compute_uv=False)
    ends = []
    for warm in (True, False):
        options = {"warm_start": warm, "use_error_feedback": False}
        found, _ = run_local(steps, 2, [powerSGD_hook] * 2, [flats] * 2, [options] * 2)[0]
        ends.append(distance(in_parts(found[-1])[0], best))
    assert ends[0] == pytest.approx(np.sqrt((s[1:] ** 2).sum()), rel=1e-2)
    assert ends[0] < ends[1]


def test_a_gradient_that_was_zero_once_is_compressed_again():
    flats = gradients(8, 2)
    flats[3] = [np.zeros_like(x) for x in flats[3]]
    flats[2] = flats[3]
    found, _ = run_local(steps, 2, [powerSGD_hook] * 2, [flats] * 2, [{}] * 2)[0]
    assert not found[3].any()
    assert in_parts(found[4])[0].any()
    assert np.isfinite(np.concatenate(found)).all()


def test_a_pickled_state_continues():
    state = PowerSGDState(None, 3, 5)
    state.errors[1] = np.ones(2)
    copy = pickle.loads(pickle.dumps(state))
    assert copy.rank == 3
    assert copy.errors[1].tolist() == [1, 1]
    with pytest.raises(ValueError, match="needs a process_group"):
        _ = copy.group


def test_feedback_and_a_warm_start_need_two_plain_passes():
    for options in ({"warm_start": False}, {"use_error_feedback": False}, {}):
        with pytest.raises(ValueError, match="2 or more"):
            PowerSGDState(None, start_powerSGD_iter=1, **options)
    PowerSGDState(None, start_powerSGD_iter=0, warm_start=False, use_error_feedback=False)


def through_a_reducer(group, hook):
    state = PowerSGDState(group, start_powerSGD_iter=2)
    params = [np.zeros(shape, np.float32) for shape in SHAPES]
    reducer = Reducer(params, group, hook=hook, state=state, cap_bytes=2000, first_bytes=2000)
    rng = np.random.default_rng(group.rank)
    for _ in range(4):
        reducer.begin()
        threads = []
        for param in range(len(params)):
            given = rng.normal(size=SHAPES[param]).astype(np.float32)
            threads.append(threading.Thread(target=reducer.grad_ready, args=(param, given)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        reducer.finish()
        reducer.rebuild()
    return np.concatenate([g.ravel() for g in reducer.gradients]).tobytes()


@pytest.mark.parametrize("hook", HOOKS)
def test_over_the_engine_with_gradients_from_any_thread(hook):
    assert len(set(run_ranks(through_a_reducer, 2, "threads", [hook] * 2))) == 1


class TorchBucket:
    """A bucket with the methods that torch's hook calls."""

    def __init__(self, torch, flat):
        self.flat = torch.tensor(flat)  # a copy, because a hook resizes it

    def buffer(self):
        return self.flat

    def gradients(self):
        ends = zip(STARTS, STARTS[1:], SHAPES, strict=False)
        return [self.flat[a:b].view(shape) for a, b, shape in ends]

    def index(self):
        return 0

    def is_last(self):
        return True


OURS = {"powerSGD_hook": powerSGD_hook, "batched_powerSGD_hook": batched_powerSGD_hook}


def first_factors(name, columns):
    """Return random Qs, flat, and the number of elements of the Ps."""
    side = int(np.ceil(np.sqrt(STARTS[-1])))
    shapes = [(side, side)] if name == "batched_powerSGD_hook" else [(20, 30), (30, 20)]
    count = columns * sum(m for _, m in shapes)
    random = np.random.default_rng(5).normal(size=count).astype(np.float32)
    return random, columns * sum(n for n, _ in shapes)


def beside_torch(group, name, columns, feedback):
    """Run torch's hook over gloo, and nc10d's, from the same Qs; return both results."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

    chosen = {"use_error_feedback": feedback, "matrix_approximation_rank": columns}
    their_state = theirs.PowerSGDState(None, start_powerSGD_iter=2, **chosen)
    our_state = PowerSGDState(group, start_powerSGD_iter=2, **chosen)
    factors, count = first_factors(name, columns)
    our_state.factors[0] = factors.copy()
    shape = (-1, columns) if name == "batched_powerSGD_hook" else (-1,)
    their_state.q_memory_dict[0] = torch.from_numpy(factors.copy()).view(shape)
    their_state.p_memory_dict[0] = torch.empty(count).view(shape)
    found = []
    for arrays in gradients(5, group.size, seed=columns):
        bucket, other = bucket_of(arrays[group.rank].copy()), TorchBucket(torch, arrays[group.rank])
        getattr(theirs, name)(their_state, other).wait()
        reduced_array(OURS[name](our_state, bucket), bucket)
        found.append((bucket.buffer(), other.flat.numpy()))
    return found


def let_torch_take_matrices(theirs):
    """Patch torch 2.13: its batched hook passes a single matrix to a helper that needs a batch."""
    many = theirs._orthogonalize
    theirs._orthogonalize = lambda x, epsilon=0: many(x[None] if x.dim() == 2 else x, epsilon)


KEPT = []


def each_beside_torch(group, cases, meeting):
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

    let_torch_take_matrices(theirs)
    ranks = {"rank": group.rank, "world_size": group.size}
    torch.distributed.init_process_group("gloo", f"file://{meeting}", **ranks)
    # Callbacks of the hook's futures hold the group, too. If their reference was the last, a gloo
    # thread would destroy the group and wait for itself, and torch would end the process.
    KEPT.append(torch.distributed.group.WORLD)
    found = [beside_torch(group, *case) for case in cases]
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.slow
def test_torchs_hooks_compute_the_same(tmp_path):
    pytest.importorskip("torch")
    cases = [(name, *how) for name in OURS for how in [(1, True), (2, False), (4, True)]]
    meeting = str(tmp_path / "meeting")
    for found in run_ranks(each_beside_torch, 2, "processes", [cases] * 2, [meeting] * 2):
        for case, passes in zip(cases, found, strict=True):
            for ours, theirs in passes:
                assert np.allclose(ours, theirs, rtol=1e-3, atol=1e-4), case
