"""Ranks for tests: threads or processes that form a group and run a function, again and again.

    with Ranks(4) as ranks:
        sums = ranks.run(lambda group, x: add_up(group, x), arrays)

Ranks stay alive between calls, so that a property test forms the group only once. When a rank
raises, its groups are aborted, so that the other ranks raise too. `run` raises the first rank's own
error, with the other errors as notes; the next call forms new groups. Ctrl-C reaches only the
caller, which kills ranks that are processes at once.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from nc10d.base.call_site import bystanders
from nc10d.errors import DistError
from nc10d.testing.outcomes import REPORT, Outcome, RankEnd, RunReport, rank_end
from nc10d.testing.rank_workers import (
    FORMING_SECONDS,
    RENEW,
    ProcessWorker,
    RankEnded,
    RankWorker,
    ThreadWorker,
    bystanding,
    join_by_port,
    join_group,
)

T = TypeVar("T")
Kind = Literal["threads", "processes", "simulated"]
ANSWER_SECONDS = 30.0
"""Seconds beyond the group's own timeout after which a rank counts as lost."""


class Ranks:
    """`world_size` ranks that share a default group; closed by `with` or `close()`.

    `backend`, `timeout` (seconds) and `pg_options` are those of init_process_group. The first group
    on a machine may take a minute to form, whatever the timeout: it waits for compiled code.
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
        self.kind: Kind = kind
        self._described: str = kind
        self._options = {"backend": backend, "timeout": timeout, "pg_options": pg_options}
        self._limit = timeout + ANSWER_SECONDS
        self._workers: list[RankWorker] = []
        self._store: object = None
        """What the ranks need and the caller's process has: a store, or a network."""
        self._stale = False
        """Whether the ranks' groups have failed, so that the next run needs new groups."""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
        """Call function(group, *row) on every rank; return the results by rank.

        Each column has an entry per rank. With processes, function and rows must pickle. Blocks
        until all ranks have answered; TimeoutError names the ranks that did not, 30 s after the
        operation's timeout.
        """
        if any(len(column) != self.world_size for column in columns):
            raise ValueError(f"each column needs {self.world_size} entries, one a rank")
        try:
            if self._stale or not self._workers:
                self.renew()
            for rank, worker in enumerate(self._workers):
                worker.submit((function, tuple(column[rank] for column in columns)))
            return self._collect()
        except KeyboardInterrupt:
            self._drop()
            raise

    def renew(self) -> None:
        """Give the ranks new default groups; groups that they have made are closed."""
        self._stale = False
        if self._workers:
            for worker in self._workers:
                worker.submit(RENEW)
            self._collect(FORMING_SECONDS)
        else:
            self._start()

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
        """Return the ranks' processes (kind="processes", after the first run)."""
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
        self._collect(FORMING_SECONDS)

    def _threads(self) -> list[RankWorker]:
        from nc10d.store import HashStore

        bystanders.update(bystanding())
        store, size = HashStore(), self.world_size
        join = partial(join_group, store, size, self._options)
        return [ThreadWorker(partial(join, rank)) for rank in range(self.world_size)]

    def _processes(self) -> list[RankWorker]:
        from nc10d.store import TCPStore

        size = self.world_size
        store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        self._store = store
        join = partial(join_by_port, store.port, size, self._options)
        return [ProcessWorker(partial(join, rank)) for rank in range(size)]

    def _collect(self, more: float = 0.0) -> list[Any]:
        outcomes = [worker.result(self._limit + more) for worker in self._workers]
        # A rank may have answered while the others were waited for.
        late = zip(outcomes, self._workers, strict=True)
        outcomes = [outcome or worker.result(0.0) for outcome, worker in late]
        missing = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        if missing or not all(outcome.done for outcome in outcomes if outcome):
            error = self._error(outcomes, missing)
            if missing:
                self._drop()
            elif any(isinstance(outcome.value, RankEnded) for outcome in outcomes if outcome):
                self.close()
            else:
                self._stale = True
            raise error
        return [outcome.value for outcome in outcomes if outcome]

    def _error(self, outcomes: Sequence[Outcome | None], missing: Sequence[int]) -> BaseException:
        failed = [
            (rank, outcome.value)
            for rank, outcome in enumerate(outcomes)
            if outcome and not outcome.done
        ]
        # A rank's own error is the cause of the group's errors on other ranks.
        failed.sort(key=lambda pair: (isinstance(pair[1], DistError), pair[0]))
        ends = [
            rank_end(outcome) if outcome else RankEnd("running", self._workers[rank].where())
            for rank, outcome in enumerate(outcomes)
        ]
        error: BaseException
        if missing:
            text = (
                f"timed out: ranks {[*missing]} did not answer in {self._limit:g} s; a function "
                "that runs for longer needs a longer timeout"
            )
            error, notes = TimeoutError(text), []
        else:
            rank, error = failed.pop(0)
            notes = [f"raised on rank {rank}"]
        notes += [f"rank {rank}: {type(other).__name__}: {other}" for rank, other in failed]
        for note in notes:
            error.add_note(note)
        setattr(error, REPORT, RunReport(self._described, ends, frozenset(notes)))
        return error
