"""Check that all ranks made the same call, before anything is sent.

The 62 bits of a launch's fingerprint go into a small all_reduce, which shows every rank whether all
have the same bits. The all_reduce ends when all ranks have arrived, and so is the barrier too.
Errors show the texts of the calls. The all_reduce also carries whether this rank's arrays make the
operations of a batch depend on each other: if so on any rank, all ranks run them in order.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nc10d.arrays.call_info import CallInfo, beyond_text
from nc10d.backend.mpi.library import MPI, Comm, Request
from nc10d.base.text import ranks_text
from nc10d.errors import CollectiveMismatch

TEXT_BYTES = 240
"""Bytes of a call's description that ranks exchange when their calls differ."""
_fingerprint = functools.lru_cache(256)(CallInfo.fingerprint)


class CallCheck:
    """The check of one launch: do all ranks make this call, and may its operations overlap?"""

    __slots__ = ("_least",)

    def __init__(self, call: CallInfo, conflict: bool) -> None:
        word = _fingerprint(call)
        self._least = np.array([word, -word, -int(conflict)], np.int64)

    def ask(self, comm: Comm) -> Request:
        """Start the check: MIN of a number and of its negative are opposite only if all agree."""
        return comm.Iallreduce(MPI.IN_PLACE, self._least, MPI.MIN)

    @property
    def agrees(self) -> bool:
        """Whether all calls were the same."""
        return bool(self._least[0] == -self._least[1])

    @property
    def is_sequential(self) -> bool:
        """Whether some rank has operations that must run in order."""
        return bool(self._least[2] < 0)


def exchanged_texts(call: CallInfo, size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return a description as bytes to send, and memory for the descriptions of all ranks."""
    text = np.frombuffer(call.text_bytes(TEXT_BYTES), np.uint8)
    return text, np.empty((size, TEXT_BYTES), np.uint8)


def mismatch(rows: np.ndarray[Any, Any], seq: int, group: str) -> CollectiveMismatch:
    """Return the error that shows each rank's call; the same on every rank."""
    texts = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    calls = ", ".join(f"{text} on {ranks_text(some)}" for text, some in list(ranks.items())[:4])
    message = f"group {group!r}: the ranks made different calls at #{seq}: {calls}"
    message += beyond_text(texts[0], texts[0] if len(ranks) == 1 else "")
    odd = min(ranks.values(), key=lambda some: (len(some), -some[0]))[0]
    name = texts[odd].partition("(")[0]
    return CollectiveMismatch(message, rank=odd, group=group, op=name, seq=seq)
