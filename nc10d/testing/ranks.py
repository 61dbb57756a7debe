"""Ranks for tests: threads or processes that form a group and run a function, again and again.

    with Ranks(4) as ranks:
        sums = ranks.run(lambda group, x: add_up(group, x), arrays)

Ranks stay alive between calls, so that a property test forms the group only once. When a rank
raises, its groups are aborted, so that the other ranks raise too. `run` raises the first rank's own
error, with the other errors as notes; the next call starts new ranks. Ctrl-C reaches only the
caller, which kills ranks that are processes at once.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from nc10d.errors import DistError
from nc10d.group.world import init_process_group
from nc10d.store.base import Store
from nc10d.testing.rank_workers import ProcessWorker, RankWorker, ThreadWorker

T = TypeVar("T")
Kind = Literal["threads", "processes"]
ANSWER_SECONDS = 30.0
"""Seconds beyond the group's own timeout after which a rank counts as lost."""


class Ranks:
    """`world_size` ranks that share a default group; closed by `with` or `close()`.

    `backend`, `timeout` (seconds) and `pg_options` are those of init_process_group.
    """

    def __init__(
        self,
        world_size: int,
        kind: Kind = "threads",
        backend: str = "cpu",
        timeout: float = 30.0,
        pg_options: Any = None,
    ) -> None:
        if kind not in ("threads", "processes") or world_size < 1:
            raise ValueError(f"expected threads or processes, at least 1: {kind!r}, {world_size}")
        self.world_size = world_size
        self.kind = kind
        self._options = {"backend": backend, "timeout": timeout, "pg_options": pg_options}
        self._limit = timeout + ANSWER_SECONDS
        self._workers: list[RankWorker] = []
        self._store: Store | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
        """Call function(group, *row) on every rank; return the results by rank.

        Each column has an entry per rank. With processes, function and rows must pickle. Blocks
        until all ranks have answered; TimeoutError names the ranks that did not.
        """
        if any(len(column) != self.world_size for column in columns):
            raise ValueError(f"each column needs {self.world_size} entries, one a rank")
        try:
            if not self._workers:
                self._start()
            for rank, worker in enumerate(self._workers):
                worker.submit((function, tuple(column[rank] for column in columns)))
            return self._collect()
        except KeyboardInterrupt:
            self._drop()
            raise

    def close(self) -> None:
        """End all ranks; the next run starts new ones."""
        workers, self._workers = self._workers, []
        enders = [threading.Thread(target=worker.end) for worker in workers]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        self._close_store()

    def processes(self) -> list[multiprocessing.process.BaseProcess]:
        """Return the processes of the ranks (kind="processes", after the first run)."""
        return [worker.process for worker in self._workers if isinstance(worker, ProcessWorker)]

    def _drop(self) -> None:
        """Give all ranks up, even during a task."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.abandon()
        self._close_store()

    def _close_store(self) -> None:
        close_store = getattr(self._store, "close", None)
        self._store = None
        if close_store is not None:
            close_store()

    def _start(self) -> None:
        self._workers = self._processes() if self.kind == "processes" else self._threads()
        self._collect()

    def _threads(self) -> list[RankWorker]:
        from nc10d.store import HashStore

        store, size = HashStore(), self.world_size
        join = partial(init_process_group, store=store, world_size=size, **self._options)
        return [ThreadWorker(partial(join, rank=rank)) for rank in range(self.world_size)]

    def _processes(self) -> list[RankWorker]:
        from nc10d.store import TCPStore

        size = self.world_size
        store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        self._store = store
        return [
            ProcessWorker("127.0.0.1", store.port, rank, size, self._options)
            for rank in range(size)
        ]

    def _collect(self) -> list[Any]:
        outcomes = [worker.result(self._limit) for worker in self._workers]
        missing = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        failed = [
            (rank, outcome[1])
            for rank, outcome in enumerate(outcomes)
            if outcome and not outcome[0]
        ]
        if missing:
            self._drop()
            raise TimeoutError(f"timed out: ranks {missing} did not answer in {self._limit:g} s")
        if failed:
            self.close()
            raise _combined(failed)
        return [outcome[1] for outcome in outcomes if outcome]


def _combined(failed: Sequence[tuple[int, BaseException]]) -> BaseException:
    # A rank's own error is the cause of the group's errors on other ranks.
    failed = sorted(failed, key=lambda pair: (isinstance(pair[1], DistError), pair[0]))
    rank, first = failed[0]
    first.add_note(f"raised on rank {rank}")
    for rank, error in failed[1:]:
        first.add_note(f"rank {rank}: {type(error).__name__}: {error}")
    return first


def run_ranks(
    function: Callable[..., T],
    world_size: int,
    kind: Kind = "threads",
    *columns: Sequence[Any],
    timeout: float = 30.0,
) -> list[T]:
    """Form a group of `world_size` ranks, call function(group, *row) on each, return the results.

    `Ranks` keeps the ranks for several calls. `group` is each rank's default group as well, so that
    `nc10d.all_reduce(x)` works in the function. `run_local` needs no engine.
    """
    with Ranks(world_size, kind, timeout=timeout) as ranks:
        return ranks.run(function, *columns)
