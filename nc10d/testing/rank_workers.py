"""A rank for tests, as a thread or as a process, which joins a group, then runs tasks.

A rank takes a task (a function and its arguments), runs the task with the default group as the
first argument, and returns an Outcome, with the result or the error. A rank whose task raises an
error other than a DistError aborts its groups, so that no other rank waits for that rank.
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
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from nc10d.base.call_site import frames_of_threads, idle_code, rank_threads
from nc10d.base.deadline import Deadline
from nc10d.base.signal_errors import Condition
from nc10d.codec.functions import dumps
from nc10d.errors import DistError
from nc10d.group import world
from nc10d.store.base import Store
from nc10d.testing.outcomes import (
    REMARKS,
    Outcome,
    UserFrame,
    error_frames,
    returning_frames,
    running_frames,
)

STOP = None
RENEW = "renew"
RANK_THREAD = "nc10d-rank"
rank_threads.append(RANK_THREAD)
ANSWER_SECONDS = 1.0
"""Seconds that a process has to answer where it is; a process that holds the GIL can't answer."""
FORMING_SECONDS = 60.0
"""Seconds that a group has to form, at least: the first on a machine compiles the engine."""
EXIT_SECONDS = 5.0
"""Seconds that a process has to leave its group before the kill."""


class RankEnded(RuntimeError):
    """A rank's process has ended."""


class RankWorker(ABC):
    """A rank as its owner sees it."""

    @abstractmethod
    def submit(self, task: object) -> None:
        """Send a function and its arguments; to another process, both must pickle."""

    @abstractmethod
    def result(self, timeout: float) -> Outcome | None:
        """Wait for an outcome; None if there is none within `timeout` seconds."""

    @abstractmethod
    def end(self) -> None:
        """Ask the rank to end, and wait until it has."""

    @abstractmethod
    def abandon(self) -> None:
        """Give the rank up, even while a task runs."""

    def where(self) -> tuple[UserFrame, ...]:
        """Return the user's frames of the running task, outermost first; empty if unknown."""
        return ()


class ThreadWorker(RankWorker):
    """A rank as a thread with a separate world."""

    def __init__(self, join: Callable[[], None]) -> None:
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outcomes: deque[Outcome] = deque()
        self._reported = Condition()
        self._thread = threading.Thread(
            target=self._main, args=(join,), name=RANK_THREAD, daemon=True
        )
        self._thread.start()

    def _main(self, join: Callable[[], None]) -> None:
        with world.own_world():
            serve(join, self._tasks.get, self._report)

    def _report(self, outcome: Outcome) -> None:
        self._reported.change(partial(self._outcomes.append, outcome))

    def submit(self, task: object) -> None:
        self._tasks.put(task)

    def result(self, timeout: float) -> Outcome | None:
        return self._reported.until(self._take_outcome, Deadline.after(timeout))

    def _take_outcome(self) -> Outcome | None:
        return self._outcomes.popleft() if self._outcomes else None

    def where(self) -> tuple[UserFrame, ...]:
        return running_frames(frames_of_threads().get(self._thread.ident or 0))

    def end(self) -> None:
        self.abandon()
        self._thread.join(2 * EXIT_SECONDS)

    def abandon(self) -> None:
        self._tasks.put(STOP)  # a thread can't be killed, but ends after its task


idle_code.add(ThreadWorker.result.__code__)


class PipeWorker(RankWorker):
    """A rank in another process, at the other end of a pipe."""

    _pipe: Connection
    _lacks_main = False
    """Whether the process does not have this program's `__main__`."""

    @abstractmethod
    def _ending(self) -> str:
        """Return a text about the end of the rank's process."""

    def submit(self, task: object) -> None:
        self._pipe.send_bytes(dumps(task, self._lacks_main))

    def result(self, timeout: float) -> Outcome | None:
        try:
            return self._pipe.recv() if self._pipe.poll(timeout) else None
        except (EOFError, ConnectionResetError):
            return Outcome(False, RankEnded(self._ending()))

    def _ask_to_end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(STOP)


idle_code.add(PipeWorker.result.__code__)


