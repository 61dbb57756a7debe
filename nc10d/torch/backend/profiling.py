"""Events of torch's profiler for operations: "nc10d:all_reduce" and so on, with input shapes.

An event lasts from the launch of an operation to its end. It is ended by a thread of its own, which
makes it asynchronous in torch's terms, as the events of torch's own backends are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from nc10d.base.signal_errors import Event, Thread
from nc10d.torch.backend.works import NEVER, FutureOrder, TorchWork
from nc10d.work import Work

_enter = torch._C._autograd._record_function_with_args_enter
_exit = torch._C._autograd._record_function_with_args_exit


@contextlib.contextmanager
def beginning(name: str, inputs: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Begin an event for the launch in the with-block, and yield it; an error of it ends it."""
    event = _enter(name, *inputs)
    try:
        yield event
    except BaseException:
        _end(event)
        raise


def _end(event: Any) -> None:
    thread = Thread(target=_exit, args=(event,), name="nc10d-profiled", daemon=True)
    thread.start()
    thread.join()


class ProfiledWork(TorchWork):
    """A Work whose end is the end of an event; a wait for it returns after the event has ended."""

    def __init__(
        self, work: Work, outputs: list[torch.Tensor], order: FutureOrder, event: Any
    ) -> None:
        super().__init__(work, outputs, order)
        self._event_ended = Event()

        def finish(_: Work) -> None:
            _end(event)
            self._event_ended.set()

        work.add_done_callback(finish)

    def wait(self, timeout: timedelta = NEVER) -> bool:
        """Block until the operation and its event have ended."""
        super().wait(timeout)
        return self._event_ended.wait()
