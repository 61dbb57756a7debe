"""torch's Work and Future for an operation that nc10d has launched.

A Work ends before its Future does, but a wait for the Work returns after both have ended. torch's
Reducer, and comm hooks, ask for a Future during a backward pass. Then the pass itself waits for the
operation at its end, before the Reducer does. So an error of the operation comes out of
`backward()` as it is, and the thread that waits makes the operation progress.

A Future's callback may launch another operation and wait for its Future, as torch's PowerSGD
does. So a group's Futures end in turn, each with its callbacks: all ranks launch in the same order.
A Future that is asked for in a callback has ended: the operation is waited for there.

While torch's profiler runs, a Work has an event, "nc10d:all_reduce" and so on, with input shapes,
from the launch of the operation to its end. A separate thread ends the event, which makes it
asynchronous in torch's terms, as the events of torch's own backends are.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nc10d.base.signal_errors import Event, Thread
from nc10d.errors import DistError
from nc10d.torch.backend.torch_errors import torch_error
from nc10d.work import Work

_enter = torch._C._autograd._record_function_with_args_enter
_exit = torch._C._autograd._record_function_with_args_exit
NEVER = timedelta(0)
"""What torch passes for no timeout."""


def ended_work() -> Work:
    """Return the Work for an operation that has ended."""
    work = Work()
    work._finish()
    return work


_begin = dist._Work.__init__


class TorchWork(dist._Work):
    """A launched operation; `outputs` are the written tensors."""

    def __init__(self, work: Work, outputs: list[torch.Tensor], order: FutureOrder) -> None:
        _begin(self)
        self.work: Work | None = work
        self._order = order
        self._outputs = outputs
        self._future: _LaunchedFuture | None = None

    def _launched(self) -> Work:
        assert self.work is not None, "a slim Work is seen by torch's C++ code alone"
        return self.work

    def wait(self, timeout: timedelta = NEVER) -> bool:
        """Block until the operation, and a Future that was asked for, has ended; see Work.wait."""
        work = self.work
        if work is None:
            return True
        try:
            return work.wait(timeout or None)
        except DistError as error:
            raise torch_error(error, of_wait=work.exception() is None) from error
        finally:
            if self._future is not None and work.is_completed():
                self._order.end(self._future, wait=True)

    def synchronize(self) -> None:
        """Wait for the operation; on CUDA, only the current stream does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Order the current stream's later work after the operation."""
        self._launched().block_current_stream()

    def is_completed(self) -> bool:
        """Return whether the operation has ended; never blocks."""
        return self.work is None or self.work.is_completed()

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error; never blocks."""
        return self.work is None or self.work.is_success()

    def exception(self) -> BaseException | None:
        """Return a failed operation's error, else None."""
        found = None if self.work is None else self.work.exception()
        return torch_error(found) if isinstance(found, DistError) else found

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation writes, after the operation's end."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Return the rank in the group from which a receive came."""
        self.wait()
        return int(self._launched().result())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a torch.futures.Future for the list of outputs."""
        if self._future is None:
            self._future = _LaunchedFuture(self._launched(), self._outputs, self._order)
        return self._future.torch

    def get_future_result(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a Future that ends with the operation."""
        return self.get_future()

    def slim(self) -> None:
        """Drop an ended operation's tensors; torch's C++ code may still wait."""
        self.work, self._outputs, self._future = None, [], None


class FutureOrder:
    """Ends a group's Futures in turn, in the order in which they are ready."""

    def __init__(self) -> None:
        self._ready: deque[_LaunchedFuture] = deque()
        self._lock = threading.Lock()
        self._thread = 0

    def in_callback(self) -> bool:
        """Return whether the calling thread runs a callback of a Future in the group."""
        return self._thread == threading.get_ident()

    def end(self, future: _LaunchedFuture, wait: bool) -> None:
        """End a Future, or leave it to the thread that is ending others.

        With `wait`, block until it and all earlier ones have ended. In a callback it ends at once.
        """
        if self.in_callback():
            future.end()
            return
        self._ready.append(future)
        # With `wait`, the lock is taken even if another thread has taken the Future out of
        # `_ready`: that thread holds the lock until the Future has ended.
        while (wait or self._ready) and self._lock.acquire(wait):
            wait, self._thread = False, threading.get_ident()
            try:
                while self._ready:
                    self._ready.popleft().end()
            finally:
                self._thread = 0
                self._lock.release()


class _LaunchedFuture:
    """A torch Future that ends with an operation; `torch` is the Future."""

    def __init__(self, work: Work, outputs: list[torch.Tensor], order: FutureOrder) -> None:
        self._work, self._outputs, self._order = work, outputs, order
        self._ended, self._lock = False, threading.Lock()
        devices = sorted({x.device for x in outputs if x.is_cuda}, key=str)
        if devices:
            self.torch = self._ordered(devices)
            self._ended = True
            return
        self._first = torch.futures.Future()
        if order.in_callback():  # this is the thread that would end the Future
            self._work_ended()
        if work.is_success():
            self.torch = self._first
            self.end()
            return
        # Only a callback's error is an error to torch's C++ code: the Reducer reads a Future with
        # an exception that Python has set as if it had a value.
        self.torch = self._first.then(self._check)
        work.add_done_callback(self._ready)
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)

    def _ordered(self, devices: list[torch.device]) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a Future that has ended, on whose value later work on a device waits."""
        future = torch.futures.Future(devices=devices)
        with contextlib.ExitStack() as streams:
            for device in devices:
                streams.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
            self._work.wait()
            future.set_result(self._outputs)
        return future

    def _check(self, _: object) -> list[torch.Tensor]:
        error = self._work.exception()
        if isinstance(error, DistError):
            raise torch_error(error) from error
        if error is not None:
            raise error
        return self._outputs

    def _ready(self, _: Work) -> None:
        self._order.end(self, wait=False)

    def _wait(self) -> None:
        self._work_ended()
        self._order.end(self, wait=True)

    def _work_ended(self) -> None:
        try:
            self._work.wait()
        except DistError as error:
            raise torch_error(error) from error

    def end(self) -> None:
        """End the Future, and run its callbacks, unless that has been done."""
        with self._lock:
            ended, self._ended = self._ended, True
        if not ended:
            self._first.set_result(self._outputs)


@contextlib.contextmanager
def beginning_event(name: str, inputs: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Begin an event for the launch in the with-block, and yield it; an error there ends it."""
    event = _enter(name, *inputs)
    try:
        yield event
    except BaseException:
        _end_event(event)
        raise


def _end_event(event: Any) -> None:
    thread = Thread(target=_exit, args=(event,), name="nc10d-profiled", daemon=True)
    thread.start()
    thread.join()


class ProfiledWork(TorchWork):
    """A Work that ends an event with its end; a wait returns after the event has ended."""

    def __init__(
        self, work: Work, outputs: list[torch.Tensor], order: FutureOrder, event: Any
    ) -> None:
        super().__init__(work, outputs, order)
        self._event_ended = Event()

        def finish(_: Work) -> None:
            _end_event(event)
            self._event_ended.set()

        work.add_done_callback(finish)

    def wait(self, timeout: timedelta = NEVER) -> bool:
        """Block until the operation and the event have ended."""
        super().wait(timeout)
        return self._event_ended.wait()
