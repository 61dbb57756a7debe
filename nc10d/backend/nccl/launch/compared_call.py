"""A launch as ranks compare it and errors show it, for compiled code."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

from nc10d import ops
from nc10d.arrays.call_info import CallInfo, block_of, call_of
from nc10d.backend.cpu.native.offsets import TEXT_BYTES


class CallText:
    """A call as compiled code takes it: fingerprint and text, at `address` while it lives."""

    __slots__ = ("_words", "address")

    def __init__(self, call: CallInfo) -> None:
        self._words = array("q", [call.fingerprint()])
        self._words.frombytes(call.text_bytes(TEXT_BYTES))
        self.address = self._words.buffer_info()[0]


@lru_cache(256)
def text_of_all_reduces(dtype: str, op: str, counts: tuple[int, ...]) -> CallText:
    """Return the text for a block of all_reduces by their counts, without operations."""
    return CallText(block_of([CallInfo("all_reduce", dtype, count, op) for count in counts]))


def compared(batch: Sequence[ops.Op]) -> CallInfo:
    """Return a launch as a call: its collectives, or its messages if there is no collective."""
    collectives = [op for op in batch if not isinstance(op, (ops.Send, ops.Recv))]
    # NCCL has other calls for a list than for an array.
    return block_of([call_of(op, lists_differ=True) for op in collectives or batch])
