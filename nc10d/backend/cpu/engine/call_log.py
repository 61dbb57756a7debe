"""One rank's call log: the latest calls and messages in all groups.

The engine writes the log (native/log.py). Reading blocks no writer; entries that are being written
at that moment are left out.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nc10d.backend.cpu.engine.call_sites import text_in
from nc10d.backend.cpu.native import offsets as at


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One call or message: the channel's label, number there, times in ns, and call site."""

    # `ended` is 0 while the call runs. `order` grows from entry to entry. A call has a `text`, a
    # message has `message`: tag, bytes and dtype code.

    order: int
    label: int
    seq: int
    begun: int
    ended: int
    site: str
    text: str
    message: tuple[int, int, int]


class CallLog:
    """The ring that the engine writes to; the system allocates pages as the ring fills."""

    def __init__(self) -> None:
        self.bytes: npt.NDArray[np.uint8] = np.zeros(at.LOG_SLOTS * at.LOG_BYTES, np.uint8)
        self.address: int = self.bytes.ctypes.data

    def read(self, labels: Container[int]) -> list[LogEntry]:
        """Return the entries of the channels with these labels, oldest first."""
        rows = self.bytes.reshape(at.LOG_SLOTS, at.LOG_BYTES)
        copy = rows.copy()
        # A writer clears the stamp first and sets it last. So a row was not written during the copy
        # if the stamp afterwards is the one in the copy.
        again = rows[:, at.E_STAMP : at.E_STAMP + 8].copy().view(np.int64).ravel()
        stamps = copy[:, at.E_STAMP : at.E_STAMP + 8].copy().view(np.int64).ravel()
        complete = np.flatnonzero((stamps != 0) & (stamps == again))
        return sorted(_entries(copy[complete], labels), key=lambda entry: entry.order)


def _entries(rows: npt.NDArray[np.uint8], labels: Container[int]) -> Iterator[LogEntry]:
    words = rows.view(np.int64)
    for row, word in zip(rows, words, strict=True):
        stamp, label, seq, begun, ended, site = map(int, word[: at.E_TEXT // 8 - 2])
        if label in labels:
            tag, nbytes, dtype = map(int, word[at.E_TEXT // 8 : at.E_TEXT // 8 + 3])
            raw = row[at.E_TEXT : at.E_TEXT + at.TEXT_BYTES].tobytes().partition(b"\0")[0]
            text, message = raw.decode(errors="replace"), (tag, nbytes, dtype)
            yield LogEntry(stamp, label, seq, begun, ended, text_in(site), text, message)
