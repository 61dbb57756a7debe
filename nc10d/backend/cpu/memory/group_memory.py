"""The shared part of a group: one area a rank, each in its rank's arena.

An area holds the rank's counter, its abort word and state, a ring of records of its latest calls,
the cause of a failure it reported, where its links lie, what it did last on another device (its
note, a record like those of the ring), and its two board halves.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nc10d.backend.cpu.memory.arena import PAGE, SPAN
from nc10d.backend.cpu.memory.bits import mask
from nc10d.backend.cpu.memory.host_peer import HostPeer
from nc10d.backend.cpu.memory.peer_access import reach_block
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at

Words = npt.NDArray[np.int64]


def header_bytes(size: int) -> int:
    """Return the bytes of an area before its boards."""
    return -(-(_note_offset(size) + at.RECORD_BYTES) // PAGE) * PAGE


def _note_offset(size: int) -> int:
    return at.AREA_LINKS + 8 * size


def area_bytes(size: int, half: int) -> int:
    """Return the bytes of a whole area."""
    return header_bytes(size) + 2 * half


class GroupMemory:
    """The areas of one group on this host, as this process maps them.

    `peers` are the members on this host, in the order of their ranks; this rank is `peers[rank]`.
    Their areas start at `offsets` in their arenas; a slot of a staging buffer has `half` bytes.
    `numbers` are the peers' ranks in the group: 0, 1, ... where the group has no other host.
    """

    def __init__(
        self,
        peers: Sequence[HostPeer],
        rank: int,
        offsets: list[int],
        half: int,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.numbers = list(range(len(peers)) if numbers is None else numbers)
        self.peers = list(peers)
        self.rank = rank
        self.size = len(peers)
        self.half = half
        self.reporting = threading.RLock()
        self.reported = False
        self._offsets = offsets
        self._mappings = [peer.mapping for peer in peers]
        self._addresses = [m.base + o for m, o in zip(self._mappings, offsets, strict=True)]

    @property
    def offset(self) -> int:
        """Where my area starts in my arena."""
        return self._offsets[self.rank]

    @property
    def number(self) -> int:
        """My rank in the group."""
        return self.numbers[self.rank]

    def address(self, rank: int) -> int:
        """Return where a rank's area starts."""
        return self._addresses[rank]

    def board(self, rank: int, half: int) -> int:
        """Return where a board half starts."""
        return self._addresses[rank] + header_bytes(self.size) + half * self.half

    def arena_base(self, rank: int) -> int:
        """Return the address of the arena of a peer, by its index in `peers`."""
        return self._mappings[rank].base

    def show_closed(self) -> None:
        """Show that this rank has ended its operations: peers no longer read its arrays."""
        self._word(self.rank, at.AREA_STATE)[0] = at.CLOSED

    def leave(self) -> None:
        """Show that this rank has closed the group and touches nobody's area or links again."""
        self.show_closed()
        mine = mask([self.peers[self.rank].rank])
        for address in self._addresses:
            word = address + at.AREA_LEFT
            seen = entry_points.load_word(word)
            while (found := entry_points.compare_and_swap(word, seen, seen | mine)) != seen:
                seen = found

    def left_word(self) -> int:
        """Return the address of the word in my area that says who has closed the group."""
        return self._addresses[self.rank] + at.AREA_LEFT

    def state(self, rank: int) -> int:
        """Return whether a rank has opened or closed the group."""
        return int(entry_points.load_word(self._addresses[rank] + at.AREA_STATE))

    def links_word(self, owner: int, peer: int) -> int:
        """Return the address of the word that says where the link owner → peer lies."""
        return self._addresses[owner] + at.AREA_LINKS + 8 * peer

    def access(self) -> int:
        """Return what the kernel lets each rank do with all others' private memory.

        0, READS or WRITES; alike on all of them.
        """
        return min(int(self._word(rank, at.AREA_ACCESS)[0]) for rank in range(self.size))

    def reach(self, ranks: Sequence[int]) -> Words:
        """Return the block that tells the engine how to read what some ranks expose."""
        peers = [self.peers[rank] for rank in ranks]
        areas = [self._addresses[rank] for rank in ranks]
        return reach_block(peers, areas, SPAN, self.access())

    def bits(self) -> int:
        """Return the members as a bit mask of host ranks."""
        return mask([peer.rank for peer in self.peers])

    def last_record(self, rank: int) -> tuple[int, str]:
        """Return a rank's latest call: its sequence number and what it was."""
        best = (0, "nothing yet")
        for slot in range(at.RECORD_RING):
            start = at.AREA_RECORDS + slot * at.RECORD_BYTES
            number = int(self._word(rank, start)[0])
            if number > best[0]:
                best = (number, self._called(rank, start))
        return best

    @property
    def note(self) -> int:
        """The address of my note: who launches on another device counts and tells it there."""
        return self._addresses[self.rank] + _note_offset(self.size)

    def latest(self, rank: int) -> tuple[int, str]:
        """Return what a rank began last, its latest call or what its note tells; see last_record.

        Calls and notes are numbered apart.
        """
        start = _note_offset(self.size)
        number, begun = self._bytes(rank, start, 16).view(np.int64).tolist()
        if number and begun > self.begun(rank):
            return number, self._called(rank, start)
        return self.last_record(rank)

    def progress(self) -> dict[int, int]:
        """Return the number of the latest call of each rank of this host."""
        return {number: self.last_record(mate)[0] for mate, number in enumerate(self.numbers)}

    def begun(self, rank: int) -> int:
        """Return when a rank's latest call began, in ns of the monotonic clock; 0: unknown."""
        number, _ = self.last_record(rank)
        start = at.AREA_RECORDS + (number % at.RECORD_RING) * at.RECORD_BYTES
        return int(self._word(rank, start + 8)[0]) if number else 0

    def record(self, rank: int, number: int) -> str | None:
        """Return what a rank's call number `number` was, if it is still known."""
        start = at.AREA_RECORDS + (number % at.RECORD_RING) * at.RECORD_BYTES
        if int(self._word(rank, start)[0]) != number:
            return None
        return self._called(rank, start)

    def site(self, rank: int, number: int) -> str:
        """Return where a rank made its call number `number`; "" if that is not known (any more)."""
        start = at.AREA_RECORDS + (number % at.RECORD_RING) * at.RECORD_BYTES
        if int(self._word(rank, start)[0]) != number:
            return ""
        return _text(self._bytes(rank, start + at.RECORD_SITE, at.SITE_BYTES))

    def _called(self, rank: int, start: int) -> str:
        return _text(self._bytes(rank, start + at.RECORD_TEXT, at.TEXT_BYTES))

    def write_cause(self, text: bytes) -> None:
        """Put the cause that this rank reports into its area."""
        place = self._bytes(self.rank, at.AREA_CAUSE, at.CAUSE_BYTES)
        place[:] = np.frombuffer(text.ljust(at.CAUSE_BYTES, b"\0"), np.uint8)

    def read_cause(self, rank: int) -> str:
        """Return the cause that a rank has reported."""
        return _text(self._bytes(rank, at.AREA_CAUSE, at.CAUSE_BYTES))

    def _bytes(self, rank: int, offset: int, count: int) -> npt.NDArray[np.uint8]:
        start = self._offsets[rank] + offset
        return self._mappings[rank].data[start : start + count]

    def _word(self, rank: int, offset: int) -> Words:
        return self._bytes(rank, offset, 8).view(np.int64)


def _text(raw: npt.NDArray[np.uint8]) -> str:
    return raw.tobytes().partition(b"\0")[0].decode(errors="replace")
