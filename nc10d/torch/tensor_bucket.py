"""Comm hooks on tensors: the bucket as torch's hooks see it, and the conversion of their results.

Contract: a dense bucket's buffer is a flat tensor, a sparse gradient's buffer is a sparse tensor
(COO).
"""

# ruff: noqa: D102  (GradBucket documents the methods)
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, TypeAlias

import torch

from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.dtypes import DType
from nc10d.arrays.interop import map_to_numpy, numpy_view
from nc10d.group.collectives import Collectives
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AllReduce, Array, Op, ReduceOp
from nc10d.reducer.gradients import SparseGradient
from nc10d.reducer.hooks import CommHook, GradBucket, Step
from nc10d.torch.backend.groups import calls_of
from nc10d.torch.slots import as_rows, as_sparse
from nc10d.torch.tensors import as_numpy, as_tensor, like
from nc10d.torch.torch_calls import LaunchedCall
from nc10d.work import Future, Work

_KINDS = "cpu", "cuda"
TORCHS_FUTURE: type = torch._C.Future
"""The base of torch.futures.Future: the type of the Futures of torch.distributed's Works."""
_TORCHS_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_OWN_HOOKS = "nc10d.reducer.hooks."
_GROUPS = "process_group", "subgroup"
"""Attributes of these hooks' states."""
TensorHook: TypeAlias = "Callable[[Any, TensorBucket], Any]"


