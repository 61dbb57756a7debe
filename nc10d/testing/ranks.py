"""Ranks for tests: threads or processes that form a group and run a function, again and again.

    with Ranks(4) as ranks:
        sums = ranks.run(lambda group, x: add_up(group, x), arrays)

Ranks stay alive between calls, so that a property test pays for forming the group once. When a
rank raises, its group is aborted, so that the others raise too; what a rank raised of its own is
raised here, with the others' messages as notes, and the next call begins with new ranks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nc10d.errors import DistError
from nc10d.world import (
    current_world,
    destroy_process_group,
    get_default_group,
    init_process_group,
    own_world,
)

if TYPE_CHECKING:
    from nc10d.store.base import Store

Kind = Literal["threads", "processes"]
Outcome = tuple[bool, Any]
STOP = None


class Member(Protocol):
    """One rank as its owner sees it."""

    def give(self, task: Any) -> None:
        """Hand over a function and its arguments."""

    def take(self, timeout: float) -> Outcome | None:
        """Wait for (succeeded, result or error); None if there is none in time."""

    def end(self) -> None:
        """Ask the rank to end, and wait until it has."""


class ThreadMember:
    """A rank as a thread with a world of its own."""

    def __init__(self, join: Callable[[], None]) -> None:
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, args=(join,), daemon=True)
        self._thread.start()

    def _main(self, join: Callable[[], None]) -> None:
        with own_world():
            _serve(join, self._tasks.get, self._outcomes.put)

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
        self._tasks.put(STOP)
        self._thread.join(10.0)


class ProcessMember:
    """A rank as a process of its own, started afresh (not forked)."""

    def __init__(self, host: str, port: int, rank: int, size: int, options: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, host, port, rank, size, options)
        self.process = context.Process(target=_process_main, args=arguments, daemon=True)
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
        self.process.join(5.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._pipe.close()


def _serve(
    join: Callable[[], None], tasks: Callable[[], Any], report: Callable[[Outcome], None]
) -> None:
    """Run tasks until told to stop; the group exists for as long."""
    try:
        join()
        report((True, None))
    except BaseException as error:  # noqa: BLE001  (whatever it is, the owner wants to know)
        report((False, _portable(error)))
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
            _tell_the_others(error)
            report((False, _portable(error)))
    if current_world().default is not None:
        destroy_process_group()


def _tell_the_others(error: BaseException) -> None:
    """Fail the group, so that nobody waits for a rank that has raised something of its own."""
    group = current_world().default
    if group is not None and not isinstance(error, DistError):
        group.abort(f"rank {group.rank} raised {type(error).__name__}: {error}")


_HEAD = "on its own rank:\n"
_noting = threading.Lock()


def _portable(error: BaseException) -> BaseException:
    """Write the traceback, which does not pickle, into a note; once, though ranks share errors."""
    with _noting:
        if not any(note.startswith(_HEAD) for note in getattr(error, "__notes__", ())):
            story = traceback.TracebackException.from_exception(error)
            _forget_notes(story)
            error.add_note(_HEAD + "".join(story.format()))
    return error


def _forget_notes(story: traceback.TracebackException | None) -> None:
    """Leave out what causes carry from other ranks: each round would tell it all again."""
    while story is not None:
        notes = getattr(story, "__notes__", None) or ()
        kept = [note for note in notes if not note.startswith(_HEAD)]
        story.__notes__ = kept  # type: ignore[attr-defined,unused-ignore]
        story = story.__cause__ or story.__context__


def _process_main(
    pipe: Connection, host: str, port: int, rank: int, size: int, options: dict[str, Any]
) -> None:
    from nc10d.store import TCPStore

    def join() -> None:
        store = TCPStore(host, port, size, is_master=False, wait_for_workers=False)
        init_process_group(store=store, rank=rank, world_size=size, **options)

    _serve(join, pipe.recv, pipe.send)


class Ranks:
    """`world_size` ranks that share a default group; closed by `with` or `close()`."""

    def __init__(
        self,
        world_size: int,
        kind: Kind = "threads",
        backend: str = "cpu",
        timeout: float = 30.0,
    ) -> None:
        if kind not in ("threads", "processes") or world_size < 1:
            raise ValueError(f"expected threads or processes, at least 1: {kind!r}, {world_size}")
        self.world_size = world_size
        self.kind = kind
        self._options: dict[str, Any] = {"backend": backend, "timeout": timeout}
        self._limit = timeout + 30.0
        self._members: list[Member] = []
        self._store: Store | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
        """Call function(group, *row) on every rank; return the results by rank.

        Each column has one entry a rank. With processes, function and rows must pickle.
        """
        assert all(len(column) == self.world_size for column in columns), "one entry a rank"
        if not self._members:
            self._start()
        for rank, member in enumerate(self._members):
            member.give((function, tuple(column[rank] for column in columns)))
        return self._collect()

    def close(self) -> None:
        """End all ranks; the next run starts new ones."""
        members, self._members = self._members, []
        enders = [threading.Thread(target=member.end) for member in members]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        close_store = getattr(self._store, "close", None)
        if close_store is not None:
            close_store()
        self._store = None

    def processes(self) -> list[multiprocessing.process.BaseProcess]:
        """Return the processes of the ranks (kind="processes", after the first run)."""
        return [m.process for m in self._members if isinstance(m, ProcessMember)]

    def _start(self) -> None:
        self._members = self._processes() if self.kind == "processes" else self._threads()
        self._collect()

    def _threads(self) -> list[Member]:
        from nc10d.store import HashStore

        shared = HashStore()

        def joiner(rank: int) -> Callable[[], None]:
            size = self.world_size
            return lambda: init_process_group(
                store=shared, rank=rank, world_size=size, **self._options
            )

        return [ThreadMember(joiner(rank)) for rank in range(self.world_size)]

    def _processes(self) -> list[Member]:
        from nc10d.store import TCPStore

        size = self.world_size
        store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        self._store = store
        return [
            ProcessMember("127.0.0.1", store.port, rank, size, self._options)
            for rank in range(size)
        ]

    def _collect(self) -> list[Any]:
        outcomes = [member.take(self._limit) for member in self._members]
        missing = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        failed = [
            (rank, outcome[1])
            for rank, outcome in enumerate(outcomes)
            if outcome and not outcome[0]
        ]
        if missing:
            self._members = []
            raise TimeoutError(f"ranks {missing} did not answer within {self._limit} s")
        if failed:
            self.close()
            raise _joined(failed)
        return [outcome[1] for outcome in outcomes if outcome]


def _joined(failed: Sequence[tuple[int, BaseException]]) -> BaseException:
    # What a rank raised by itself is the cause; failures of the group come of it.
    failed = sorted(failed, key=lambda pair: (isinstance(pair[1], DistError), pair[0]))
    rank, first = failed[0]
    first.add_note(f"raised on rank {rank}")
    for rank, error in failed[1:]:
        first.add_note(f"rank {rank}: {type(error).__name__}: {error}")
    return first


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    kind: Kind = "threads",
    *columns: Sequence[Any],
    timeout: float = 30.0,
) -> list[Any]:
    """Form a group of `world_size` ranks, call function(group, *row) on each, return the results.

    For one call; `Ranks` keeps them for several.
    """
    with Ranks(world_size, kind, timeout=timeout) as ranks:
        return ranks.run(function, *columns)
