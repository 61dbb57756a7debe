"""A group's launches on NCCL as a flight recorder reads them; see abilities.CallRecords."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nc10d.backend.cpu.engine.call_log import LogEntry
from nc10d.backend.nccl.launch.call_board import MESSAGE, CallBoard
from nc10d.errors import DistError


class NcclRecords:
    """A rank's records; `board` is None before the group's first launch.

    `sweep` finds the launches that have ended meanwhile.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.board: CallBoard | None = None
        self.sweep: Callable[[], None] = lambda: None
        self._observers: list[Callable[[DistError], None]] = []

    def logged(self) -> list[tuple[LogEntry, str, bool]]:
        """Return the latest launches, oldest first: entry, text, and whether of messages alone."""
        self.sweep()
        entries = [] if self.board is None else self.board.logged()
        return [(entry, entry.text, entry.label == MESSAGE) for entry in entries]

    def waits_for(self) -> int | None:
        """Return None: NCCL does not say for which rank an operation waits."""
        return None

    def traffic(self) -> Sequence[tuple[str, int, int, bool]]:
        """Return nothing: messages are entries."""
        return ()

    def progress(self) -> dict[int, int]:
        """Return the number of the latest collective of this rank, and of its local peers."""
        return {} if self.board is None else self.board.progress()

    def observe_failure(self, observer: Callable[[DistError], None]) -> None:
        """Have `observer` called with the error when the group fails."""
        self._observers.append(observer)

    def failed(self, error: DistError) -> None:
        """Call the observers."""
        for observe in self._observers:
            observe(error)
