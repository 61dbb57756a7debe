"""An exception ends a pass on some ranks, which is an error on all; or on all, which go on.

Ctrl-C ends `finish` at once; the next pass first waits for the operations in flight.
"""

import gc
import weakref
from contextlib import suppress

import numpy as np
import pytest

from nc10d.errors import CollectiveMismatch
from nc10d.reducer.reducer import Reducer
from nc10d.reducer.stats import UsedParameters
from nc10d.testing import run_local, run_ranks
from nc10d.work import Future

COUNT = 3


class Watched(Future):
    """A Future of a bucket that records waits; Ctrl-C ends the first wait for a `broken` bucket."""

    def __init__(self, bucket, seen, broken):
        super().__init__()
        self._index, self._seen, self._broken = bucket.index(), seen, broken
        self.set_result(bucket.buffer())

    def wait(self, timeout=None):
        if self._index in self._broken:
            self._broken.remove(self._index)
            raise KeyboardInterrupt
        self._seen.append(self._index)
        return super().wait(timeout)


@pytest.mark.parametrize("broken", range(COUNT))
def test_the_next_pass_waits_for_operations_of_an_interrupted_finish(broken):
    seen, interrupted = [], {broken}

    def hook(_, bucket):
        return Watched(bucket, seen, interrupted)

    def train(group):
        reducer = Reducer([np.zeros(4)] * COUNT, group, cap_bytes=8, first_bytes=8, hook=hook)
        reducer.begin()
        given = [np.ones(4) for _ in range(COUNT)]
        for index, gradient in enumerate(given):
            reducer.grad_ready(index, gradient)
        with pytest.raises(KeyboardInterrupt):
            reducer.finish()
        refs = [weakref.ref(gradient) for gradient in given]
        del given, gradient
        gc.collect()
        assert all(ref() is None for ref in refs), "the pass is over: it holds no gradients"
        before = list(seen)
        reducer.begin()
        return before, list(seen)

    before, after = run_local(train, 1)[0]
    assert before == list(range(broken))
    assert after == list(range(COUNT))


def test_the_next_pass_does_not_write_to_flags_in_flight():
    class Group:
        def all_reduce(self, x, *_, async_op):
            taken.append(x)

    taken, used = [], UsedParameters(2)
    used.local[0] = 1
    used.agree(Group())
    used.local[1] = 1
    used.agree(Group())  # no wait in between, because the first pass has failed
    assert [x.tolist() for x in taken] == [[1, 0], [0, 1]]


def ready(reducer, indices):
    for index in indices:
        reducer.gradients[index][...] = 1 + reducer.group.rank
        reducer.grad_ready(index)


def pass_of(reducer, indices=range(COUNT)):
    reducer.begin()
    ready(reducer, indices)
    reducer.finish()
    return [x[0] for x in reducer.gradients]


def passes(reducer):
    for _ in range(3):
        pass_of(reducer)


def buckets(group, **options):
    return Reducer([np.zeros(1)] * COUNT, group, cap_bytes=8, first_bytes=8, **options)


CALLS = {
    "pass": lambda reducer: pass_of(reducer),
    "barrier": lambda reducer: reducer.group.barrier(),
    "broadcast": lambda reducer: reducer.group.broadcast(np.zeros(1), 0, async_op=True).wait(),
}


@pytest.mark.ranks(2, strict=False)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("marked", [None, *range(COUNT + 1)])
def test_a_pass_that_only_one_rank_has_left_is_an_error_on_all_ranks(world, marked, call):
    """Whatever has been launched, and whatever the rank calls next; None: before the pass."""
    reducer = buckets(world)
    pass_of(reducer)
    if world.rank == 0:
        if marked is not None:
            reducer.begin()
            ready(reducer, range(marked))
        reducer.leave()
    with pytest.raises(CollectiveMismatch, match="exception in pass 2 of reducer 1"):
        (passes if world.rank else CALLS[call])(reducer)


@pytest.mark.ranks(2, strict=False)
@pytest.mark.parametrize("marked", range(COUNT + 1))
@pytest.mark.parametrize("end", [Reducer.leave, Reducer.finish])
def test_a_pass_that_all_ranks_have_left_at_the_same_place_is_over(world, marked, end):
    reducer = buckets(world)
    reducer.begin()
    ready(reducer, range(marked))
    with suppress(RuntimeError):  # the missing gradients
        end(reducer)
    assert pass_of(reducer) == [1.5] * COUNT


@pytest.mark.ranks(2, strict=False)
@pytest.mark.parametrize("marked", range(COUNT))
def test_missing_gradients_of_one_rank_are_an_error_on_all_ranks(world, marked):
    reducer = buckets(world)
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="without the gradients"):
            pass_of(reducer, range(marked))
    with pytest.raises(CollectiveMismatch, match="exception in pass 1 of reducer 1"):
        pass_of(reducer)


@pytest.mark.ranks(2, strict=False)
def test_a_rank_that_leaves_a_pass_sends_nothing_before_its_next_call(world):
    """So if the exception ends its program, peers learn of that exception."""
    reducer = buckets(world)
    reducer.begin()
    before = world.seq
    reducer.leave()
    assert world.seq == before
    world.barrier()
    assert world.seq - before == 2


def test_ctrl_c_in_finish_of_one_rank_is_an_error_on_all_ranks():
    class Interrupted(Future):
        def wait(self, timeout=None):
            raise KeyboardInterrupt

    def hook(group, bucket):
        work = bucket.average(group)
        return work if group.rank or reducers[0].passes == 0 else Interrupted()

    reducers = {}

    def run(group):
        reducer = reducers[int(group.rank)] = buckets(group, hook=hook)
        pass_of(reducer)
        if group.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                pass_of(reducer)
        with pytest.raises(CollectiveMismatch, match="exception in pass 2 of reducer 1"):
            passes(reducer)

    run_ranks(run, 2)
