"""One rank for tests, as a thread or as a process: it joins a group, then runs what it is given.

A rank takes a task (a function and its arguments), runs it with its default group in front, and
gives back an outcome: (True, what it returned) or (False, what it raised). A rank that raises
something of its own fails its groups, so that nobody waits for it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Protocol

from nc10d.errors import DistError
from nc10d.group.world import (
    current_world,
    destroy_process_group,
    get_default_group,
    init_process_group,
    own_world,
)

Outcome = tuple[bool, Any]
STOP = None
EXIT_SECONDS = 5.0
"""Seconds that a process has to leave its group before it is killed."""


class RankWorker(Protocol):
    """One rank as its owner sees it."""

    def give(self, task: Any) -> None:
        """Hand over a function and its arguments."""

    def take(self, timeout: float) -> Outcome | None:
        """Wait for (succeeded, result or error); None if there is none in time."""

    def end(self) -> None:
        """Ask the rank to end, and wait until it has."""

    def drop(self) -> None:
        """Give the rank up, whatever it is doing."""


class ThreadWorker:
    """A rank as a thread with a world of its own."""

    def __init__(self, join: Callable[[], None]) -> None:
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, args=(join,), daemon=True)
        self._thread.start()

    def _main(self, join: Callable[[], None]) -> None:
        with own_world():
            serve(join, self._tasks.get, self._outcomes.put)

    def give(self, task: Any) -> None:
        """Hand over a function and its arguments."""
        self._tasks.put(task)

    def take(self, timeout: float) -> Outcome | None:
        """Wait for an outcome; None if there is none in time."""
        try:
            return self._outcomes.get(timeout=timeout)
        except queue.Empty:
            return None

    def end(self) -> None:
        """Ask the thread to end, and wait until it has."""
        self.drop()
        self._thread.join(2 * EXIT_SECONDS)

    def drop(self) -> None:
        """Let the thread end when it comes back; nobody can make it."""
        self._tasks.put(STOP)


class ProcessWorker:
    """A rank as a process of its own, started afresh (not forked), out of reach of Ctrl-C."""

    def __init__(self, host: str, port: int, rank: int, size: int, options: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, host, port, rank, size, options)
        self.process = context.Process(target=_process_main, args=arguments, daemon=True)
        with _holding_interrupts():
            self.process.start()
        theirs.close()

    def give(self, task: Any) -> None:
        """Hand over a function and its arguments; both must pickle."""
        self._pipe.send(task)

    def take(self, timeout: float) -> Outcome | None:
        """Wait for an outcome; a process that has died is one."""
        try:
            return self._pipe.recv() if self._pipe.poll(timeout) else None
        except EOFError:
            self.process.join()
            return False, RuntimeError(f"the process ended with code {self.process.exitcode}")

    def end(self) -> None:
        """Ask the process to end, and wait until it has; kill it if it does not."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(STOP)
        self.process.join(EXIT_SECONDS)
        self.drop()

    def drop(self) -> None:
        """Kill the process if it still lives."""
        self.process.kill()
        self.process.join()
        self._pipe.close()


@contextlib.contextmanager
def _holding_interrupts() -> Iterator[None]:
    """Start processes in which Ctrl-C waits until they have left the terminal's foreground."""
    resource_tracker.ensure_running()  # its own start ends with SIGINT let through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_foreground() -> None:
    """Leave Ctrl-C to the process that owns this one; a SIGINT meant for this one still counts."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # forgets one that has come already
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_with_owner() -> None:
    """End this process when the one that started it has: a task of a rank may last for ever."""
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
        init_process_group(store=store, rank=rank, world_size=size, **options)

    _leave_foreground()
    _end_with_owner()
    serve(join, pipe.recv, pipe.send)


def serve(
    join: Callable[[], None], tasks: Callable[[], Any], report: Callable[[Outcome], None]
) -> None:
    """Run tasks until told to stop; the group exists for as long."""
    try:
        join()
        report((True, None))
    except BaseException as error:  # noqa: BLE001  (whatever it is, the owner wants to know)
        report((False, portable(error)))
        return
    while True:
        try:
            task = tasks()
            if task is STOP:
                break
            function, arguments = task
            report((True, function(get_default_group(), *arguments)))
        except EOFError:
            break
        except BaseException as error:  # noqa: BLE001
            _abort_groups(error)
            report((False, portable(error)))
    if current_world().default is not None:
        destroy_process_group()


def _abort_groups(error: BaseException) -> None:
    """Fail the groups, so that nobody waits for a rank that has raised something of its own."""
    if not isinstance(error, DistError):
        for group in [*current_world().groups.values()]:
            group.abort(f"rank {group.rank} raised {type(error).__name__}: {error}")


_HEAD = "on its own rank:\n"
_noting = threading.Lock()


def portable(error: BaseException) -> BaseException:
    """Write the traceback, which does not pickle, into a note; once, though ranks share errors."""
    with _noting:
        if not any(note.startswith(_HEAD) for note in getattr(error, "__notes__", ())):
            story = traceback.TracebackException.from_exception(error)
            _drop_remote_notes(story)
            error.add_note(_HEAD + "".join(story.format()))
    return error


def _drop_remote_notes(story: traceback.TracebackException | None) -> None:
    """Leave out what causes carry from other ranks: each round would tell it all again."""
    while story is not None:
        notes = getattr(story, "__notes__", None) or ()
        kept = [note for note in notes if not note.startswith(_HEAD)]
        story.__notes__ = kept  # type: ignore[attr-defined,unused-ignore]
        story = story.__cause__ or story.__context__
