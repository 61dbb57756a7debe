"""A call as ranks compare it and as errors show it: the same facts on every backend. Pure.

| operation | facts that all ranks must give alike |
|---|---|
| all reductions | dtype, count, reduction with its factor and purpose, root |
| broadcast | dtype, count, root |
| all_gather | dtype, count |
| all_to_all | dtype; count, unless lists or splits give each rank its own sizes |
| gather, scatter | dtype, root |
| gather_single, scatter_single | dtype, count, root |

The count is the whole array's: all_gather's output, reduce_scatter's input. Where chunks differ in
size, all of them count. The backend that moves the data compares sizes that only a sender and a
receiver know. Messages have texts, and are not compared: they differ by rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from nc10d import ops
from nc10d.arrays.buffer import as_buffer
from nc10d.ops.facts import facts_of

_CUT = b"..."


@dataclass(frozen=True, slots=True)
class CallInfo:
    """Facts about a call that ranks compare; `count` is -1 where ranks may have different ones.

    `where` is the place where a user's reduction stands, and only shown.
    """

    op: str
    dtype: str = "-"
    count: int = 0
    reduce: str = "-"
    root: int = -1
    detail: str = ""
    where: str = ""

    def fingerprint(self) -> int:
        """Return 62 bits that differ, in practice always, when calls differ."""
        parts = self.op, self.dtype, self.count, self.reduce, self.root, self.detail
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2

    def describe(self) -> str:
        """Return the call's text for error messages."""
        parts = [self.op]
        if self.dtype != "-":
            parts.append(f"dtype={self.dtype}")
            if self.count >= 0:
                parts.append(f"count={self.count}")
        if self.reduce != "-":
            parts.append(f"op={self.reduce}" + (f" ({self.where})" if self.where else ""))
        if self.root >= 0:
            parts.append(f"root={self.root}")
        if self.detail:
            parts.append(self.detail)
        return f"{parts[0]}({', '.join(parts[1:])})"

    def text_bytes(self, nbytes: int) -> bytes:
        """Return `describe()` as so many bytes: padded with zeros, or cut at the end."""
        text = self.describe().encode()
        if len(text) > nbytes:
            text = text[: nbytes - len(_CUT)] + _CUT
        return text.ljust(nbytes, b"\0")


def call_of(op: Any, lists_differ: bool = False) -> CallInfo:
    """Return a validated operation's facts.

    With `lists_differ`, a list of arrays is another call than one array with the same chunks.
    """
    facts = facts_of(op)
    name = f"{facts.name}_single" if getattr(op, "even", False) else facts.name
    if not facts.compared:
        return CallInfo(name)
    dtype, count, detail = _memory(getattr(op, facts.compared), lists_differ)
    if facts.is_message:
        detail = _message(op)
    elif facts.own_sizes(op):
        count, detail = -1, "" if facts.has_root else "of different sizes"
    reduction, where = (op.op.compared, op.op.kind.where) if facts.reduces else ("-", "")
    root = op.root if facts.has_root else -1
    return CallInfo(name, dtype, count, reduction, root, detail, where)


def block_of(calls: Sequence[CallInfo]) -> CallInfo:
    """Return a block's calls as a single call; a call alone stays unchanged."""
    if len(calls) == 1:
        return calls[0]
    total = sum(max(0, call.count) for call in calls)
    sizes = f"{len(calls)} calls, count={total}"
    return CallInfo("coalesced", detail=f"{sizes}: {', '.join(_runs(calls))}")


def beyond_text(mine: str, theirs: str) -> str:
    """Return what an error adds where the texts of two different calls are cut too early."""
    return "; they differ behind the end of the text" if mine and mine == theirs else ""


def _runs(calls: Sequence[CallInfo]) -> Iterator[str]:
    """Yield the calls' texts; calls in a row that are alike but for their counts have one."""
    for alike, run in groupby(calls, lambda call: replace(call, count=min(0, call.count))):
        # The same count in a row: "3 x 1024".
        many = [(count, len([*same])) for count, same in groupby(call.count for call in run)]
        counts = [f"{n} x {count}" if n > 1 else f"{count}" for count, n in many]
        if len(many) == 1 and many[0][1] == 1:
            yield replace(alike, count=many[0][0]).describe()
        elif alike.dtype == "-" or alike.count < 0:
            yield f"{many[0][1]} x {alike.describe()}"
        else:
            yield f"{replace(alike, count=-1).describe()} of {', '.join(counts)}"


def _memory(arrays: object, lists_differ: bool) -> tuple[str, int, str]:
    """Return the type and count of an array or a list, and a detail of the list."""
    if not isinstance(arrays, (list, tuple)):
        buffer = as_buffer(arrays)
        return buffer.dtype.label, buffer.count, ""
    buffers = list(map(as_buffer, arrays))
    counts = [buffer.count for buffer in buffers]
    even = "in a list" if lists_differ else ""
    detail = even if len(set(counts)) == 1 else f"counts={counts}"
    return buffers[0].dtype.label, sum(counts), detail


def _message(op: ops.Send | ops.Recv) -> str:
    peer = "any" if op.peer is None else op.peer
    return f"{'dst' if isinstance(op, ops.Send) else 'src'}={peer}, tag={op.tag}"
