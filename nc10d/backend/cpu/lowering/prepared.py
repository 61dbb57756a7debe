"""What is known already and ready to run again: the base of known operations and messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nc10d.backend.cpu.engine import call_sites
from nc10d.backend.cpu.engine.channel import Channel, Submission, Words
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.native import prepared_messages
from nc10d.backend.cpu.program.linker import Linked
from nc10d.backend.cpu.transport.links import Inbox
from nc10d.kernels.lazy import EntryPoint
from nc10d.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Op,
    Recv,
    Reduce,
    ReduceScatter,
    Send,
)


class Prepared:
    """A prepared operation: `run(words, x, y)` runs it again, on its channel."""

    __slots__ = ("channel", "flying", "run", "words")

    def __init__(self, channel: Channel, words: Words) -> None:
        self.channel, self.flying, self.words = channel, channel.flying, words
        self.run: EntryPoint = self._first

    def entry(self) -> EntryPoint:
        """Return the compiled function that runs it; may block to compile it."""
        raise NotImplementedError

    def ops(self, x: Any, y: Any) -> tuple[Op, ...]:
        """Return the operation on these arguments, for whoever has to tell of it."""
        raise NotImplementedError

    def end(self) -> None:
        """Tidy up after what began in `run` and was driven to its end, or failed, elsewhere."""

    def _first(self, words: Words, x: Any, y: Any) -> int:
        """Run it for the first time; from then on the compiled function is called directly."""
        self.run = run = self.entry()
        # This frame is one of ours that the engine must learn: else it asks in vain each time.
        while (answer := run(words, x, y)) == at.NEW_SITE:
            call_sites.learn()
        return int(answer)


@dataclass(slots=True)
class PreparedBatch:
    """A batch that may come again: how its arrays were, and its program.

    `table` has three columns: addresses, dtypes and element counts.
    """

    reductions: list[Any]
    table: Words
    address: int
    linked: Linked
    shape: tuple[Any, ...]


@dataclass(slots=True)
class NewBatch:
    """A batch of plain arrays seen for the first time: what to remember once it has a program."""

    key: tuple[int, ...]
    reductions: list[Any]
    table: Words
    address: int
    shape: tuple[Any, ...]


_WORD = 8


class PreparedMessage(Prepared):
    """A message's channel, and a descriptor of it, `words`; `inbox` is None for a send.

    A `small` one fits in half a board, a `near` one is to a rank of this host; one that is both is
    `short`: it never waits in the middle. One that is neither is `bulky`.
    """

    __slots__ = ("address", "bulky", "dtype", "inbox", "model", "near", "peer", "short", "small")

    def __init__(
        self,
        channel: Channel,
        model: Submission,
        inbox: Inbox | None,
        peer: int,
        small: bool,
        near: bool,
        dtype: Any,
    ) -> None:
        super().__init__(channel, model.words)
        model.words[at.D_CHANNEL // _WORD] = channel.address
        self.model, self.address = model, model.address
        self.inbox, self.peer, self.dtype = inbox, peer, dtype
        self.small, self.near = small, near
        self.short = small and near
        self.bulky = not (small or near)

    def entry(self) -> EntryPoint:
        """Return run_message."""
        return prepared_messages.run_message

    def ops(self, x: Any, tag: Any) -> tuple[Op, ...]:
        """Return the message with this array and tag, for whoever has to tell of it."""
        return (Send(x, self.peer, tag) if self.inbox is None else Recv(x, self.peer, tag),)

    def end(self) -> None:
        """Let others receive again, after what run_message had begun here."""
        self.channel.words[at.C_RECEIVING // _WORD] = 0


NOTHING = np.empty(0, np.uint8)
"""What a barrier has for an array."""


class PreparedCollective(Prepared):
    """A program and the arrays that it is for, as words for compiled code at `address`."""

    __slots__ = ("_extra", "_keep", "_kind", "address")

    def __init__(
        self, channel: Channel, linked: Linked, kind: type[Op], extra: Any, x: Any, y: Any
    ) -> None:
        self._kind, self._extra = kind, extra
        self._keep = (linked, x.dtype)
        by_rows = kind is AllToAll
        words: Words = np.array(
            [
                channel.address,
                linked.address,
                linked.short,
                id(x.dtype),
                x.size,
                y.size,
                x.nbytes,
                y.nbytes,
                len(x) if by_rows else -1,
                len(y) if by_rows else -1,
                x is y,
            ],
            np.int64,
        )
        super().__init__(channel, words)
        self.address: int = plain.address(words)

    def entry(self) -> EntryPoint:
        """Return run_known."""
        return plain.run_known

    def ops(self, x: Any, y: Any) -> tuple[Op, ...]:
        """Return the operation on these arrays, for whoever has to tell of it."""
        return (_PARTS[self._kind][1](self._extra, x, y),)


def _exchanged(op: AllToAll) -> tuple[Any, Any, Any]:
    splits = op.in_splits is not None or op.out_splits is not None
    return None, None if splits else op.inp, op.out


_Parts = tuple[Callable[[Any], tuple[Any, Any, Any]], Callable[[Any, Any, Any], Op]]


_PARTS: dict[type[Any], _Parts] = {
    AllReduce: (lambda op: (op.op, op.x, op.x), lambda extra, x, y: AllReduce(x, extra)),
    Broadcast: (lambda op: (op.root, op.x, op.x), lambda extra, x, y: Broadcast(x, extra)),
    Reduce: (lambda op: ((op.root, op.op), op.x, op.x), lambda extra, x, y: Reduce(x, *extra)),
    AllGather: (lambda op: (None, op.inp, op.out), lambda extra, x, y: AllGather(y, x)),
    ReduceScatter: (lambda op: (op.op, op.out, op.inp), lambda e, x, y: ReduceScatter(x, y, e)),
    AllToAll: (_exchanged, lambda extra, x, y: AllToAll(y, x)),
    Barrier: (lambda op: (None, NOTHING, NOTHING), lambda extra, x, y: Barrier()),
}
"""From an operation to what it has besides arrays, and these in the order in which lower.py
numbers them; and back.
"""
