"""Connect autograd to the Reducer: pass on gradients as autograd computes them, return the means.

Contract: autograd calls `_ready` once for each parameter in a backward pass, in any order, and with
a static graph once for each use. The call comes on the thread that called `backward`, or on
autograd's thread for a GPU, and the gradient's stream is current. The first call begins the
Reducer's pass, and the end of autograd's work ends it. A forward pass without a backward pass has
no effect. A hook holds only a weak reference to its Gradients object.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from nc10d.group.process_group import ProcessGroup
from nc10d.kernels.streaming import STREAM_BYTES
from nc10d.ops import Array
from nc10d.reducer.gradients import SparseGradient
from nc10d.reducer.reducer import Mark, Reducer
from nc10d.reducer.schedule import UnexpectedGradientError
from nc10d.reducer.settings import ReducerOptions
from nc10d.torch import in_backward
from nc10d.torch.compiling import in_python
from nc10d.torch.slots import Dense, Sparse, allocation, as_sparse, slot_of, write_means
from nc10d.torch.tensors import DTYPES, as_tensor, like


class Gradients:
    """Averages the gradients of `params` (by name, on the CPU or on GPUs) over a group.

    `targets` are the parameters whose gradients become the means, with dtypes `dtypes` in buckets;
    `params` are their leaves in the graph, or the parameters themselves. Parameters with optimizers
    that step in the backward pass (see `nc10d.torch.in_backward`) are stepped as soon as their
    bucket is reduced.

    With `as_views` the gradients are views of the Reducer's buckets, else separate tensors.
    Parameters named in `sparse` have sparse gradients. `options` are further options for the
    Reducer. `on_end()` is called when a reduced pass has ended.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        sparse: Collection[str],
        group: ProcessGroup,
        *,
        targets: Mapping[str, torch.Tensor],
        dtypes: Mapping[str, torch.dtype] | None,
        as_views: bool,
        options: ReducerOptions,
        find_unused: bool,
        static: bool,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.params = list(params.values())
        self._targets, self._on_end = list(targets.values()), on_end
        self._stepping = {i for i, x in enumerate(self._targets) if in_backward.optimizers(x)}
        self._stepped: set[int] = set()
        self._with_state: set[int] = set()
        if self._stepping and options.get("leaves"):
            raise ValueError("leaves go with no optimizer that steps in the backward pass")
        early = bool(self._stepping) and (static or not find_unused)
        all_options: ReducerOptions = {
            **options,
            "names": list(params),
            "expect_sparse": [name in sparse for name in params],
            "find_unused_parameters": find_unused or static,
            "static_graph": static,
        }
        self.reducer = Reducer(
            self._targets,
            group,
            allocate=allocation(self.params),
            gradient_dtypes=None if dtypes is None else [DTYPES[x] for x in dtypes.values()],
            on_reduced=_weak_step(weakref.ref(self)) if early else None,
            **all_options,
        )
        self._begin_lock = threading.Lock()
        self._as_views, self._static, self._searching = as_views, static, find_unused and not static
        self._reducing = self._announced = False
        self._end_queued = self._compiled = self._left = False
        self._divisor = 0
        self._mark: Mark | None = None
        """Marks a gradient in the pass that goes on; None between passes."""
        self._unused: Collection[int] = ()
        self._arrived: set[int] = set()
        self._slots: list[Dense | Sparse] = []
        self._outside_buckets: list[int] = []
        self._make_slots()
        handles = [
            x.register_post_accumulate_grad_hook(_hook(weakref.ref(self), index))
            for index, x in enumerate(self.params)
        ]
        if self.reducer.leaves is not None:
            handles.append(register_optimizer_step_pre_hook(_optimizer_hook(weakref.ref(self))))
        self.close = weakref.finalize(self, _remove, handles)
        """Remove the hooks: later backward passes are not reduced."""

    def _make_slots(self) -> None:
        rows = zip(self.params, self.reducer.gradients, self._targets, strict=True)
        # Copies bypass the caches if a pass's gradients do not fit into them.
        past = sum(x.nbytes for x in self.params) >= STREAM_BYTES
        self._slots = [slot_of(*row, self._as_views, past) for row in rows]
        self._outside_buckets = [i for i, slot in enumerate(self._slots) if not slot.as_view]

    def prepare(self, reducing: bool) -> None:
        """Prepare a forward pass; before a reduced pass, rebuild the buckets if that is due.

        RuntimeError, once, if an exception has ended the last backward pass on every rank amid its
        gradients. CollectiveMismatch, on every rank, if it has on some ranks alone.
        """
        if self._mark is not None:
            if self._compiled:
                self._finish_compiled()
            else:
                self.leave()
        self.reducer.settle()
        if self._left:
            self._left = False
            raise RuntimeError(_LEFT)
        if reducing and self.reducer.rebuild():
            self._make_slots()

    def expect(self, reducing: bool, output: object) -> None:
        """Announce that a backward pass from `output` may come, and whether it is reduced.

        It is also reduced if an earlier pass was announced as reduced and has not come: a forward
        pass in no_sync does not take an announcement back.
        """
        unused: Collection[int] = ()
        if self._searching and (reducing or self._announced):
            unused = unused_in(output, self.params)
            if self._announced:  # the pass may begin at either output, or at both
                unused = [index for index in unused if index in self._unused]
        self._reducing = reducing or self._announced
        self._announced = self._reducing
        if not self._static:  # the first pass of a static graph has shown the unused parameters
            self._unused = unused
        if self._reducing:
            # With checkpointing, parameters get their gradients in a nested backward pass, which
            # ends before the outer pass. The outputs' gradients come before any nested pass.
            hook = _output_hook(weakref.ref(self))
            for x in tensors_in(output):
                if x.grad_fn is not None:  # a leaf would keep the hook for all passes
                    x.register_hook(hook)

    def _begin_leaf(self) -> None:
        """Drop the gradients from before: a leaf is what a single backward pass computes."""
        leaves = self.reducer.leaves
        if leaves is None or self._mark is not None or self._end_queued:
            return
        for x in (*self.params, *self._targets):
            x.grad = None

    def _ready(self, index: int, x: torch.Tensor) -> None:
        slot = self._slots[index]
        if not self._reducing:
            slot.accumulate(x)
            self.reducer.grad_ready(index)
            return
        with self._begin_lock:
            mark = self._mark or self._begin()
        gradient, divided = slot.move(x, self._divisor, index in self._arrived)
        self._arrived.add(index)
        try:
            mark(index, gradient, divided)
        except UnexpectedGradientError as error:
            error.add_note(_UNEXPECTED)
            raise
        if self._compiled and len(self._arrived) + len(self._unused) == len(self.params):
            self._end()

    def _begin(self) -> Mark:
        for index in self._unused:
            self._slots[index].fill(self.params[index])
        self._arrived.clear()
        self._stepped.clear()
        self._mark = self.reducer.grad_ready  # if `begin` raises, the pass is left all the same
        self._mark = self.reducer.begin(() if self._static else self._unused)
        self._divisor = self.reducer.divisor
        if not self._end_queued:
            self._queue_end()
        return self._mark

    def _queue_end(self) -> None:
        """Let autograd call `_end` when the current backward pass ends.

        A compiled pass drops the callback: there the last expected gradient ends the pass.
        """
        self._compiled = _in_compiled_pass()
        if self._compiled:
            return
        self._end_queued = True
        at_end_of_backward(self._end, self.leave)

    def _end(self) -> None:
        """Wait for the means and write them to the gradients, if any parameter got a gradient."""
        self._end_queued = False
        if self._mark is None:
            return
        late = self._declare_rest_unused() if self._searching else ()
        self._mark, self._announced = None, False
        try:
            self.reducer.finish()
        except RuntimeError as error:
            # Gradients are missing. A DistError is a RuntimeError, too, but has another cause.
            if type(error) is RuntimeError:
                error.add_note(_ADVICE)
            raise
        if self._on_end is not None:
            self._on_end()
        if self._static:
            self._unused = self._missing()
        if self.reducer.amid_step:
            return
        used = self.reducer.used
        means: Collection[int] = {*self._outside_buckets, *self._unused, *late} - self._stepped
        if not all(used):
            means = [index for index in means if used[index]]
        self._write_means(means)
        if self._stepping:
            self._step(i for i in sorted(self._stepping - self._stepped) if used[i])

    def _step_early(self, params: Iterable[int]) -> None:
        """Let these parameters' optimizers step, unless no rank uses the parameters."""
        if self._static:
            if self.reducer.arrived is None:  # the first pass shows at its end which are used
                return
            params = [index for index in params if self.reducer.used[index]]
        self._step(params)

    def _step(self, params: Iterable[int]) -> None:
        """Let these parameters' optimizers step by the means."""
        stepping = [i for i in params if i in self._stepping]
        self._write_means(i for i in stepping if not self._slots[i].as_view)
        for index in stepping:
            in_backward.step(self._targets[index])
        self._stepped.update(stepping)
        if not self._with_state.issuperset(stepping):
            self._with_state.update(stepping)
            in_backward.return_free_memory()

    def _declare_rest_unused(self) -> Collection[int]:
        """Declare the missing gradients unused: they belong to outputs without a backward pass."""
        late = self._missing() - set(self._unused)
        for index in late:
            self._slots[index].fill(self.params[index])
            self.reducer.declare_unused(index)
        return late

    def _missing(self) -> set[int]:
        return set(range(len(self.params))) - self._arrived

    def _write_means(self, params: Iterable[int]) -> None:
        """Write the means to these gradients; all other gradients are views of the buckets."""
        write_means((self._slots[i], self.params[i]) for i in params)

    def check_finished(self) -> None:
        """Raise a RuntimeError if a backward pass has begun and not ended."""
        if self._mark is not None or self._left:
            raise RuntimeError("the last backward pass was left by an exception, and is not over")

    def take_means(self, means: Sequence[Array]) -> None:
        """Set the gradients to the means from the other ranks' pass; None if no rank has one."""
        for x, mean, used in zip(self._targets, means, self.reducer.used, strict=True):
            if not used:
                x.grad = None
            elif isinstance(mean, SparseGradient):
                x.grad = as_sparse(mean, x)
            else:  # the mean is in the memory order of `x`
                own = like(as_tensor(mean.reshape(-1)), x)
                x.grad = own.to(x.grad_dtype or x.dtype)

    def _finish_compiled(self) -> None:
        """Raise an error if a compiled pass has ended without its last gradient."""
        self._mark, self._announced = None, False
        try:
            self.reducer.finish()
        except RuntimeError as error:
            error.add_note(_COMPILED)
            raise

    def leave(self) -> None:
        """Leave the pass that an exception has ended on this rank; see `Reducer.leave`."""
        # A leaf's pass has dropped the gradients from before, also if none has come since.
        dropped = self._end_queued and self.reducer.leaves is not None
        self._left |= self._mark is not None or dropped
        self._mark, self._announced, self._end_queued = None, False, False
        self.reducer.leave()

    def refuse_amid_step(self, what: str) -> None:
        """Raise a RuntimeError amid a step of leaves, and leave the step, which begins again."""
        leaves = self.reducer.leaves
        if leaves is not None and leaves.done:
            had = f"this rank has had {leaves.done} of {len(leaves.mine)} leaves"
            self.leave()
            raise RuntimeError(f"{what} amid a step: {had}. {_AGAIN}")

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.reducer.amid_step:
            own = set(map(id, self._targets))
            if any(id(x) in own for group in optimizer.param_groups for x in group["params"]):
                self.refuse_amid_step("optimizer.step()")


