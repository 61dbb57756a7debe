"""A group in pure Python whose Works are made from futures: delayed, out of order, or failed.

`UnrulyGroup` is a group as a user writes it: two base classes, and `_run`. Its own thread passes
operations to another group in their order, and ends their Works late, out of order, or with errors.
"""

import queue
import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.errors import PeerLost
from nc10d.group.collectives import Collectives
from nc10d.group.process_group import Members
from nc10d.reducer.hooks import allreduce_hook, bf16_compress_hook, fp16_compress_wrapper
from nc10d.reducer.hooks.powersgd import PowerSGDState, powerSGD_hook
from nc10d.reducer.reducer import Reducer
from nc10d.testing import run_local
from nc10d.work import Future, Work


class UnrulyGroup(Collectives, Members):
    """Ends Works late and in random order; Works of a bucket in `dropped` fail."""

    def __init__(self, group, seed, dropped=()):
        Members.__init__(self, group.name, group.ranks, group.rank)
        self._inner = group
        self._random = random.Random(seed)
        self.dropped = dropped
        self._todo = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _run(self, op, array, async_op, timeout):
        future = Future()
        self._todo.put((op, array, future))
        work = Work.from_future(future)
        return work if async_op else work.wait() and None

    def _serve(self):
        held = []
        while True:
            if held and self._todo.empty():
                self._let_go(held)
            task = self._todo.get()
            if task is None:
                self._let_go(held)
                return
            held.append((task[2], self._outcome(*task[:2])))
            if self._random.random() < 0.3:
                self._let_go(held)

    def _outcome(self, op, array):
        purpose = op.op.purpose if hasattr(op, "op") else ""
        if any(purpose.startswith(f"bucket {index} ") for index in self.dropped):
            return PeerLost(f"the call for {purpose} was dropped")
        self._inner._run(op, array, False, None)
        return None

    def _let_go(self, held):
        self._random.shuffle(held)
        for future, error in held:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
        held.clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._todo.put(None)
        self._thread.join()


PARAMS = [np.zeros((3, 4), np.float32), np.zeros(5, np.float32), np.zeros((8, 8), np.float32)]


def train(group, seed, hook):
    """Return the gradients after each of three passes on an unruly group of this rank."""
    order = random.Random(100 * seed + group.rank)
    found = []
    with UnrulyGroup(group, 7 * seed + group.rank) as unruly:
        state = PowerSGDState(unruly, start_powerSGD_iter=2) if hook is powerSGD_hook else None
        options = {"hook": hook, "state": state, "find_unused_parameters": True}
        reducer = Reducer(PARAMS, unruly, cap_bytes=64, first_bytes=16, **options)
        for step in range(3):
            reducer.begin()
            for param in order.sample(range(3), 3):
                reducer.gradients[param][...] = (group.rank + 1) * (step + param + 1)
                reducer.grad_ready(param)
            reducer.finish()
            found.append([g.copy() for g in reducer.gradients])
    return found


HOOKS = [None, bf16_compress_hook, fp16_compress_wrapper(allreduce_hook), powerSGD_hook]


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), size=st.sampled_from([1, 2, 4]), hook=st.sampled_from(HOOKS))
def test_gradients_are_the_means_in_any_order_of_the_ends_of_works(seed, size, hook):
    mean = (size + 1) / 2
    for found in run_local(train, size, [seed] * size, [hook] * size):
        for step, gradients in enumerate(found):
            for param, gradient in enumerate(gradients):
                assert np.allclose(gradient, mean * (step + param + 1), rtol=1e-2)


def with_a_drop(group, index):
    with UnrulyGroup(group, group.rank, dropped=[index]) as unruly:
        reducer = Reducer(PARAMS, unruly, cap_bytes=8, first_bytes=8)
        for wrong in (True, False):
            reducer.begin()
            for param in range(3):
                reducer.grad_ready(param, np.full_like(PARAMS[param], group.rank))
            if wrong:
                with pytest.raises(PeerLost, match=rf"call for bucket {index} of .* was dropped"):
                    reducer.finish()
                unruly.dropped = ()
            else:
                reducer.finish()
        return [float(g.flat[0]) for g in reducer.gradients]


@pytest.mark.parametrize("index", range(3))
def test_a_dropped_call_fails_only_its_pass(index):
    assert run_local(with_a_drop, 2, [index] * 2) == [[0.5, 0.5, 0.5]] * 2
