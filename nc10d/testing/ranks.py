"""Ranks for tests: threads or processes that form a group and run a function, again and again.

    with Ranks(4) as ranks:
        sums = ranks.run(lambda group, x: add_up(group, x), arrays)

Ranks stay alive between calls, so that a property test pays for forming the group once. When a
rank raises, its groups are aborted, so that the others raise too; what a rank raised of its own is
raised here, with the others' messages as notes, and the next call begins with new ranks. Ctrl-C
is the caller's: it ends the ranks that are processes at once.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from nc10d.errors import DistError
from nc10d.group.world import init_process_group
from nc10d.testing.rank_workers import ProcessWorker, RankWorker, ThreadWorker

if TYPE_CHECKING:
    from nc10d.store.base import Store

T = TypeVar("T")
Kind = Literal["threads", "processes"]
ANSWER = 30.0
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
        self._limit = timeout + ANSWER
        self._members: list[RankWorker] = []
        self._store: Store | None = None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., T], *columns: Sequence[Any]) -> list[T]:
        """Call function(group, *row) on every rank; return the results by rank.

        Each column has one entry a rank. With processes, function and rows must pickle. Blocks
        until all have answered; TimeoutError names those who did not.
        """
        if any(len(column) != self.world_size for column in columns):
            raise ValueError(f"each column needs {self.world_size} entries, one a rank")
        try:
            if not self._members:
                self._start()
            for rank, member in enumerate(self._members):
                member.give((function, tuple(column[rank] for column in columns)))
            return self._collect()
        except KeyboardInterrupt:
            self._drop()
            raise

    def close(self) -> None:
        """End all ranks; the next run starts new ones."""
        members, self._members = self._members, []
        enders = [threading.Thread(target=member.end) for member in members]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        self._close_store()

    def processes(self) -> list[multiprocessing.process.BaseProcess]:
        """Return the processes of the ranks (kind="processes", after the first run)."""
        return [m.process for m in self._members if isinstance(m, ProcessWorker)]

    def _drop(self) -> None:
        """Give all ranks up, whatever they are doing."""
        members, self._members = self._members, []
        for member in members:
            member.drop()
        self._close_store()

    def _close_store(self) -> None:
        close_store = getattr(self._store, "close", None)
        self._store = None
        if close_store is not None:
            close_store()

    def _start(self) -> None:
        self._members = self._processes() if self.kind == "processes" else self._threads()
        self._collect()

    def _threads(self) -> list[RankWorker]:
        from nc10d.store import HashStore

        shared = HashStore()

        def joiner(rank: int) -> Callable[[], None]:
            size = self.world_size
            return lambda: init_process_group(
                store=shared, rank=rank, world_size=size, **self._options
            )

        return [ThreadWorker(joiner(rank)) for rank in range(self.world_size)]

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
        outcomes = [member.take(self._limit) for member in self._members]
        missing = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
        failed = [
            (rank, outcome[1])
            for rank, outcome in enumerate(outcomes)
            if outcome and not outcome[0]
        ]
        if missing:
            self._drop()
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
    function: Callable[..., T],
    world_size: int,
    kind: Kind = "threads",
    *columns: Sequence[Any],
    timeout: float = 30.0,
) -> list[T]:
    """Form a group of `world_size` ranks, call function(group, *row) on each, return the results.

    For one call; `Ranks` keeps them for several. `group` is each rank's default group as well, so
    that `nc10d.all_reduce(x)` works in it too. `run_local` is the same without an engine.
    """
    with Ranks(world_size, kind, timeout=timeout) as ranks:
        return ranks.run(function, *columns)
