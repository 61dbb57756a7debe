"""Ctrl-C ends `finish` at once; what it leaves under way is waited for before the next pass."""

import gc
import weakref

import numpy as np
import pytest

from nc10d.reducer.reducer import Reducer
from nc10d.reducer.used_parameters import UsedParameters
from nc10d.testing import run_local
from nc10d.work import Future

COUNT = 3


class Watched(Future):
    """A Future of a bucket that notes who waits; Ctrl-C ends the first wait for a `broken` one."""

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
def test_what_an_interrupted_finish_leaves_under_way_is_waited_for_by_the_next_pass(broken):
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


def test_flags_that_are_under_way_are_not_written_to_by_the_next_pass():
    class Group:
        def all_reduce(self, x, *_, async_op):
            taken.append(x)

    taken, usage = [], UsedParameters(2)
    usage.mark(0)
    usage.agree(Group())
    usage.mark(1)
    usage.agree(Group())  # nobody has waited: the pass before this one has failed
    assert [x.tolist() for x in taken] == [[1, 0], [0, 1]]
