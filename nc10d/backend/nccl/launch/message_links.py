"""Messages between two ranks, in the order of their launches: both ranks need the same tags.

NCCL matches a link's messages in order, and knows no tags. So each rank puts its messages' tags,
bytes and dtypes onto its board, and the later rank sees a difference before it enters the
communicator.
Between hosts, and in a group without boards, the ranks compare what they have sent and received so
far a few times a second while operations are pending. A link with messages in CUDA graphs, which
run uncounted, is not compared.
"""

from __future__ import annotations

import contextlib
import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.arrays.dtypes import element_by_code
from nc10d.backend.nccl.bindings import entering
from nc10d.backend.nccl.bindings.entering import BOARD_BYTES, LINK_BYTES, nc10d_nccl_link
from nc10d.backend.nccl.comm.comm_streams import NcclGroup
from nc10d.backend.shared_board import GroupMessages, PeerBoard, SharedBoard
from nc10d.errors import CollectiveMismatch, DistError
from nc10d.ops import Op, Recv, Send
from nc10d.store.base import Store

_NUMBER = entering.LINK_NUMBER // 8
_KEY = "device/message"
_RECORDS = 128
"""Types of elements from this code on are records, told apart by seven bits."""


class _Link(NamedTuple):
    """A direction between this rank and a peer; `words` are for compiled code."""

    peer: int
    sends: bool
    local: bool
    words: array[int]

    def message(self, number: int) -> _Message | None:
        """Return a message of this rank, None if it is not there (any more)."""
        message = _Message(*_slot(self.words[0], number)[1:])
        found = _slot(self.words[0], number)[0]  # last: compiled code may write meanwhile
        return message if found == number else None


class _Message(NamedTuple):
    """A message's tag, content (see `_content`), and the hash over this and all before it."""

    tag: int
    content: int
    chain: int

    @property
    def text(self) -> str:
        """What the message has: bytes, elements, tag."""
        kind = self.content & 255
        known = None if kind >= _RECORDS else element_by_code(kind)
        label = "records" if known is None else known.label
        return f"{self.content >> 8} bytes of {label} with tag {self.tag}"


