"""A group's launches on its device, as this rank and its peers see them: numbers, log, comparison.

Compiled code enters a launch (bindings.entering). This module owns the memory that such code
writes, makes the error where ranks' calls differ, and compares with ranks on other hosts, a few
times a second while operations are pending.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable

from nc10d.arrays.call_info import beyond_text
from nc10d.backend.cpu.engine.call_log import CallLog, LogEntry
from nc10d.backend.cpu.engine.call_sites import SITES
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.nccl.bindings import entering
from nc10d.backend.nccl.comm.comm_streams import NcclGroup
from nc10d.backend.nccl.launch.compared_call import CallText
from nc10d.backend.nccl.launch.message_links import MessageLinks
from nc10d.backend.shared_board import SharedBoard
from nc10d.base.call_site import called
from nc10d.base.deadline import monotonic_ns
from nc10d.errors import CollectiveMismatch

COLLECTIVE, MESSAGE = 0, 1
"""Labels of the log's entries."""
_KEY = "device"
STAMP = entering.CALLER_STAMP // 8
"""Where a Caller's words have the stamp of the log's latest entry."""
_ENDED, _WORDS, _MASK = at.E_ENDED // 8, at.LOG_BYTES // 8, at.LOG_SLOTS - 1


class Caller:
    """One kind of a group's launches, for compiled code at `address`."""

    def __init__(
        self, label: int, note: int, log: CallLog, entries: int, board: SharedBoard | None
    ) -> None:
        peers = () if board is None else board.peers
        last = entering.CALLER_PEER + 16 * len(peers)
        self._own = array("B", bytes(at.RECORD_BYTES))
        self.words = words = array("q", bytes(last))
        self.address = words.buffer_info()[0]
        for place, value in (
            (entering.CALLER_SITES, SITES.address),
            (entering.CALLER_NOTE, note or self._own.buffer_info()[0]),
            (entering.CALLER_BOARD, 0 if board is None else board.address),
            (entering.CALLER_LOG, log.address),
            (entering.CALLER_NEXT, entries),
            (entering.CALLER_LABEL, label),
            (entering.CALLER_PEERS, len(peers)),
        ):
            words[place // 8] = value
        for index, peer in enumerate(peers):
            row = entering.CALLER_PEER // 8 + 2 * index
            words[row], words[row + 1] = peer.word, peer.base

    @property
    def number(self) -> int:
        """The launch count so far."""
        return self.words[entering.CALLER_NUMBER // 8]


class CallBoard:
    """A group's calls on this rank: `collectives`, and launches of `messages` alone."""

    # Used under the launches' lock, unless a line says that any thread may call.

    def __init__(self, group: NcclGroup) -> None:
        self._group = group
        nbytes = entering.BOARD_BYTES + 2 * group.size * entering.LINK_BYTES
        self._board = board = group.others.share_board(nbytes)
        self.links = MessageLinks(group, board)
        self._log = CallLog()
        self._log_words = self._log.bytes.data.cast("q")
        self._entries = array("q", [0])
        entries = self._entries.buffer_info()[0]
        note = group.others.record_address()
        self.collectives = Caller(COLLECTIVE, note, self._log, entries, board)
        self.messages = Caller(MESSAGE, 0, self._log, entries, None)
        self._told = 0

    def enter(self, caller: Caller, text: CallText) -> None:
        """Enter a launch as compiled code does; CollectiveMismatch if a peer's call differs."""
        answer = _enter(caller.address, text.address)
        while answer == entering.NEW_SITE:
            SITES.learn()
            answer = _enter(caller.address, text.address)
        if answer:
            raise self.mismatch(answer)

    def ended(self, stamp: int) -> None:
        """Record that an entry's launch has ended; any thread may call."""
        row = _WORDS * ((stamp - 1) & _MASK)
        if self._log_words[row + at.E_STAMP // 8] == stamp:  # else a later launch has that place
            self._log_words[row + _ENDED] = monotonic_ns()

    def logged(self) -> list[LogEntry]:
        """Return the latest launches, oldest first; any thread may call."""
        return self._log.read((COLLECTIVE, MESSAGE))

    def progress(self) -> dict[int, int]:
        """Return this rank's and the local peers' latest collective; any thread may call."""
        found = {self._group.rank: self.collectives.number}
        for peer in () if self._board is None else self._board.peers:
            place = _word(peer.word)
            found[peer.rank] = _word(peer.base + place - 1 + entering.BOARD_NUMBER) if place else 0
        return found

    def awaited(self, stamp: int) -> tuple[LogEntry | None, list[int]]:
        """Return an entry of the log, and the local ranks that have not come to that collective."""
        entry = next((each for each in self.logged() if each.order == stamp), None)
        if entry is None or entry.label != COLLECTIVE:
            return entry, []
        return entry, [rank for rank, number in self.progress().items() if number < entry.seq]

    def mismatch(self, answer: int) -> CollectiveMismatch:
        """Return the error for the peer whose call differs, by compiled code's answer."""
        assert self._board is not None, "only a board's calls are compared"
        peer = self._board.peers[answer - entering.DIFFERS]
        number = self.collectives.number
        place = peer.base + _word(peer.word) - 1
        return self._error(number, peer.rank, _called(place, number) or "another operation")

    def _error(self, number: int, peer: int, theirs: str) -> CollectiveMismatch:
        group, board = self._group, self._board
        ours = "" if board is None else _called(board.address, number)
        mine, other = (text.partition(" at ")[0] for text in (ours, theirs))
        return CollectiveMismatch(
            f"ranks disagree on operation #{number} on devices of group {group.name!r}: rank "
            f"{group.rank} called {ours}, rank {peer} called {theirs}"
            f"{beyond_text(mine, other)}",
            rank=peer,
            group=group.name,
            op=ours.partition("(")[0],
            seq=number,
        )

    def compare_hosts(self) -> CollectiveMismatch | None:
        """Tell ranks on other hosts the latest call, and compare theirs; any thread may call."""
        board, messages = self._board, self._group.others.messages()
        if board is None or messages is None:
            return self.links.compare_hosts(messages)
        if not board.partners:
            return None
        number, rank = self.collectives.number, self._group.rank
        slot = _slot(board.address, number)
        if number != self._told and slot is not None:
            self._told = number
            where = _called(board.address, number)
            messages.set(f"{_KEY}/{rank}", f"{number} {slot} {where}", board.partners)
        for peer in range(self._group.size):
            told = None if peer == rank else messages.value(f"{_KEY}/{peer}")
            if told is not None and (error := self._compare(board, peer, told)) is not None:
                return error
        return self.links.compare_hosts(messages)

    def _compare(self, board: SharedBoard, peer: int, told: str) -> CollectiveMismatch | None:
        number, chain, where = told.split(" ", 2)
        mine = _slot(board.address, int(number))
        if mine is None or mine == int(chain):
            return None
        return self._error(int(number), peer, where)


_enter: Callable[[int, int], int] = entering.nc10d_nccl_enter.ctypes


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _slot(board: int, number: int) -> int | None:
    """Return a call's chain on a board, None if not there (any more)."""
    place = board + entering.BOARD_CALLS + 16 * (number % entering.CALLS)
    chain = _word(place + 8)
    return chain if _word(place) == number else None


def _called(board: int, number: int) -> str:
    """Return a call on a board with its line; "" if not there (any more)."""
    place = board + entering.BOARD_RECORDS + at.RECORD_BYTES * (number % entering.RECORDS)
    if _word(place) != number:
        return ""
    texts = (at.RECORD_TEXT, at.TEXT_BYTES), (at.RECORD_SITE, at.SITE_BYTES)
    raw = [ctypes.string_at(place + offset, size) for offset, size in texts]
    call, site = (text.partition(b"\0")[0].decode(errors="replace") for text in raw)
    return called(call, site) if _word(place) == number else ""