class ProcessWorker(PipeWorker):
    """A rank as a spawned process, which Ctrl-C does not reach; `join` must pickle."""

    def __init__(self, join: Callable[[], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, worker_end = context.Pipe()
        self._questions, answering_end = context.Pipe()
        arguments = (worker_end, answering_end, join)
        self.process = context.Process(target=_process_main, args=arguments, daemon=True)
        with _interrupts_blocked():
            self.process.start()
        worker_end.close()
        answering_end.close()

    def _ending(self) -> str:
        self.process.join()
        return f"the process ended with code {self.process.exitcode}"

    def where(self) -> tuple[UserFrame, ...]:
        with contextlib.suppress(OSError, EOFError):
            self._questions.send(None)
            if self._questions.poll(ANSWER_SECONDS):
                return tuple(self._questions.recv())
        return ()

    def end(self) -> None:
        self._ask_to_end()
        self.process.join(EXIT_SECONDS)
        self.abandon()

    def abandon(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()
        self._questions.close()


def bystanding() -> Iterator[tuple[int, threading.Thread | None]]:
    """Yield the threads that make no call for a rank that starts now, each with its ident.

    Ranks have not made them. A pool's threads are left out: a rank may submit its calls there.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    ranks = {ident for ident, thread in threads.items() if thread.name == RANK_THREAD}
    frames = frames_of_threads()
    del frames[threading.get_ident()]  # a cycle, which would keep the callers' locals alive
    yield threading.get_ident(), threading.current_thread()
    for ident, frame in frames.items():
        names = {f.f_code.co_filename for f, _ in traceback.walk_stack(frame)}
        if ident not in ranks and not any("concurrent/futures" in name for name in names):
            yield ident, threads.get(ident)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start processes with SIGINT blocked, until they leave the terminal's foreground."""
    resource_tracker.ensure_running()  # a start here would unblock SIGINT
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


def _watch(questions: Connection) -> None:
    """Exit when the owner's process has ended, and answer where the main thread is, meanwhile."""
    owner = multiprocessing.parent_process()
    assert owner is not None, "only a started process has ranks to end"
    main = threading.get_ident()

    def watch() -> None:
        while owner.sentinel not in wait([owner.sentinel, questions]):
            with contextlib.suppress(EOFError, OSError):
                questions.recv()
                # The outermost frame is multiprocessing's own start of this process.
                questions.send(running_frames(frames_of_threads().get(main))[1:])
                continue
            owner.join()  # the owner has closed its end of the questions
        os._exit(1)

    threading.Thread(target=watch, name="nc10d-watch", daemon=True).start()


def _process_main(pipe: Connection, questions: Connection, join: Callable[[], None]) -> None:
    from nc10d.testing.rank_debugger import serve_breakpoints

    _leave_foreground()
    _watch(questions)
    serve_breakpoints()
    serve(join, pipe.recv, partial(send_outcome, pipe))


def join_by_port(port: int, size: int, options: dict[str, Any], rank: int) -> None:
    """Join the group by the store at a port on this machine."""
    from nc10d.store import TCPStore

    store = TCPStore("127.0.0.1", port, size, is_master=False, wait_for_workers=False)
    join_group(store, size, options, rank)


def join_group(store: Store, size: int, options: dict[str, Any], rank: int) -> None:
    """Form the default group; the timeout is for operations, as forming a group may compile."""
    timeout = options["timeout"]
    options = options | {"timeout": max(timeout, FORMING_SECONDS)}
    world.init_process_group(store=store, rank=rank, world_size=size, **options)
    world.get_default_group().set_timeout(timeout)


def send_outcome(pipe: Connection, outcome: Outcome) -> None:
    """Send an outcome to the owner's process; an error's traceback becomes a note."""
    if not outcome.done:
        portable(outcome.value)
    pipe.send_bytes(dumps(outcome))


def serve(
    join: Callable[[], None], tasks: Callable[[], Any], report: Callable[[Outcome], None]
) -> None:
    """Join the group, run tasks until STOP, and leave the group; RENEW forms the group again."""
    if not _try_to_join(join, report):
        return
    for finished in itertools.count():
        try:
            task = tasks()
            if task is STOP:
                break
            if task == RENEW:
                _leave()
                if not _try_to_join(join, report):
                    return
                continue
            _call("resume", finished)
            function, arguments = task
            result = function(world.get_default_group(), *arguments)
            frames = returning_frames(function, arguments)
            report(Outcome(True, result, frames))
            _call("rest", finished + 1, frames[-1].site if frames else "")
        except EOFError:
            break
        except BaseException as error:  # noqa: BLE001
            _abort_groups(error)
            report(failed(error))
    _leave()


def _leave() -> None:
    """Leave all groups; a task may have destroyed the default group."""
    if world.current_world().default is not None:
        world.destroy_process_group()


def _try_to_join(join: Callable[[], None], report: Callable[[Outcome], None]) -> bool:
    try:
        join()
        report(Outcome(True, None))
        return True
    except BaseException as error:  # noqa: BLE001  (the owner handles any error)
        report(failed(error))
        return False


def failed(error: BaseException) -> Outcome:
    """Return the outcome for a task that has raised."""
    return Outcome(False, error, error_frames(error), getattr(error, REMARKS, ()))


def _call(name: str, *arguments: object) -> None:
    """Call a method on the default group's backend for the CPU, if there is such a method."""
    group = world.current_world().default
    backend = None if group is None else group._ready.get("cpu")
    getattr(backend, name, lambda *_: None)(*arguments)


def _abort_groups(error: BaseException) -> None:
    """Abort the groups after a task's error, so that no other rank waits for this rank."""
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
