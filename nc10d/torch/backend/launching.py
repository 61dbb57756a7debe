"""Launching an nc10d operation for torch: the Work, the errors, and the event in a profile."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from sys import getrefcount
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd import profiler

from nc10d import ops
from nc10d.arrays.arguments import LARGEST_TAG
from nc10d.backend.prepared_protocol import Arguments
from nc10d.base.promise import PENDING
from nc10d.errors import DistError
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import World
from nc10d.ops import Op
from nc10d.ops.facts import FACTS, NOTHING
from nc10d.torch.backend.torch_errors import raising_torch_errors, torch_error
from nc10d.torch.backend.works import (
    FutureOrder,
    ProfiledWork,
    TorchWork,
    beginning_event,
    ended_work,
)
from nc10d.torch.tensors import WrapperTensorError
from nc10d.work import Work, collect_all

T = TypeVar("T")
UNSET = timedelta(milliseconds=-1)
"""The timeout in torch's options that stands for the group's."""
_MOST_SLIM = 256
_HELD_HERE = 2
"""References to a Work that only a local variable holds, as sys.getrefcount counts them."""


class _Blocking(threading.local):
    here = False


blocking = _Blocking()
"""`here` is True on this thread from the start of torch.distributed.send or recv until the group
is called."""


class _Noted(threading.local):
    works: list[TorchWork] | None = None


def as_torchs(refusal: WrapperTensorError | None, group: ProcessGroup, call: Callable[[], T]) -> T:
    """Make a call as torch's own groups do, so that dispatch modes and tensors' classes see it.

    `refusal` is why the group itself could not make it; that is raised if nothing else can be done.
    """
    if refusal is not None and group.in_batch():
        raise refusal
    try:
        return call()
    except NotImplementedError as error:  # the tensor's class does not know the operator
        raise refusal or error from None


class TorchLauncher:
    """Launches a torch group's calls on `nc10d_group`, the nc10d group below."""

    nc10d_group: ProcessGroup
    torch_name: str
    """The name by which torch knows the backend: "nc10d", or "gloo" in gloo's place."""

    def _open(self, group: ProcessGroup, world: World, name: str) -> None:
        self.nc10d_group, self.torch_name = group, name
        self._world = world
        # torch's C++ code may hold a Work's C++ part alone, whose methods are the base's once the
        # Python part is gone. So the group keeps Works, without tensors once they have ended.
        self._order = FutureOrder()
        self._works: deque[TorchWork] = deque()
        self._slim: deque[TorchWork] = deque(maxlen=_MOST_SLIM)
        self._ended = TorchWork(ended_work(), [], self._order)
        self._over: TorchWork | None = None  # what a blocking collective returns
        self._noted = _Noted()

    @contextlib.contextmanager
    def noting_works(self) -> Iterator[list[TorchWork]]:
        """Collect the Works of the operations that are launched here on this thread."""
        outer, self._noted.works = self._noted.works, []
        try:
            yield self._noted.works
        finally:
            self._noted.works = outer

    def _run(
        self,
        kind: type[Op],
        extra: object,
        x: Arguments,
        y: Arguments,
        opts: Any,
        outputs: list[Tensor],
    ) -> TorchWork | None:
        """Run an operation, with parts as in nc10d.ops.facts.Parts."""
        group, timeout = self.nc10d_group, opts.timeout
        limit = None if timeout == UNSET else timeout
        if profiler._is_profiler_enabled and not group.in_batch():
            given = y if kind is ops.ReduceScatter else x
            tensors = [x for x in (given if type(given) is tuple else [given]) if x is not NOTHING]
            return self._traced(
                FACTS[kind].name,
                tensors,
                lambda: group._call(kind, extra, x, y, True, limit),
                opts.asyncOp,
                outputs,
            )
        try:
            work = group._call(kind, extra, x, y, opts.asyncOp, limit)
        except DistError as error:
            raise torch_error(error) from error
        return self._over if work is None else self._kept(work, outputs)

    def _together(
        self,
        name: str,
        inputs: list[Tensor],
        calls: Callable[[timedelta | None], object],
        opts: Any,
        outputs: list[Tensor],
    ) -> TorchWork | None:
        """Launch the `calls` on nc10d's group together; in an open block, they join the block.

        They take the timeout.
        """
        group = self.nc10d_group
        limit = None if opts.timeout == UNSET else opts.timeout
        if group.in_batch():
            calls(limit)
            return None

        def launch(async_op: bool = True) -> Work | None:
            with group.coalescing_manager(async_ops=async_op) as manager:
                calls(limit)
            return manager.works[0] if manager.works else None

        if profiler._is_profiler_enabled and inputs:
            return self._traced(name, inputs, launch, opts.asyncOp, outputs)
        with raising_torch_errors():
            work = launch(opts.asyncOp)
        return self._over if work is None else self._kept(work, outputs)

    def _traced(
        self,
        name: str,
        inputs: list[Tensor],
        launch: Callable[[], Work | None],
        async_op: bool,
        outputs: list[Tensor],
    ) -> TorchWork | None:
        """Launch asynchronously, as an event in torch's profiler."""
        name = f"{self.torch_name}:{name}"
        with raising_torch_errors(), beginning_event(name, inputs) as event:
            work = launch()
        assert work is not None, "no block is open"
        kept = self._kept(work, outputs, event)
        return kept if async_op or not kept.wait() else self._over

    def _message(self, kind: type[Op], peer: int | None, x: Tensor, tag: int) -> TorchWork:
        """Start a message; the Work has ended if torch's blocking call waits for the message."""
        group = self.nc10d_group
        waits, blocking.here = blocking.here, False
        start: Any = group.isend if kind is ops.Send else group.irecv
        if profiler._is_profiler_enabled and not group.in_batch():
            name = "recvAnySource" if peer is None else FACTS[kind].name
            traced = self._traced(name, [x], lambda: start(x, peer, tag), True, [x])
            assert traced is not None, "it is asynchronous"
            return traced
        try:
            if type(peer) is type(tag) is int and 0 <= tag <= LARGEST_TAG:
                if waits:
                    self._drop_ended()
                    if group.in_batch():
                        start(x, peer, tag)  # the block's end waits
                    else:
                        group._call(kind, peer, x, tag, False, None)
                    return self._ended
                work: Any = group._start(kind, peer, x, tag, None)  # as `start` does
            else:
                work = start(x, peer, tag)
        except DistError as error:
            raise torch_error(error) from error
        return self._kept(work, [x])

    def _kept(
        self, work: Work, outputs: list[Tensor], event: AbstractContextManager[None] | None = None
    ) -> TorchWork:
        """Return a Work for torch, and keep the Work alive; an `event` ends with it."""
        if event is None:
            kept = TorchWork(work, outputs, self._order)
        else:
            kept = ProfiledWork(work, outputs, self._order, event)
        self._drop_ended()
        self._works.append(kept)
        if self._noted.works is not None:
            self._noted.works.append(kept)
        return kept

    def _joined(self, works: Sequence[TorchWork | None]) -> TorchWork | None:
        """Return a Work that ends with all of `works`, with the result of the first.

        None stands for a Work that has ended.
        """
        running = [work for work in works if work is not None]
        if len(running) < 2:
            return running[0] if running else None
        futures = [work._launched().get_future() for work in running]
        values = collect_all(futures).then(lambda ended: [x.value() for x in ended.value()])
        work = Work.from_future(values.then(lambda ended: ended.value()[0]))
        return self._kept(work, [x for work in running for x in work._outputs])

    def _drop_ended(self) -> None:
        """Let go of the first Works' tensors, up to one that is in flight."""
        works = self._works
        while works:
            inner = works[0].work
            if inner is not None and inner._state == PENDING and not inner._look():
                break
            ended = works.popleft()
            if getrefcount(ended) <= _HELD_HERE:
                ended.slim()
            self._slim.append(ended)
