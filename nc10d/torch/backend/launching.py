"""Launching an operation of nc10d for torch: its Work, its errors, and its event in a profile."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from sys import getrefcount
from typing import Any

import torch
from torch.autograd import profiler

from nc10d import ops
from nc10d.backend.base import NOTHING
from nc10d.errors import DistError
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import World
from nc10d.ops import OP_NAMES, Op
from nc10d.torch.backend import profiling
from nc10d.torch.backend.torch_errors import raising_torch_errors, torch_error
from nc10d.torch.backend.works import TorchWork
from nc10d.work import Work

Tensor = torch.Tensor
UNSET = timedelta(milliseconds=-1)
"""The timeout of torch's options that stands for the group's."""
_MOST_SLIM = 256
_HELD_HERE = 2
"""References to a Work that only a local variable holds, as sys.getrefcount counts them."""


class TorchLauncher:
    """Launches a torch group's calls on `nc10d_group`, the group of nc10d below it."""

    nc10d_group: ProcessGroup

    def _open(self, group: ProcessGroup, world: World) -> None:
        self.nc10d_group = group
        self._world = world
        # torch's C++ code may hold the C++ part of a Work alone, whose methods are the base's once
        # the Python part is gone. So the group keeps Works, without tensors once they have ended.
        self._works: deque[TorchWork] = deque()
        self._slim: deque[TorchWork] = deque(maxlen=_MOST_SLIM)

    def _backend_name(self) -> str:
        """Return the name by which torch knows the backend."""
        raise NotImplementedError

    def _run(
        self, kind: type[Op], extra: Any, x: Any, y: Any, opts: Any, outputs: list[Tensor]
    ) -> TorchWork | None:
        """Run an operation, of parts as in nc10d.backend.base.PARTS."""
        group, timeout = self.nc10d_group, opts.timeout
        limit = None if timeout == UNSET else timeout
        if profiler._is_profiler_enabled and not group.in_batch():
            given = y if kind is ops.ReduceScatter else x
            tensors = [x for x in (given if type(given) is tuple else [given]) if x is not NOTHING]
            name = f"{self._backend_name()}:{OP_NAMES[kind]}"
            with raising_torch_errors(), profiling.beginning(name, tensors) as event:
                work = group._call(kind, extra, x, y, True, limit)
            assert work is not None, "no block is open"
            profiled = self._kept(work, outputs, event)
            return profiled if opts.asyncOp or not profiled.wait() else None
        try:
            work = group._call(kind, extra, x, y, opts.asyncOp, limit)
        except DistError as error:
            raise torch_error(error) from error
        return None if work is None else self._kept(work, outputs)

    def _message(self, kind: type[Op], peer: int | None, x: Tensor, tag: int) -> TorchWork:
        """Start a message."""
        group, event = self.nc10d_group, None
        with contextlib.ExitStack() as stack:
            stack.enter_context(raising_torch_errors())
            if profiler._is_profiler_enabled and not group.in_batch():
                name = "recvAnySource" if peer is None else OP_NAMES[kind]
                name = f"{self._backend_name()}:{name}"
                event = stack.enter_context(profiling.beginning(name, [x]))
            start: Any = group.isend if kind is ops.Send else group.irecv
            work = start(x, peer, tag)
        return self._kept(work, [x], event)

    def _kept(self, work: Work, outputs: list[Tensor], event: Any = None) -> TorchWork:
        """Return a Work for torch, and keep it alive; an `event` ends with it."""
        if event is None:
            kept = TorchWork(work, outputs)
        else:
            kept = profiling.ProfiledWork(work, outputs, event)
        works = self._works
        while works and works[0].is_completed():
            ended = works.popleft()
            if getrefcount(ended) <= _HELD_HERE:
                ended.slim()
            self._slim.append(ended)
        works.append(kept)
        return kept

    @contextlib.contextmanager
    def _block(self, opts: Any, outputs: list[Tensor]) -> Iterator[list[TorchWork]]:
        """Launch the calls on nc10d's group in the with-block together; yield a list for the Work.

        In a block that is open already, they join that.
        """
        found: list[TorchWork] = []
        group = self.nc10d_group
        with raising_torch_errors():
            if group.in_batch():
                yield found
                return
            with group.coalescing_manager(async_ops=opts.asyncOp) as manager:
                yield found
        found.extend(self._kept(work, outputs) for work in manager.works)
