"""The Reducer averages gradients over a group in buckets, while the backward pass still runs.

    reducer = Reducer(params, group)
    for batch in batches:
        reducer.begin()
        for i in reversed(range(len(params))):      # any order, any thread
            reducer.gradients[i][...] = ...
            reducer.grad_ready(i)
        reducer.finish()                            # reducer.gradients are the means now

Contract: every rank makes a Reducer for the same parameters, and begins and finishes the same
passes. A Reducer depends on arrays and a group, not on a framework. A single thread calls `begin`,
`finish` and `rebuild`; any thread may call `grad_ready`. Other code uses the group during a pass
only if every rank does so at the same point, between the same two buckets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias, Unpack

from nc10d.group.process_group import ProcessGroup
from nc10d.ops import Array
from nc10d.reducer.backward import BackwardPass
from nc10d.reducer.buckets.bucket import Allocation
from nc10d.reducer.buckets.storage import StorageMaker
from nc10d.reducer.gradients import SparseGradient, assign, check, fits, rows_on_host
from nc10d.reducer.hooks.builtin import AveragingHook
from nc10d.reducer.hooks.grad_bucket import CommHook, GradBucket
from nc10d.reducer.hooks.local_sgd import PostLocalSGDState
from nc10d.reducer.hooks.powersgd import PowerSGDState
from nc10d.reducer.leaf_passes import LeafPasses
from nc10d.reducer.left_pass import LeftPass
from nc10d.reducer.plan import ReducePlan, arrival_order, spec_of, with_dtypes
from nc10d.reducer.settings import ReducerOptions, Settings
from nc10d.reducer.stats import PassStats
from nc10d.reducer.timing import Moment
from nc10d.reducer.verify import agree_on_order, verify_alike
from nc10d.work import Work

Mark: TypeAlias = "Callable[[int, Array | None, bool], None]"
"""Marks a gradient as final, as `Reducer.grad_ready`, without argument checks."""


class Reducer(PassStats):
    """Averages the gradients of `params` over `group`.

    `params` are arrays; a gradient has the shape and dtype of its parameter, or the dtype that
    `gradient_dtypes` has for it. `hook(state, bucket)` reduces a bucket; the default hook computes
    the mean, and the default state is the group. `options` are the keywords of ReducerOptions:
    names, buckets, sparse and unused gradients, a static graph.

    `allocate(count, dtype)` makes the memory of buckets, or maps devices to such functions. Without
    it, buckets on the CPU are memory that peers can access directly (nc10d.zeros), if the group's
    backend has such memory. `on_reduced(params)` is called for each bucket of a pass, in plan
    order, on a thread of the pass: the gradients of these parameters are means, but not yet those
    of later buckets.

    With the option `leaves` a step has so many leaves, a power of two, and a rank has a pass for
    each of its own (`leaves.mine`). Each pass's gradients are a leaf. The last pass of a rank ends
    the step: `gradients` are then the means over all leaves, added along a fixed tree, with the
    same bits on any number of ranks (see `nc10d.all_reduce_leaves`). All buckets are on the CPU,
    and there is no other hook.

    The constructor blocks until all ranks call it. ValueError, on every rank, if their parameters
    or options differ, or if there are no parameters.
    """

    def __init__(
        self,
        params: Sequence[Array],
        group: ProcessGroup,
        *,
        hook: CommHook | None = None,
        state: object = None,
        allocate: Allocation = None,
        gradient_dtypes: Sequence[object] | None = None,
        on_reduced: Callable[[Sequence[int]], None] | None = None,
        **options: Unpack[ReducerOptions],
    ) -> None:
        self.group = group
        self._params = list(params)
        self.specs = with_dtypes([spec_of(x) for x in self._params], gradient_dtypes)
        self._on_reduced = on_reduced
        self.settings = Settings.of(len(self._params), options)
        self._hook = None if hook is None else (hook, _bound(state, group))
        self.leaves = self._leaf_passes(group)
        """The step's leaves, with the option `leaves`."""
        self._lock = threading.RLock()
        self._averaging = AveragingHook(group.size)
        self._pass: BackwardPass | None = None
        self._left: LeftPass | None = None
        self._first_counts: list[int] | None = None
        self.arrived: list[int] | None = None
        self.rebuilt, self.skipped_buckets = False, 0
        super().__init__(self._params, self.specs)
        verify_alike(group, self._params, self.specs, self.settings)
        if not self._params:
            raise ValueError("a Reducer needs at least one parameter")
        group.reducers += 1
        self._maker = StorageMaker(self._params, self.settings, allocate, group, group.reducers)
        self._storage = self._maker.make(self.settings.plan(self.specs, None))

    def _leaf_passes(self, group: ProcessGroup) -> LeafPasses | None:
        if not self.settings.leaves:
            return None
        if self._hook is not None or self._on_reduced is not None:
            raise ValueError("a Reducer with leaves takes neither a hook nor on_reduced")
        if any(spec.device != "cpu" for spec in self.specs):
            raise TypeError("a Reducer with leaves is for parameters on the CPU")
        passes = LeafPasses(group, self.settings.leaves)
        self._hook = passes, None
        return passes

    @property
    def _ends_step(self) -> bool:
        """Whether the current or next pass reduces over the ranks."""
        return self.leaves is None or self.leaves.is_last

    @property
    def amid_step(self) -> bool:
        """Whether this rank has had some of its leaves in the current step, and not all."""
        return self.leaves is not None and self.leaves.done > 0

    @property
    def plan(self) -> ReducePlan:
        """Each gradient's bucket and offset; a new plan after `rebuild`."""
        return self._storage.plan

    @property
    def gradients(self) -> list[Array]:
        """The gradients by parameter, which `rebuild` replaces: views of buckets, or sparse."""
        return self._storage.gradients

    def zeros_like_buckets(self) -> list[GradBucket]:
        """Return the buckets as hooks see them, filled with zeros, in separate memory."""
        # For sizing a hook's state, or for trying a hook before the first pass.
        return [*self._maker.make(self.plan).buckets]

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        self._between_passes("zero_grad")
        self._storage.zero()

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Let `hook(state, bucket)` reduce the buckets.

        A PowerSGDState or PostLocalSGDState without a group takes the Reducer's.
        RuntimeError if there is a hook already, or after the first pass has begun.
        """
        if self._hook is not None:
            raise RuntimeError("a comm hook has been registered already")
        if self._pass is not None or self.arrived is not None:
            raise RuntimeError("a comm hook must be registered before the first pass")
        self._hook = hook, _bound(state, self.group)

    def set_forward_pass_work_handle(self, work: Work, use_static_world_size: bool = False) -> None:
        """Divide the next pass's sums by the number of ranks that still have a batch.

        Every rank passes the Work of the same all_reduce on an array with a single element: 1, or 0
        if the rank has no batch left. A rank without a batch then calls `shadow_pass`. With
        `use_static_world_size` the divisor is the number of all ranks. A user's comm hook must
        divide by itself. Does not block, but the launch of the first bucket waits for the Work.
        """
        self._between_passes("set_forward_pass_work_handle")
        self._refuse_leaves("set_forward_pass_work_handle")
        self._averaging.count_by(work, use_static_world_size)

    def begin(self, unused: Collection[int] = ()) -> Mark:
        """Begin a pass without gradients for the `unused` parameters. Does not block.

        The current values in `gradients` of unused parameters take part in the mean: zero them, or
        let them accumulate. A pass without `begin` and `finish` accumulates, and reduces nothing.
        Returns this pass's `grad_ready(param, gradient, divided)` without argument checks, for a
        caller whose arrays fit.
        RuntimeError if the last pass is not finished. ValueError if `unused` needs
        `find_unused_parameters`. After a pass that this rank has left, waits as `settle`.
        """
        self._between_passes("begin")
        return self._begin(self.settings.marks(frozenset(unused), self._first_counts))

    def _begin(self, marks: Sequence[int] | None) -> Mark:
        self._record(Moment.BACKWARD_START)
        with self._lock:
            self._pass = BackwardPass(
                self._storage,
                self.settings,
                marks,
                self._launch,
                lock=self._lock,
                used=self._used_parameters.local,
                divisor=self._averaging.divisor if self._hook is None else 0,
                reduced=None if self._on_reduced is None else self._hand_over,
            )
            self._pass.start()
            return self._pass.mark

    def _hand_over(self, index: int) -> None:
        assert self._on_reduced is not None
        self._on_reduced(self.plan.buckets[index].params)

    @property
    def divisor(self) -> int:
        """The divisor of the current pass's gradients; 0 if it is unknown or a hook divides."""
        return 0 if self._pass is None else self._pass.divisor

    def grad_ready(
        self, param: int, gradient: Array | SparseGradient | None = None, divided: bool = False
    ) -> None:
        """Mark a gradient as final; its bucket is launched when all its gradients are final.

        Without `gradient`, the value is already in `gradients[param]`. An array (or SparseGradient)
        of the caller's own is copied there, and receives the mean when the pass is finished. On a
        device it is copied at the launch of the bucket, in stream order: leave it unchanged until
        then; rows are copied to the host at once, which waits for them. Callable in any order and
        from any thread; else it blocks only if the hook blocks. If the caller's own copy to a
        bucket on the CPU has divided by `divisor`, `divided` says so.
        RuntimeError if the gradient is not expected, or not again; ValueError or TypeError if it
        does not fit, or if there is no such parameter. Outside of a pass, only records that the
        parameter is used.
        """
        if not 0 <= param < len(self.specs):
            raise self._no_parameter("grad_ready", param)
        if isinstance(gradient, SparseGradient):
            gradient = rows_on_host(gradient)
        if gradient is not None and not fits(gradient, self._storage.gradients[param]):
            options = self.settings
            check(gradient, self.specs[param], options.sparse[param], options.names[param])
        current = self._pass
        if current is not None:
            current.mark(param, gradient, divided)
            return
        if gradient is not None:
            assign(self.gradients[param], gradient)
        self._used_parameters.local[param] = 1

    def _no_parameter(self, call: str, index: int) -> ValueError:
        count = len(self.specs)
        return ValueError(f"{call}: no parameter has index {index}; there are {count}")

    def declare_unused(self, param: int) -> None:
        """Mark an expected gradient in this pass as unused, as the argument of `begin` does.

        Its current value in `gradients` takes part in the mean. RuntimeError if it is not expected;
        ValueError without `find_unused_parameters`, with a static graph, or for no parameter.
        """
        if not 0 <= param < len(self.specs):
            raise self._no_parameter("declare_unused", param)
        if not self.settings.varies:
            raise ValueError("declare_unused needs find_unused_parameters without static_graph")
        with self._lock:
            if self._pass is None:
                raise RuntimeError("declare_unused: no pass has begun")
            self._pass.declare_unused(param)

    def _launch(self, index: int, unused: bool) -> None:
        buckets = self._storage.buckets
        if index == 0:
            self._record(Moment.COMM_START)
        if not unused:
            hook, state = self._hook or (self._averaging, None)
            buckets[index].launch(hook, self.group if state is None else state)
        if self.settings.find_unused and index == len(buckets) - 1 and self._ends_step:
            # Right after the last bucket, so that every rank launches it at the same point.
            self._used_parameters.agree(self.group)

    def finish(self) -> None:
        """End the pass; afterwards `gradients` are the means, on every rank.

        Blocks until all buckets are reduced. RuntimeError names the missing gradients. A DistError,
        or a hook's error, is raised when no operation is in flight any more. Ctrl-C ends the
        pass, too, without waiting. After any error this rank has left the pass, as by `leave`.
        """
        with self._lock:
            current, self._pass = self._pass, None
        if current is None:
            raise RuntimeError("finish: no pass has begun")
        self._record(Moment.BACKWARD_END)
        try:
            current.end()
            if self.settings.find_unused:
                # Amid a step, a parameter that a leaf has not used adds zeros to the sums.
                ended = self._ends_step
                current.restore(self._used_parameters.wait() if ended else [True] * len(self.specs))
            if self.leaves is not None:
                self.leaves.end_pass()
        except BaseException as error:
            self._left_by(error)
            raise
        finally:
            self._averaging.reset()
        self._record(Moment.COMM_END)
        self.skipped_buckets = current.skipped
        # Amid a step, ranks have had different numbers of passes: all set `arrived` at its end.
        if self.arrived is None and not self.amid_step:
            self.arrived = current.arrived
        if self._first_counts is None:
            self._first_counts = current.counts()
        self._ended(current.began, current.times, current.first_launch)

    def leave(self) -> None:
        """Leave the pass that an exception has ended on this rank, or keeps from beginning.

        Afterwards `gradients` have arbitrary values. If every rank leaves the pass at the same
        place, the next pass is free. Else the ranks no longer compute the same: their next calls
        are a CollectiveMismatch on every rank, which names the pass. Does not block.
        """
        with self._lock:
            current, self._pass = self._pass, None
        if current is not None:
            current.release()
        self._averaging.reset()
        self._left_by(None)

    def _left_by(self, error: BaseException | None) -> None:
        if self._left is None:
            left = f"pass {self.passes + 1}"
            if self.leaves is not None:  # ranks may have made another number of passes
                left = f"step {self.leaves.steps + 1}"
            what = f"{left} of reducer {self._maker.number}"
            self._left = LeftPass(self.group, what, self._storage.nothing())
            self._used_parameters.local = bytearray(len(self.specs))
            if self.leaves is not None:
                self.leaves.reset()
            self._failed(error or self._left.error)

    def settle(self) -> None:
        """After a pass that this rank has left, wait until all ranks have left the pass.

        Afterwards no operation of the pass is in flight. Raises the errors of these operations, and
        CollectiveMismatch if a rank has not left the pass.
        """
        if self._left is not None:
            self._left.wait()
            self._storage.wait()
            self._left = None

    def shadow_pass(self) -> list[Array]:
        """Take part in the other ranks' pass with zeros; return the means.

        `gradients` stay unchanged. For a rank without a batch while other ranks go on; see
        `set_forward_pass_work_handle`. Blocks and raises as `finish`.
        """
        self._between_passes("shadow_pass")
        self._refuse_leaves("shadow_pass")
        own, counts, handing = self._storage, self._first_counts, self._on_reduced
        self._storage, self._on_reduced = self._maker.make(self.plan), None
        try:
            self._begin([0] * len(self._params))
            self.finish()
            return self.gradients
        finally:
            self._storage, self._first_counts, self._on_reduced = own, counts, handing

    def rebuild(self) -> bool:
        """Make new buckets, in the order in which rank 0's gradients arrived.

        Returns True the first time after a finished pass, else False. Also False with
        `bucket_indices`, or if passes may use different parameters (`find_unused_parameters`
        without `static_graph`). `gradients` are then new arrays with the old values. Also
        False amid a step of leaves. Every rank calls, between the same passes; blocks until all
        ranks call.
        """
        self._between_passes("rebuild")
        fixed = self.settings.varies or self.settings.buckets is not None
        if self.rebuilt or self.arrived is None or fixed or self.amid_step:
            return False
        own_order = arrival_order(self.arrived, len(self._params))
        old = self.gradients
        order = agree_on_order(self.group, own_order)
        self._storage = self._maker.make(self.settings.plan(self.specs, order))
        if self.leaves is not None:
            self.leaves.reset()
        for gradient, values in zip(self.gradients, old, strict=True):
            assign(gradient, values)
        self.rebuilt = True
        return True

    def _refuse_leaves(self, call: str) -> None:
        if self.leaves is not None:
            raise ValueError(f"{call}: with leaves, every rank has a pass for each of its leaves")

    def _between_passes(self, call: str) -> None:
        if self._pass is not None:
            raise RuntimeError(f"{call}: the last pass has not been finished; call finish() first")
        self.settle()


def _bound(state: object, group: ProcessGroup) -> object:
    """Give this group to an nc10d hook's state that has none; return the state."""
    if isinstance(state, (PowerSGDState, PostLocalSGDState)) and state.process_group is None:
        state.process_group = group
    return state