class TensorBucket(GradBucket):
    """A GradBucket whose methods return tensors, in the bucket's memory."""

    __slots__ = ("_inner",)

    def __init__(self, inner: GradBucket) -> None:
        self._inner = inner

    def index(self) -> int:
        return self._inner.index()

    def buffer(self) -> torch.Tensor:
        """Return the flat tensor with the bucket's gradients, or the sparse gradient."""
        return self._tensor(self._inner.buffer())

    def flat(self) -> torch.Tensor:
        return self._tensor(self._inner.flat())

    def set_buffer(self, buffer: torch.Tensor | Array) -> None:
        """Replace the buffer by another flat tensor or array with the same length.

        A sparse gradient is replaced by another sparse tensor.
        """
        self._inner.set_buffer(as_rows(buffer) if _is_sparse(buffer) else numpy_view(buffer))

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, as views of the buffer with the parameters' shapes and strides."""
        found = self._inner.gradients()
        return [
            self._tensor(x)
            if isinstance(x, SparseGradient)
            else like(self._tensor(x.reshape(-1)), p)
            for x, p in zip(found, self._inner.parameters(), strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        return self._inner.parameters()

    def is_last(self) -> bool:
        return self._inner.is_last()

    def reduction(self, op: ReduceOp) -> ReduceOp:
        return self._inner.reduction(op)

    def all_reduce(self, group: ProcessGroup, op: ReduceOp) -> Work | Future[Any]:
        """Launch the reduction of the buffer over a group: in place, or to a new sparse tensor."""
        return self._reduced(self._inner.all_reduce(group, op))

    def average(self, group: ProcessGroup, count: int | None = None) -> Work | Future[Any]:
        return self._reduced(self._inner.average(group, count))

    def _reduced(self, outcome: Work | Future[Any]) -> Work | Future[Any]:
        if isinstance(outcome, Work):
            return outcome
        return outcome.then(lambda done: self._tensor(done.value()))

    def on_host(self) -> Array:
        return self._inner.on_host()

    def narrowed(self, dtype: DType, over: ProcessGroup | None = None) -> torch.Tensor:
        return as_tensor(self._inner.narrowed(dtype, over))

    def widened(self, narrow: torch.Tensor | Array) -> torch.Tensor:
        return as_tensor(self._inner.widened(numpy_view(narrow)))

    def following(self, outcome: Work | Future[Any], step: Step) -> Future[Any]:
        return self._inner.following(outcome, step)

    def check(self, value: object) -> None:
        self._inner.check(_arrays(value, self._inner))

    def _tensor(self, x: Array) -> torch.Tensor:
        if isinstance(x, SparseGradient):
            return as_sparse(x, self._inner.parameters()[0])
        # A separate tensor for the hook: `.data = y` on the bucket's tensor would lose the bucket.
        return x.detach() if isinstance(x, torch.Tensor) else as_tensor(x)


def on_tensors(hook: TensorHook) -> CommHook:
    """Return a hook on arrays, by the same name, that calls a hook on tensors.

    The hook runs in the caller's context variables, grad mode and autocast state.
    """
    # A backward pass has a separate grad mode, a GPU's autograd thread has no context variables,
    # and autocast would round a hook's matrix products.
    context, restored = copy_context(), _thread_state()
    is_own = getattr(hook, "func", hook).__module__.startswith("nc10d.")

    def in_state(state: object, bucket: GradBucket) -> Any:
        with restored(), _own_groups(state):
            return hook(_own(state) if is_own else state, TensorBucket(bucket))

    @wraps(hook)
    def call(state: object, bucket: GradBucket) -> Work | Future[Any]:
        outcome = context.copy().run(in_state, state, bucket)
        if isinstance(outcome, LaunchedCall):
            outcome = outcome.work
        if isinstance(outcome, Work):
            outcome.ops = [_on_arrays(op, bucket) for op in outcome.ops]
        elif isinstance(outcome, TORCHS_FUTURE):
            return from_torch(outcome, lambda value: _arrays(value, bucket))
        elif isinstance(outcome, Future):
            return outcome.then(lambda done: _arrays(done.value(), bucket))
        return outcome  # for any other type the Reducer raises a TypeError

    return call


@contextmanager
def _own_groups(state: object) -> Iterator[None]:
    """Give the state of a library's hook nc10d's groups, in place of torch's groups above them."""
    # PowerSGD waits for a reduction in another reduction's callback. A torch Future ends on a
    # thread that such a wait stops; an nc10d Future ends in the wait itself, on all ranks in the
    # same order.
    taken: list[tuple[str, object]] = []
    module = type(state).__module__
    if module.startswith((_TORCHS_HOOKS, _OWN_HOOKS)):
        for name in filter(partial(hasattr, state), _GROUPS):
            before = getattr(state, name)
            given = before
            if before is None and module.startswith(_TORCHS_HOOKS):
                given = torch.distributed.group.WORLD
            if (own := _own(given)) is not given:
                taken.append((name, before))
                setattr(state, name, own)
    try:
        yield
    finally:
        for name, before in taken:
            setattr(state, name, before)


def _own(state: object) -> object:
    """Return nc10d's group below a torch group; anything else unchanged."""
    calls = None if isinstance(state, Collectives) else calls_of(state)
    return state if calls is None else calls.nc10d_group


def _thread_state() -> Callable[[], AbstractContextManager[None]]:
    """Return a block that has this thread's grad mode and autocast state."""
    grad = torch.is_grad_enabled()
    casts = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS
    ]

    @contextmanager
    def restored() -> Iterator[None]:
        before = [torch.is_autocast_enabled(kind) for kind in _KINDS]
        dtypes = [torch.get_autocast_dtype(kind) for kind in _KINDS]
        with torch.set_grad_enabled(grad):
            try:
                _set_autocast(casts)
                yield
            finally:
                _set_autocast(zip(_KINDS, before, dtypes, strict=True))

    return restored


def _set_autocast(casts: Iterable[tuple[str, bool, torch.dtype]]) -> None:
    for kind, enabled, dtype in casts:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _on_arrays(op: Op, bucket: GradBucket) -> Op:
    converted = map_to_numpy(op)
    if isinstance(converted, AllReduce):
        converted.x = _own_buffer(converted.x, bucket)
    return converted


def from_torch(
    source: torch.futures.Future[Any], convert: Callable[[Any], object] = lambda value: value
) -> Future[Any]:
    """Return an nc10d Future that ends with a torch Future, and with its value converted."""
    future: Future[Any] = Future()

    def end(done: torch.futures.Future[Any]) -> None:
        try:
            future.set_result(convert(done.value()))
        except Exception as error:  # noqa: BLE001  (wait raises the error)
            future.set_exception(error)

    source.add_done_callback(end)
    return future


def _arrays(value: object, bucket: GradBucket) -> object:
    if _is_sparse(value):
        return as_rows(value)
    if isinstance(value, torch.Tensor):
        return _own_buffer(as_numpy(value), bucket)
    if isinstance(value, Sequence):
        return [_arrays(item, bucket) for item in value]
    return value


def _own_buffer(x: Array, bucket: GradBucket) -> Array:
    """Return the bucket's buffer if `x` is the same memory; the Reducer then skips the copy."""
    buffer = bucket.buffer()
    if isinstance(buffer, SparseGradient):
        return x  # a dense result for a sparse bucket: the Reducer raises a TypeError
    same = x.shape == buffer.shape and as_buffer(x).address == as_buffer(buffer).address
    return buffer if same else x


def _is_sparse(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_sparse
