"""The ranks for which a group's pending operations wait: ranks that are late, or have left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from nc10d.backend.nccl.comm.comm_streams import NcclGroup, calls_of, end_key
from nc10d.backend.nccl.launch.call_board import CallBoard
from nc10d.backend.nccl.watchdog import SLOW
from nc10d.backend.nccl.works import NcclWork, PendingWorks
from nc10d.base.call_site import called
from nc10d.base.deadline import monotonic, monotonic_ns
from nc10d.base.text import in_seconds, ranks_text
from nc10d.errors import CollectiveTimeout, DistError
from nc10d.store.base import Store


class AwaitedRanks:
    """Errors about ranks for which a group's pending operations wait; the watchdog calls."""

    def __init__(self, group: NcclGroup, pending: PendingWorks, board: CallBoard) -> None:
        self._group, self._pending, self._board = group, pending, board
        self._next_look = 0.0

    def left(self, store: Store) -> DistError | None:
        """Return the error if an operation waits for a rank that has left, at most each SLOW."""
        # The counts of ranks that have left are in the group's `store`. With links="group" not all
        # ranks call alike.
        now, others = monotonic(), self._group.others
        if self._group.options.links == "group" or now < self._next_look:
            return None
        self._next_look = now + SLOW
        for work, key, number, rank in self._waits_for(others.gone()):
            if _ended_before(store, key, number):
                name, entry = work._describe(), self._board.awaited(work.stamp)[0]
                seq = number if entry is None else entry.seq
                error = others.peer_left(rank, f"{name} #{seq}")
                error.op, error.seq = name, seq
                return error
        return None

    def _waits_for(self, gone: set[int]) -> Iterator[tuple[NcclWork, str, int, int]]:
        """Yield operations that need ranks which are `gone`, and the rank.

        Between them are the store's key of that rank's end, and the number of the call there.
        """
        for work in self._pending.oldest() if gone else ():
            for comm_stream, number in zip(work.cached.comm_streams, work.numbers, strict=False):
                if not comm_stream.captured:  # calls in graphs run uncounted
                    for rank in gone.intersection(comm_stream.ranks):
                        yield work, end_key(comm_stream.name, rank), number, rank

    def timeout(self, work: NcclWork) -> CollectiveTimeout:
        """Return the failure for an operation that has not ended by its deadline."""
        group, name = self._group, work._describe()
        entry, missing = self._board.awaited(work.stamp)
        if work.cached.messages is not None:
            sends, takes = work.cached.messages
            missing = [peer for peer, _ in (*sends, *takes)] if len(sends) + len(takes) == 1 else []
        seq = (*work.numbers, 0)[0] if entry is None else entry.seq
        call = called(f"{name} #{seq} of group {group.name!r}", "" if entry is None else entry.site)
        waited = None if entry is None else (monotonic_ns() - entry.begun) / 1e9
        after = "" if waited is None else f" after {in_seconds(waited)}"
        whom = f", waiting for {ranks_text(missing)}" if missing else ""
        latest, last = group.others.whereabouts()
        return CollectiveTimeout(
            f"{call} timed out on rank {group.rank}{after}{whom}{latest}",
            rank=missing[0] if missing else group.rank,
            pid=None if missing else os.getpid(),
            group=group.name,
            op=name,
            seq=seq,
            waited=waited,
            last=last or None,
        )


def _ended_before(store: Store, key: str, number: int) -> bool:
    with contextlib.suppress(DistError, OSError):  # the store may be gone
        return store.check([key]) and calls_of(store.get(key)) < number
    return False