class StepLeaves(Sequence[int]):
    """This rank's leaves in a step. An iteration begins a step: RuntimeError amid one."""

    def __init__(self, gradients: Gradients, leaves: range) -> None:
        self._gradients, self._leaves = gradients, leaves

    def __iter__(self) -> Iterator[int]:
        self._gradients.refuse_amid_step("my_leaves")
        return iter(self._leaves)

    def __getitem__(self, index: Any) -> Any:
        return self._leaves[index]

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        return repr(self._leaves)


_ADVICE = (
    "With DistributedDataParallel: pass find_unused_parameters=True if the output need not depend "
    "on all parameters, and see that all of the module's output takes part in the loss."
)
_UNEXPECTED = (
    "With DistributedDataParallel: forward() must return all tensors that the loss depends on, in "
    "lists, tuples, dicts or dataclasses. A layer in several passes of one backward pass, or in a "
    "checkpoint with use_reentrant=True, needs static_graph=True."
)
_LEFT = (
    "an exception has ended the last backward pass on every rank, so its gradients are not means. "
    "Zero the gradients and go on with a forward pass (with leaves: for this rank's first leaf). "
    "This error comes once."
)
_AGAIN = (
    "The step is dropped, and its gradients are not means: go on with this rank's first leaf of a "
    "step. This error comes once."
)
_COMPILED = (
    "a compiled backward pass (compiled_autograd) ends with the last gradient that the forward "
    "pass expects, and the last pass did not get there."
)


