"""The Reducer: gradients averaged over a group in buckets, while the backward pass still runs.

    reducer = Reducer(params, group)
    for batch in batches:
        reducer.begin()
        for i in reversed(range(len(params))):      # any order, any thread
            reducer.gradients[i][...] = ...
            reducer.grad_ready(i)
        reducer.finish()                            # reducer.gradients are the means now

Contract: every rank makes a Reducer of the same parameters, and begins and finishes the same
passes. It knows arrays and a group, no framework. `begin`, `finish` and `rebuild` are for one
thread, `grad_ready` is for any. Nothing else may use the group while a pass runs, unless every
rank does so at the same place between the same two buckets.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nc10d.buffer import as_buffer
from nc10d.ops import Array
from nc10d.reducer.agreement import agree_on_order, verify_numbers, verify_parameters
from nc10d.reducer.backward import BackwardPass
from nc10d.reducer.bucket import Allocate, Storage
from nc10d.reducer.hooks import CommHook, allreduce_hook
from nc10d.reducer.plan import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    BucketPlan,
    Plan,
    arrival_order,
    plan_buckets,
    spec_of,
)
from nc10d.reducer.schedule import Schedule
from nc10d.reducer.usage import Usage

if TYPE_CHECKING:
    from nc10d.group import ProcessGroup

_NAME = 24
"""How many characters of a parameter's name a bucket is called by."""


