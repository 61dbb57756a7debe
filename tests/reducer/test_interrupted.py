"""Ctrl-C ends `finish` at once; the next pass first waits for the operations in flight."""

import gc
import weakref

import numpy as np
import pytest

from nc10d.reducer.reducer import Reducer
from nc10d.reducer.stats import UsedParameters
from nc10d.testing import run_local
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
