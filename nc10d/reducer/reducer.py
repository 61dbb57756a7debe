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

from nc10d.ops import Array
from nc10d.reducer.average import Average
from nc10d.reducer.backward import BackwardPass
from nc10d.reducer.bucket import Allocation
from nc10d.reducer.bucket_layout import BucketLayouts
from nc10d.reducer.gradients import SparseGradient, assign, check
from nc10d.reducer.hooks import CommHook, GradBucket
from nc10d.reducer.plan import BUCKET_BYTES, FIRST_BUCKET_BYTES, ReducePlan, arrival_order, spec_of
from nc10d.reducer.settings import Settings, checked_names, checked_sparse
from nc10d.reducer.stats import PassStats
from nc10d.reducer.timing import Moment
from nc10d.reducer.verify import agree_on_order, verify_alike
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup


class Reducer(PassStats):
    """Averages the gradients of `params` over `group`.

    `params` are arrays; of each, shape and dtype count, and its gradient has the same. `names`
    (one each) are for errors, and ranks compare them. Buckets hold about `cap_bytes`, the first to
    leave `first_bytes`. `allocate(count, dtype)` makes their memory, or maps devices to what makes
    it there; without it, peers can read it where it lies (nc10d.zeros), if the group's backend for
    the CPU has such memory. `hook(state, bucket)` says what becomes of a bucket: the mean, if
    nothing else is said. The state is the group, if nothing else is said.

    A parameter with `expect_sparse` gets its gradients as SparseGradients, and hooks see them so.
    With `find_unused_parameters`, passes may declare gradients unused, and a gradient that no rank
    has used stays untouched. With `static_graph`, the first pass learns how often each gradient is
    marked, and all later ones are like it. With `delay_all_reduce`, buckets stay until `finish`.

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
        expect_sparse: Sequence[bool] | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        delay_all_reduce: bool = False,
        allocate: Allocation = None,
    ) -> None:
        self.group = group
        self._params = list(params)
        self.specs = [spec_of(x) for x in self._params]
        self.settings = Settings(
            checked_names(names, len(self._params)),
            cap_bytes,
            first_bytes,
            find_unused_parameters,
            static_graph,
            delay_all_reduce,
            checked_sparse(expect_sparse, len(self._params)),
        )
        self._hook = None if hook is None else (hook, state)
        self._lock = threading.RLock()
        self._mean = Average(group.size)
        self._pass: BackwardPass | None = None
        self._learnt: list[int] | None = None
        self.arrived: list[int] | None = None
        self.rebuilt = False
        super().__init__(self._params, self.specs)
        verify_alike(group, self._params, self.specs, self.settings)
        group.reducers += 1
        self._layouts = BucketLayouts(
            self._params, self.specs, self.settings, allocate, group, group.reducers
        )
        self._layout = self._layouts.make()
        self._storage = self._layout.storage

    @property
    def plan(self) -> ReducePlan:
        """Which gradient lies where; another one after `rebuild`."""
        return self._layout.plan

    @property
    def gradients(self) -> list[Any]:
        """The gradients, by parameter: views of the buckets, or SparseGradients.

        They are other objects after `rebuild`.
        """
        return self._storage.gradients

    def zeros_like_buckets(self) -> list[GradBucket]:
        """Return the buckets as hooks see them, full of zeros, in memory of their own.

        To size a hook's state by them, or to try a hook before the first pass.
        """
        return [bucket.seen for bucket in self._layouts.storage(self.plan).buckets]

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        self._refuse_running("zero_grad")
        self._storage.zero()

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Let `hook(state, bucket)` reduce buckets; once, and before the first pass."""
        if self._hook is not None:
            raise RuntimeError("a comm hook has been registered already")
        if self._pass is not None or self.arrived is not None:
            raise RuntimeError("a comm hook must be registered before the first pass")
        self._hook = hook, state

    def set_forward_pass_work_handle(self, work: Work, use_static_world_size: bool = False) -> None:
        """Divide the sums of the next pass by what `work` counts: ranks that still have a batch.

        Its result is an array of one element. Every rank passes the Work of the same all_reduce,
        to which it gave 1, or 0 if it has run out; such a rank calls `shadow_pass` then. With
        `use_static_world_size` sums are divided by all ranks even so. A comm hook divides for
        itself. Does not block; the pass does when its first bucket leaves.
        """
        self._refuse_running("set_forward_pass_work_handle")
        self._mean.count_by(work, use_static_world_size)

    def begin(self, unused: Collection[int] = ()) -> None:
        """Begin a pass; the gradients of `unused` parameters will not come. Does not block.

        What lies in `gradients` for them takes part in the mean: zero it, or let it accumulate.
        Without `begin` and `finish`, a pass accumulates, and nothing is reduced. RuntimeError if a
        pass has not been finished; ValueError if `unused` needs `find_unused_parameters`. Where
        Ctrl-C ended the last `finish`, what that left under way is waited for, and may raise.
        """
        self._refuse_running("begin")
        self._begin(self.settings.marks(frozenset(unused), self._learnt))

    def _begin(self, marks: Sequence[int] | None) -> None:
        schedule, delay = self._layout.schedule, self.settings.delay
        self._storage.settle()
        self._watch.record(Moment.BACKWARD_START)
        with self._lock:
            self._pass = BackwardPass(self._storage, schedule, marks, self._leave, delay=delay)
            self._pass.start()

    def grad_ready(self, param: int, gradient: Array | SparseGradient | None = None) -> None:
        """Take note that a gradient is final; its bucket leaves when all in it are.

        Without `gradient` it lies in `gradients[param]` already. An array (or SparseGradient) of
        the caller's own is copied there, and gets the mean when the pass is finished; on a device
        it is copied when the bucket leaves, in the order of its stream, so leave it alone until
        then. Any order, any thread; may block as long as the hook does. RuntimeError if the
        gradient was not expected (again); ValueError or TypeError if it does not fit. Outside of a
        pass the parameter only counts as used.
        """
        if gradient is not None:
            chosen = self.settings
            check(gradient, self.specs[param], chosen.sparse[param], chosen.names[param])
        if self._pass is not None:
            self._pass.take(param, gradient)
        elif gradient is not None:
            assign(self.gradients[param], gradient)
        with self._lock:
            self._usage.mark(param)
            if self._pass is not None:
                self._pass.ready(param)

    def declare_unused(self, param: int) -> None:
        """Take note that a gradient which this pass expects will not come, as `begin` is told.

        What lies in `gradients` for it takes part. RuntimeError if it was not expected;
        ValueError without `find_unused_parameters`, or with a static graph.
        """
        if not self.settings.varies:
            raise ValueError("declare_unused needs find_unused_parameters without static_graph")
        with self._lock:
            if self._pass is None:
                raise RuntimeError("declare_unused: no pass has begun")
            self._pass.absent(param)

    def _leave(self, index: int) -> None:
        if index == 0:
            self._watch.record(Moment.COMM_START)
        hook, state = self._hook or (self._mean, None)
        self._storage.buckets[index].leave(hook, self.group if state is None else state)
        if self.settings.find_unused and index == len(self._storage.buckets) - 1:
            # After the last bucket: a place in the sequence that all ranks share.
            self._usage.agree(self.group)

    def finish(self) -> None:
        """End the pass; when this returns, `gradients` are the means, on every rank.

        Blocks until all ranks' buckets have met. RuntimeError names the gradients that have not
        come; a DistError, or what a hook failed with, is raised when nothing is under way any
        more. The pass is over in any case, Ctrl-C included, which does not wait.
        """
        with self._lock:
            current, self._pass = self._pass, None
        if current is None:
            raise RuntimeError("finish: no pass has begun")
        self._watch.record(Moment.BACKWARD_END)
        try:
            current.end()
            if self.settings.find_unused:
                current.restore(self._usage.settle())
        finally:
            self._mean.reset()
        self._watch.record(Moment.COMM_END)
        if self.arrived is None:
            self.arrived, self._learnt = current.arrived, current.counts()
        self._ended(current.began, current.times, current.left)

    def shadow_pass(self) -> None:
        """Take part in one pass of the other ranks with zeros; `gradients` stay as they are.

        For a rank that has run out of batches while others go on; see
        `set_forward_pass_work_handle`. Blocks as `finish` does, and raises what that raises.
        """
        self._refuse_running("shadow_pass")
        own, learnt = self._storage, self._learnt
        self._storage = self._layouts.storage(self.plan)
        try:
            self._begin([0] * len(self._params))
            self.finish()
        finally:
            self._storage, self._learnt = own, learnt

    def rebuild(self) -> bool:
        """Lay the buckets out anew, in the order in which rank 0's gradients arrived.

        Returns whether it did: once, after the first pass that was finished, and not where passes
        may differ (`find_unused_parameters` without `static_graph`). `gradients` are new arrays
        then, with the values of the old ones. Every rank calls, between the same passes; blocks
        until all have.
        """
        self._refuse_running("rebuild")
        if self.rebuilt or self.arrived is None or self.settings.varies:
            return False
        mine = arrival_order(self.arrived, len(self._params))
        old = self.gradients
        self._layout = self._layouts.make(agree_on_order(self.group, mine))
        self._storage = self._layout.storage
        for gradient, values in zip(self.gradients, old, strict=True):
            assign(gradient, values)
        self.rebuilt = True
        return True

    def _refuse_running(self, what: str) -> None:
        if self._pass is not None:
            raise RuntimeError(f"{what}: the last pass has not been finished; call finish() first")
