"""A rank for tests, as a thread or as a process: it joins a group, then runs tasks.

A rank takes a task (a function and its arguments), runs it with its default group as the first
argument, and returns an outcome: (True, result) or (False, error). A rank whose task raises an
error other than a DistError aborts its groups, so that no other rank waits for it.
"""

# ruff: noqa: D102  (RankWorker documents the methods)
from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from nc10d.errors import DistError
from nc10d.group import world

Outcome = tuple[bool, Any]
STOP = None
EXIT_SECONDS = 5.0
"""Seconds that a process has to leave its group before it is killed."""


class RankWorker(ABC):
    """A rank as its owner sees it."""

    @abstractmethod
    def submit(self, task: Any) -> None:
        """Send a function and its arguments; to another process, both must pickle."""

    @abstractmethod
    def result(self, timeout: float) -> Outcome | None:
        """Wait for an outcome; None if there is none within `timeout` seconds."""

    @abstractmethod
    def end(self) -> None:
        """Ask the rank to end, and wait until it has."""

    @abstractmethod
    def abandon(self) -> None:
        """Give the rank up, even if it is running a task."""


class ThreadWorker(RankWorker):
    """A rank as a thread with a world of its own."""

    def __init__(self, join: Callable[[], None]) -> None:
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._main, args=(join,), name="nc10d-rank", daemon=True
        )
        self._thread.start()

    def _main(self, join: Callable[[], None]) -> None:
        with world.own_world():
            serve(join, self._tasks.get, self._outcomes.put)

    def submit(self, task: Any) -> None:
        self._tasks.put(task)

    def result(self, timeout: float) -> Outcome | None:
        try:
            return self._outcomes.get(timeout=timeout)
        except queue.Empty:
            return None

    def end(self) -> None:
        self.abandon()
        self._thread.join(2 * EXIT_SECONDS)

    def abandon(self) -> None:
        self._tasks.put(STOP)  # the thread ends after its task; it can't be killed


class PipeWorker(RankWorker):
    """A rank in another process, at the other end of a pipe."""

    _pipe: Connection

    @abstractmethod
    def _ending(self) -> str:
        """Return a text about the end of the rank's process."""

    def submit(self, task: Any) -> None:
        self._pipe.send(task)

    def result(self, timeout: float) -> Outcome | None:
        try:
            return self._pipe.recv() if self._pipe.poll(timeout) else None
        except (EOFError, ConnectionResetError):
            return False, RuntimeError(self._ending())

    def _ask_to_end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(STOP)


class ProcessWorker(PipeWorker):
    """A rank as a spawned process, which Ctrl-C does not reach."""

    def __init__(self, host: str, port: int, rank: int, size: int, options: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, worker_end = context.Pipe()
        arguments = (worker_end, host, port, rank, size, options)
        self.process = context.Process(target=_process_main, args=arguments, daemon=True)
        with _interrupts_blocked():
            self.process.start()
        worker_end.close()

    def _ending(self) -> str:
        self.process.join()
        return f"the process ended with code {self.process.exitcode}"

    def end(self) -> None:
        self._ask_to_end()
        self.process.join(EXIT_SECONDS)
        self.abandon()

    def abandon(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start processes with SIGINT blocked, until they leave the terminal's foreground."""
    resource_tracker.ensure_running()  # starting it here would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_foreground() -> None:
    """Leave Ctrl-C to the owner's process; a SIGINT sent to this process itself still counts."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # discards a pending SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_with_owner() -> None:
    """Exit when the owner's process has ended, even during a task."""
    owner = multiprocessing.parent_process()
    assert owner is not None, "only a started process has ranks to end"

    def watch() -> None:
        owner.join()
        os._exit(1)

    threading.Thread(target=watch, name="nc10d-watch", daemon=True).start()


def _process_main(
    pipe: Connection, host: str, port: int, rank: int, size: int, options: dict[str, Any]
) -> None:
    from nc10d.store import TCPStore

    def join() -> None:
        store = TCPStore(host, port, size, is_master=False, wait_for_workers=False)
        world.init_process_group(store=store, rank=rank, world_size=size, **options)

    _leave_foreground()
    _end_with_owner()
    serve(join, pipe.recv, partial(send_outcome, pipe))


def send_outcome(pipe: Connection, outcome: Outcome) -> None:
    """Send an outcome to the owner's process; an error's traceback becomes a note."""
    done, result = outcome
    pipe.send((done, result if done else portable(result)))


def serve(
    join: Callable[[], None], tasks: Callable[[], Any], report: Callable[[Outcome], None]
) -> None:
    """Join the group, run tasks until STOP, and leave the group."""
    try:
        join()
        report((True, None))
    except BaseException as error:  # noqa: BLE001  (the owner handles any error)
        report((False, error))
        return
    for finished in itertools.count():
        try:
            task = tasks()
            if task is STOP:
                break
            _call("resume", finished)
            function, arguments = task
            result = function(world.get_default_group(), *arguments)
            report((True, result))
            _call("rest", finished + 1)
        except EOFError:
            break
        except BaseException as error:  # noqa: BLE001
            _abort_groups(error)
            report((False, error))
    if world.current_world().default is not None:
        world.destroy_process_group()


def _call(name: str, finished: int) -> None:
    """Call a method of the default group's backend for the CPU, if that has it."""
    group = world.current_world().default
    backend = None if group is None else group._ready.get("cpu")
    getattr(backend, name, lambda _: None)(finished)


def _abort_groups(error: BaseException) -> None:
    """Abort the groups after an error of the task, so that no other rank waits for this rank."""
    if not isinstance(error, DistError):
        for group in [*world.current_world().groups.values()]:
            group.abort(f"rank {group.rank} raised {type(error).__name__}: {error}")


_REMOTE_HEAD = "on its own rank:\n"
_notes_lock = threading.Lock()


def portable(error: BaseException) -> BaseException:
    """Write the traceback, which does not pickle, into a note; idempotent."""
    with _notes_lock:
        if not any(note.startswith(_REMOTE_HEAD) for note in getattr(error, "__notes__", ())):
            text = traceback.TracebackException.from_exception(error)
            _drop_remote_notes(text)
            error.add_note(_REMOTE_HEAD + "".join(text.format()))
    return error


def _drop_remote_notes(text: traceback.TracebackException | None) -> None:
    """Remove the notes with other ranks' tracebacks: they would repeat in every report."""
    while text is not None:
        notes = getattr(text, "__notes__", None) or ()
        kept = [note for note in notes if not note.startswith(_REMOTE_HEAD)]
        text.__notes__ = kept  # type: ignore[attr-defined,unused-ignore]
        text = text.__cause__ or text.__context__