class _StoreTexts:
    """Texts between ranks by the group's store, for groups without GroupMessages.

    The watchdog calls. A store that is gone has no texts.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def set(self, key: str, value: str, to: Sequence[int] | None = None) -> None:
        """Publish a text."""
        with contextlib.suppress(DistError, OSError):
            self._store.set(key, value)

    def value(self, key: str) -> str | None:
        """Return the latest text of a key, None if none has come."""
        with contextlib.suppress(DistError, OSError):
            return self._store.get(key).decode() if self._store.check([key]) else None
        return None


class MessageLinks:
    """A group's links on this rank, on its `board` if it has one; used under the launches' lock."""

    def __init__(self, group: NcclGroup, board: SharedBoard | None) -> None:
        self._group = group
        self._board = board
        self._compares = group.options.links != "tag"
        self._kept: list[array[int]] = []
        self._texts: _StoreTexts | None = None
        self._links: dict[tuple[int, bool], _Link] = {}
        self._nowhere = array("q", [0])  # the place of a board on another host
        self._told: dict[str, int] = {}

    def row(self, op: Op) -> tuple[int, ...]:
        """Return the call that compares a message, with its arguments; () for other operations."""
        if not self._compares or not isinstance(op, (Send, Recv)):
            return ()
        words = self._link(op).words
        return nc10d_nccl_link.address, words.buffer_info()[0], op.tag, _content(as_buffer(op.x))

    def stop_comparing(self, op: Op) -> None:
        """Compare no more messages of an operation's link: a graph repeats some of them."""
        if self._compares and isinstance(op, (Send, Recv)):
            link = self._link(op)
            ctypes.c_int64.from_address(link.words[0]).value = 1

    def _link(self, op: Send | Recv) -> _Link:
        assert op.peer is not None, "a receive from any rank has been refused"
        key = op.peer, isinstance(op, Send)
        found = self._links.get(key)
        if found is None:
            found = self._links[key] = self._new_link(*key)
        return found

    def _new_link(self, peer: int, sends: bool) -> _Link:
        board = self._board
        there = nowhere = PeerBoard(peer, self._nowhere.buffer_info()[0], 0)
        if board is None:
            self._kept.append(array("q", bytes(LINK_BYTES)))
            own = self._kept[-1].buffer_info()[0]
        else:
            own = board.address + _offset(peer, sends)
            there = next((each for each in board.peers if each.rank == peer), nowhere)
        words = (own, there.word, there.base, _offset(self._group.rank, not sends), 0, 0)
        return _Link(peer, sends, there is not nowhere, array("q", words))

    def mismatch(self, op: Op) -> CollectiveMismatch:
        """Return the error for a message whose tag or content differs from the peer's."""
        assert isinstance(op, (Send, Recv)), "only messages are compared"
        link = self._link(op)
        number, (_, word, base, offset, *_) = link.words[_NUMBER], link.words
        place = base + ctypes.c_int64.from_address(word).value - 1 + offset
        return self._error(link, number, _Message(*_slot(place, number)[1:]))

    def _error(self, link: _Link, number: int, theirs: _Message) -> CollectiveMismatch:
        group = self._group
        sides = (group.rank, link.message(number) or theirs), (link.peer, theirs)
        (src, sent), (dst, wanted) = sides if link.sends else sides[::-1]
        which = "message" if sent[:2] != wanted[:2] else "the messages up to"
        advice = (
            "; a rank's messages to another are received in their order, unless the group has "
            'NcclOptions(links="tag")'
        )
        return CollectiveMismatch(
            f"ranks disagree on {which} #{number} on devices of group {group.name!r}: rank {src} "
            f"sends {sent.text}, rank {dst} receives {wanted.text}"
            f"{advice if sent.content == wanted.content else ''}",
            rank=link.peer,
            group=group.name,
            op="send" if link.sends else "recv",
            seq=number,
        )

    def compare_hosts(self, messages: GroupMessages | None) -> CollectiveMismatch | None:
        """Tell ranks that have no board here the latest messages, compare theirs; any thread."""
        if not self._links:
            return None
        if messages is None:
            self._texts = self._texts or _StoreTexts(self._group.store.clone())
        texts = messages or self._texts
        assert texts is not None, "the store's, if no others"
        for link in list(self._links.values()):
            number = link.words[_NUMBER]
            mine = None if link.local else link.message(number)
            if mine is None or ctypes.c_int64.from_address(link.words[0]).value:
                continue
            here, there = self._group.rank, link.peer
            own, other = ("sent", "received") if link.sends else ("received", "sent")
            if self._told.get(key := f"{_KEY}/{own}/{here}/{there}") != number:
                self._told[key] = number
                texts.set(key, f"{number} {mine.tag} {mine.content} {mine.chain}", (there,))
            told = texts.value(f"{_KEY}/{other}/{there}/{here}")
            if told is not None:
                at, *message = map(int, told.split())
                if (link.message(at) or _Message(*message)) != tuple(message):
                    return self._error(link, at, _Message(*message))
        return None


def _content(buffer: Buffer) -> int:
    """Return bytes and element type in one word."""
    code = buffer.dtype.code
    return buffer.nbytes << 8 | (code if code < _RECORDS else _RECORDS + code % _RECORDS)


def _slot(link: int, number: int) -> list[int]:
    """Return the number, tag, content and hash in a message's place of a link's part of a board."""
    at = link + 8 + 32 * (number % entering.LINKED)
    return [*(ctypes.c_int64 * 4).from_address(at)]


def _offset(peer: int, sends: bool) -> int:
    return BOARD_BYTES + LINK_BYTES * (2 * peer + sends)
