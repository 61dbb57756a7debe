"""Messages between two ranks, in the order of their launches: both ranks need the same tags.

NCCL matches a link's messages in order, and knows no tags. So each rank puts tag and bytes of its
messages onto its board, and the later rank sees a difference before it enters the communicator.
Between hosts the ranks compare the latest message a few times a second. A link with messages in
CUDA graphs, which run uncounted, is not compared.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import NamedTuple

from nc10d.arrays.buffer import as_buffer
from nc10d.backend.nccl.bindings import entering
from nc10d.backend.nccl.bindings.entering import BOARD_BYTES, LINK_BYTES, nc10d_nccl_link
from nc10d.backend.nccl.comm.comm_streams import NcclGroup
from nc10d.backend.shared_board import GroupMessages, PeerBoard, SharedBoard
from nc10d.errors import CollectiveMismatch
from nc10d.ops import Op, Recv, Send

_NUMBER = entering.LINK_NUMBER // 8
_KEY = "device/message"


class _Link(NamedTuple):
    """A direction between this rank and a peer; `words` are for compiled code."""

    peer: int
    sends: bool
    local: bool
    words: array[int]

    def message(self, number: int) -> tuple[int, int] | None:
        """Return tag and bytes of this rank's message, None if they are not there (any more)."""
        slot = self.words[0] + 8 + 24 * (number % entering.LINKED)
        found, tag, nbytes = (ctypes.c_int64 * 3).from_address(slot)
        return (tag, nbytes) if found == number else None


class MessageLinks:
    """A group's links on this rank, if it has a `board`; used under the launches' lock."""

    def __init__(self, group: NcclGroup, board: SharedBoard | None) -> None:
        self._group = group
        self._board = None if group.options.links == "tag" else board
        self._links: dict[tuple[int, bool], _Link] = {}
        self._nowhere = array("q", [0])  # the place of a board on another host
        self._told: dict[str, int] = {}

    def row(self, op: Op) -> tuple[int, ...]:
        """Return the call that compares a message, with its arguments; () if nothing does."""
        if self._board is None or not isinstance(op, (Send, Recv)):
            return ()
        words = self._link(self._board, op).words
        tag, nbytes = op.tag, as_buffer(op.x).nbytes
        return nc10d_nccl_link.address, words.buffer_info()[0], tag, nbytes

    def captured(self, op: Op) -> None:
        """Compare no more messages of an operation's link: a graph repeats some of them."""
        if self._board is not None and isinstance(op, (Send, Recv)):
            link = self._link(self._board, op)
            ctypes.c_int64.from_address(link.words[0]).value = 1

    def _link(self, board: SharedBoard, op: Send | Recv) -> _Link:
        assert op.peer is not None, "a receive from any rank has been refused"
        key = op.peer, isinstance(op, Send)
        found = self._links.get(key)
        if found is None:
            found = self._links[key] = self._new_link(board, *key)
        return found

    def _new_link(self, board: SharedBoard, peer: int, sends: bool) -> _Link:
        nowhere = PeerBoard(peer, self._nowhere.buffer_info()[0], 0)
        there = next((each for each in board.peers if each.rank == peer), nowhere)
        own = board.address + _offset(peer, sends)
        words = (own, there.word, there.base, _offset(self._group.rank, not sends), 0)
        return _Link(peer, sends, there is not nowhere, array("q", words))

    def mismatch(self, op: Op) -> CollectiveMismatch:
        """Return the error for a message whose tag or bytes differ from the peer's."""
        assert self._board is not None, "only a board's messages are compared"
        assert isinstance(op, (Send, Recv)), "only messages are"
        link = self._link(self._board, op)
        number, (_, word, base, offset, _) = link.words[_NUMBER], link.words
        place = base + ctypes.c_int64.from_address(word).value - 1 + offset
        slot = place + 8 + 24 * (number % entering.LINKED)
        _, tag, nbytes = (ctypes.c_int64 * 3).from_address(slot)
        return self._error(link, number, (tag, nbytes))

    def _error(self, link: _Link, number: int, theirs: tuple[int, int]) -> CollectiveMismatch:
        group = self._group
        sides = (group.rank, link.message(number) or theirs), (link.peer, theirs)
        (src, (tag, nbytes)), (dst, (wanted, room)) = sides if link.sends else sides[::-1]
        advice = (
            "; a rank's messages to another are received in their order, unless the group has "
            'NcclOptions(links="tag")'
        )
        return CollectiveMismatch(
            f"ranks disagree on message #{number} on devices of group {group.name!r}: rank {src} "
            f"sends {nbytes} bytes with tag {tag}, rank {dst} receives {room} bytes with tag "
            f"{wanted}{advice if tag != wanted else ''}",
            rank=link.peer,
            group=group.name,
            op="send" if link.sends else "recv",
            seq=number,
        )

    def compare_hosts(self, messages: GroupMessages) -> CollectiveMismatch | None:
        """Tell ranks on other hosts the latest messages, compare theirs; any thread may call."""
        for link in list(self._links.values()):
            number = link.words[_NUMBER]
            mine = None if link.local else link.message(number)
            if mine is None or ctypes.c_int64.from_address(link.words[0]).value:
                continue
            here, there = self._group.rank, link.peer
            own, other = ("sent", "received") if link.sends else ("received", "sent")
            if self._told.get(key := f"{_KEY}/{own}/{here}/{there}") != number:
                self._told[key] = number
                messages.set(key, f"{number} {mine[0]} {mine[1]}", (there,))
            told = messages.value(f"{_KEY}/{other}/{there}/{here}")
            if told is not None:
                at, tag, nbytes = map(int, told.split())
                if (link.message(at) or (tag, nbytes)) != (tag, nbytes):
                    return self._error(link, at, (tag, nbytes))
        return None


def _offset(peer: int, sends: bool) -> int:
    return BOARD_BYTES + LINK_BYTES * (2 * peer + sends)