class Reducer:
    """Averages the gradients of `params` over `group`.

    `params` are arrays; of each, shape and dtype count, and its gradient has the same. `names`
    (one each) are for errors. Buckets hold about `cap_bytes`, the first to leave `first_bytes`;
    `allocate(count, dtype)` makes their memory (nc10d.zeros: memory that peers read directly).
    `hook(state, bucket)` says what becomes of a bucket: the mean, if nothing else is said. The
    state is the group, if nothing else is said.

    With `find_unused_parameters`, passes may declare gradients unused, and a gradient that no rank
    has used stays untouched. With `static_graph`, the first pass learns how often each gradient is
    marked, and all later ones are like it.

    Blocks until all ranks have made theirs. ValueError, on every rank, if their parameters or
    options differ.
    """

    def __init__(
        self,
        params: Sequence[Array],
        group: ProcessGroup,
        *,
        names: Sequence[str] | None = None,
        hook: CommHook | None = None,
        state: Any = None,
        cap_bytes: int = BUCKET_BYTES,
        first_bytes: int = FIRST_BUCKET_BYTES,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        allocate: Allocate = np.zeros,
    ) -> None:
        self.group = group
        self._params = list(params)
        self._names = _names(names, len(self._params))
        self._specs = [spec_of(x) for x in self._params]
        self._caps = cap_bytes, first_bytes
        self._allocate = allocate
        self._find_unused = find_unused_parameters
        self._static = static_graph
        self._hook = None if hook is None else (hook, state)
        self._lock = threading.RLock()
        self._usage = Usage(len(self._params))
        self._pass: BackwardPass | None = None
        self._arrived: list[int] | None = None
        self._learnt: list[int] | None = None
        self._rebuilt = False
        self._stats: list[int] = [0] * len(self._params)
        self._used = [True] * len(self._params)
        verify_parameters(group, self._specs, self._names)
        verify_numbers(group, self._options())
        group.reducers += 1
        self._number = group.reducers
        self._lay_out(plan_buckets(self._specs, *self._caps))

    def _options(self) -> dict[str, int]:
        """Return what all ranks must have alike besides parameters, by what an error calls it."""
        return {
            "caps of buckets in bytes": self._caps[0],
            "caps of the first bucket in bytes": self._caps[1],
            "settings of find_unused_parameters": self._find_unused,
            "settings of static_graph": self._static,
        }

    def _lay_out(self, plan: Plan) -> None:
        self.plan = plan
        purposes = [self._purpose(index, bucket) for index, bucket in enumerate(plan.buckets)]
        self._storage = Storage(plan, self._params, self._allocate, purposes)
        self._schedule = Schedule([bucket.params for bucket in plan.buckets], self._names)

    def _purpose(self, index: int, bucket: BucketPlan) -> str:
        """Return what the call that reduces a bucket is for; short, as errors show both sides."""
        first = self._names[bucket.params[0]][-_NAME:]
        return f"bucket {index} of reducer {self._number} ({first})"

    @property
    def gradients(self) -> list[Array]:
        """The gradients, by parameter: views of the buckets; others after `rebuild`."""
        return self._storage.gradients

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        self._refuse_running("zero_grad")
        self._storage.zero()

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook(state, bucket)` reduce buckets; once, and before the first pass."""
        if self._hook is not None:
            raise RuntimeError("a comm hook has been registered already")
        if self._pass is not None or self._arrived is not None:
            raise RuntimeError("a comm hook must be registered before the first pass")
        self._hook = hook, state

    def begin(self, unused: Collection[int] = ()) -> None:
        """Begin a pass; the gradients of `unused` parameters will not come. Does not block.

        What lies in `gradients` for them takes part in the mean: zero it, or let it accumulate.
        Without `begin` and `finish`, a pass accumulates, and nothing is reduced. RuntimeError if a
        pass has not been finished; ValueError if `unused` needs `find_unused_parameters`.
        """
        self._refuse_running("begin")
        marks = self._marks(frozenset(unused))
        with self._lock:
            self._pass = BackwardPass(self._storage, self._schedule, marks, self._leave)
            self._pass.start()

    def _marks(self, unused: frozenset[int]) -> list[int] | None:
        """Return how often each parameter is going to be marked; None if that is to be learnt."""
        if self._static:
            return self._learnt
        if unused and not self._find_unused:
            raise ValueError("unused gradients need a Reducer with find_unused_parameters=True")
        if not unused <= frozenset(range(len(self._params))):
            raise ValueError(f"unused must be parameters' indices, got {sorted(unused)}")
        return [int(param not in unused) for param in range(len(self._params))]

    def grad_ready(self, param: int, gradient: Array | None = None) -> None:
        """Take note that a gradient is final; its bucket leaves when all in it are.

        Without `gradient` it lies in `gradients[param]` already. An array of the caller's own is
        copied there, and gets the mean when the pass is finished. Any order, any thread; may block
        as long as the hook does. RuntimeError if the gradient was not expected (again); ValueError
        or TypeError if the array does not fit. Outside of a pass the parameter only counts as used.
        """
        if gradient is not None:
            self._check(param, gradient)
            self.gradients[param][...] = gradient
        with self._lock:
            self._usage.mark([param])
            if self._pass is not None:
                self._pass.ready(param, gradient)

    def _check(self, param: int, gradient: Array) -> None:
        spec, found, name = self._specs[param], as_buffer(gradient), self._names[param]
        if tuple(found.shape) != spec.shape:
            got = tuple(found.shape)
            raise ValueError(f"{name} has shape {spec.shape}, its gradient has {got}")
        if found.dtype is not spec.dtype:
            got_dtype = found.dtype.label
            raise TypeError(f"{name} is of {spec.dtype.label}, its gradient of {got_dtype}")
        if not found.writable:
            raise ValueError(f"the gradient of {name} is read-only: the mean can't be put there")

    def _leave(self, index: int) -> None:
        hook, state = self._hook or (allreduce_hook, None)
        self._storage.buckets[index].leave(hook, self.group if state is None else state)
        if self._find_unused and index == len(self._storage.buckets) - 1:
            # After the last bucket: a place in the sequence that all ranks share.
            self._usage.agree(self.group)

    def finish(self) -> None:
        """End the pass; when this returns, `gradients` are the means, on every rank.

        Blocks until all ranks' buckets have met. RuntimeError names the gradients that have not
        come; a DistError, or what a hook failed with, is raised when nothing is under way any
        more. The pass is over in any case.
        """
        with self._lock:
            current, self._pass = self._pass, None
        if current is None:
            raise RuntimeError("finish: no pass has begun")
        current.end()
        if self._find_unused:
            self._used = self._usage.settle()
            current.restore(self._used)
        if self._arrived is None:
            self._arrived, self._learnt = current.arrived, current.counts()
        self._stats = current.times

    def rebuild(self) -> bool:
        """Lay the buckets out anew, in the order in which rank 0's gradients arrived.

        Returns whether it did: once, after the first pass that was finished, and not where passes
        may differ (`find_unused_parameters` without `static_graph`). `gradients` are new arrays
        then, with the values of the old ones. Every rank calls, between the same passes; blocks
        until all have.
        """
        self._refuse_running("rebuild")
        varies = self._find_unused and not self._static
        if self._rebuilt or self._arrived is None or varies:
            return False
        mine = arrival_order(self._arrived, len(self._params))
        order = agree_on_order(self.group, mine)
        old = self.gradients
        self._lay_out(plan_buckets(self._specs, *self._caps, order=order))
        for view, gradient in zip(self.gradients, old, strict=True):
            view[...] = gradient
        self._rebuilt = True
        return True

    @property
    def used(self) -> list[bool]:
        """Whether any rank used a parameter up to the end of the last pass that was finished.

        All are, without `find_unused_parameters`.
        """
        return list(self._used)

    def get_backward_stats(self) -> list[int]:
        """Return when each gradient of the last pass was ready, in ns since the pass began."""
        return list(self._stats)

    def _refuse_running(self, what: str) -> None:
        if self._pass is not None:
            raise RuntimeError(f"{what}: the last pass has not been finished; call finish() first")


def _names(names: Sequence[str] | None, count: int) -> list[str]:
    if names is None:
        return [f"parameter {index}" for index in range(count)]
    if len(names) != count:
        raise ValueError(f"there are {len(names)} names for {count} parameters")
    return list(names)