def _in_compiled_pass() -> bool:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(compiled, "in_compiled_autograd_region", False)


def _hook(owner: weakref.ref[Gradients], index: int) -> Callable[[torch.Tensor], None]:
    @in_python  # also if autograd itself is compiled
    def ready(x: torch.Tensor) -> None:
        gradients = owner()
        if gradients is not None:
            gradients._ready(index, x)

    return ready


def _optimizer_hook(owner: weakref.ref[Gradients]) -> Callable[..., None]:
    def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = owner()
        if gradients is not None:
            gradients._before_step(optimizer)

    return before_step


def _weak_step(owner: weakref.ref[Gradients]) -> Callable[[Iterable[int]], None]:
    def step(params: Iterable[int]) -> None:
        gradients = owner()
        if gradients is not None:
            gradients._step_early(params)

    return step


def _output_hook(owner: weakref.ref[Gradients]) -> Callable[[torch.Tensor], None]:
    @in_python
    def begin(_: torch.Tensor) -> None:
        gradients = owner()
        if gradients is not None and gradients._reducing:
            gradients._begin_leaf()
            gradients._queue_end()

    return begin


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def in_backward_pass() -> bool:
    """Return whether this thread runs a part of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(ended: Callable[[], object], left: Callable[[], object]) -> None:
    """Let autograd call `ended` when the current backward pass ends.

    If a node, a hook, an earlier callback or `ended` raises, `left` is called before the caller of
    the backward pass gets the exception; `left` must not raise.
    """
    torch.autograd.Variable._execution_engine.queue_callback(_Callback(ended, left))


class _Callback:
    # autograd does not call a failing pass's callbacks, but drops them.

    __slots__ = ("_ended", "_left")

    def __init__(self, ended: Callable[[], object], left: Callable[[], object]) -> None:
        self._ended = ended
        self._left: Callable[[], object] | None = left

    def __call__(self) -> None:
        self._ended()
        self._left = None

    def __del__(self) -> None:
        if self._left is not None:
            self._left()


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, dicts, sets and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def leaves(outputs: object) -> set[torch.Tensor]:
    """Return the leaves that get gradients in a backward pass from `outputs`."""
    found = {x for x in tensors_in(outputs) if x.is_leaf}
    todo = [x.grad_fn for x in tensors_in(outputs) if x.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)  # a node that accumulates into a leaf has one
        if leaf is not None:
            found.add(leaf)
        new = {behind for behind, _ in node.next_functions if behind is not None} - seen
        seen |= new
        todo.extend(new)
    return found


def unused_in(outputs: object, params: Sequence[torch.Tensor]) -> list[int]:
    """Return the indices of the parameters on which `outputs` do not depend."""
    used = leaves(outputs)
    return [index for index, x in enumerate(params) if x not in used]
