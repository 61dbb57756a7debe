"""A group's shared memory on a host: one area for each rank, in that rank's arena.

An area holds the rank's counter, abort word and state, a ring of records for the latest calls, the
failure cause that the rank has reported, the links' places, the record of the latest call on
another device (the note), the board's place (backend.shared_board), and the staging buffer's two
slots.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nc10d.backend.cpu.memory.arena import PAGE
from nc10d.backend.cpu.memory.host_peer import HostPeer, mask
from nc10d.backend.cpu.memory.peer_access import peer_access_block
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.offsets import Words
from nc10d.base.deadline import monotonic_ns


def header_bytes(size: int) -> int:
    """Return an area's bytes before its staging buffer."""
    return -(-(_board_offset(size) + 8) // PAGE) * PAGE


def _note_offset(size: int) -> int:
    return at.AREA_LINKS + 8 * size


def _board_offset(size: int) -> int:
    return _note_offset(size) + at.RECORD_BYTES


def _record_offset(number: int) -> int:
    return at.AREA_RECORDS + number % at.RECORD_RING * at.RECORD_BYTES


def area_bytes(size: int, slot_bytes: int) -> int:
    """Return a whole area's bytes, for `size` ranks on the host."""
    return header_bytes(size) + 2 * slot_bytes


class GroupMemory:
    """The areas of one group on this host, as this process maps them.

    `peers` are the members on this host, in rank order; this rank is `peers[rank]`. Their areas
    start at `offsets` in their arenas, with staging slots of `slot_bytes`. The peers' ranks in the
    group are `group_ranks`: by default 0, 1, ..., as in a group without other hosts. Methods take a
    `rank` as an index into `peers`.
    """

    def __init__(
        self,
        peers: Sequence[HostPeer],
        rank: int,
        offsets: list[int],
        slot_bytes: int,
        group_ranks: Sequence[int] | None = None,
    ) -> None:
        self.group_ranks = list(range(len(peers)) if group_ranks is None else group_ranks)
        self.peers = list(peers)
        self.rank = rank
        self.size = len(peers)
        self.slot_bytes = slot_bytes
        self.reporting = threading.RLock()
        self.reported = False
        self.left = False
        self._offsets = offsets
        self._mappings = [peer.mapping for peer in peers]
        self._addresses = [m.base + o for m, o in zip(self._mappings, offsets, strict=True)]

    @property
    def offset(self) -> int:
        """The offset of this rank's area in the arena."""
        return self._offsets[self.rank]

    @property
    def group_rank(self) -> int:
        """This rank's rank in the group."""
        return self.group_ranks[self.rank]

    def address(self, rank: int) -> int:
        """Return the address of a rank's area."""
        return self._addresses[rank]

    def slot(self, rank: int, index: int) -> int:
        """Return the address of slot 0 or 1 in a rank's staging buffer."""
        return self._addresses[rank] + header_bytes(self.size) + index * self.slot_bytes

    def arena_base(self, rank: int) -> int:
        """Return the address at which a rank's arena is mapped here."""
        return self._mappings[rank].base

    def publish_closed(self, why: bytes = b"") -> None:
        """Publish that this rank has ended its operations: peers no longer read its arrays.

        `why`, an encoded error, is for peers that still wait; they read it as this rank's cause.
        """
        with self.reporting:
            if why and not self.reported:
                self.write_cause(why)
                self.reported = True
        self._word(self.rank, at.AREA_STATE)[0] = at.CLOSED

    def leave(self) -> None:
        """Publish that this rank has left, and touches none of the group's areas or links again."""
        self.publish_closed()
        bit = mask([self.peers[self.rank].rank])
        self.left = True
        for address in self._addresses:
            word = address + at.AREA_LEFT
            seen = entry_points.load_word(word)
            while (found := entry_points.compare_and_swap(word, seen, seen | bit)) != seen:
                seen = found

    def left_word(self) -> int:
        """Return the address of the mask, in this rank's area, for ranks that have left."""
        return self._addresses[self.rank] + at.AREA_LEFT

    def state(self, rank: int) -> int:
        """Return a rank's state: 0 (forming), OPEN or CLOSED; see offsets.py."""
        return int(entry_points.load_word(self._addresses[rank] + at.AREA_STATE))

    def links_word(self, owner: int, peer: int) -> int:
        """Return the address of the word with the place of the link from `owner` to `peer`."""
        return self._addresses[owner] + at.AREA_LINKS + 8 * peer

    def access(self) -> int:
        """Return how every rank may access all others' private memory: 0, READS or WRITES.

        The result is the same on all ranks, since each area shows its rank's access.
        """
        return min(int(self._word(rank, at.AREA_ACCESS)[0]) for rank in range(self.size))

    def peer_access(self, ranks: Sequence[int]) -> Words:
        """Return the block by which the engine accesses arrays that some ranks expose."""
        peers = [self.peers[rank] for rank in ranks]
        areas = [self._addresses[rank] for rank in ranks]
        span = self._mappings[self.rank].data.size
        return peer_access_block(peers, areas, span, self.access())

    def bits(self) -> int:
        """Return the members as a bit mask of host ranks."""
        return mask([peer.rank for peer in self.peers])

    def last_record(self, rank: int) -> tuple[int, str]:
        """Return a rank's latest collective: its sequence number (0: none yet) and its text."""
        latest = (0, "nothing yet")
        for index in range(at.RECORD_RING):
            start = _record_offset(index)
            number = int(self._word(rank, start)[0])
            if number > latest[0]:
                latest = (number, self._called(rank, start))
        return latest

    @property
    def note(self) -> int:
        """The address of this rank's note, where other devices' backends record their calls."""
        return self._addresses[self.rank] + _note_offset(self.size)

    def board_word(self, rank: int) -> int:
        """Return the address of the word with the place of a rank's board: offset + 1; 0: none."""
        return self._addresses[rank] + _board_offset(self.size)

    def latest(self, rank: int) -> tuple[int, str]:
        """Return the call that a rank began last, among collectives here and the note's calls.

        The result is as `last_record`'s. The note's calls have their own numbers.
        """
        start = _note_offset(self.size)
        number, begun = self._bytes(rank, start, 16).view(np.int64).tolist()
        if number and begun > self.begun(rank):
            return number, self._called(rank, start)
        return self.last_record(rank)

    def progress(self) -> dict[int, int]:
        """Return each local rank's latest sequence number, by rank in the group."""
        return {number: self.last_record(rank)[0] for rank, number in enumerate(self.group_ranks)}

    def begun(self, rank: int) -> int:
        """Return when a rank's latest call began, in ns of the monotonic clock; 0: unknown."""
        number, _ = self.last_record(rank)
        return int(self._word(rank, _record_offset(number) + 8)[0]) if number else 0

    def record(self, rank: int, number: int) -> str | None:
        """Return the text of a rank's call `number`; None if the record is overwritten."""
        start = _record_offset(number)
        return self._called(rank, start) if self._word(rank, start)[0] == number else None

    def site(self, rank: int, number: int) -> str:
        """Return the call site of a rank's call `number`; "" if unknown or overwritten."""
        start = _record_offset(number)
        if self._word(rank, start)[0] != number:
            return ""
        return _text(self._bytes(rank, start + at.RECORD_SITE, at.SITE_BYTES))

    def _called(self, rank: int, start: int) -> str:
        return _text(self._bytes(rank, start + at.RECORD_TEXT, at.TEXT_BYTES))

    def write_cause(self, text: bytes) -> None:
        """Put the failure cause that this rank reports into its area."""
        place = self._bytes(self.rank, at.AREA_CAUSE, at.CAUSE_BYTES)
        place[:] = np.frombuffer(text.ljust(at.CAUSE_BYTES, b"\0"), np.uint8)

    def write_note(self, call: str) -> None:
        """Record a call that the engine does not run as this rank's latest call."""
        note = self._bytes(self.rank, _note_offset(self.size), at.RECORD_BYTES)
        text = call.encode(errors="replace")[: at.TEXT_BYTES - 1].ljust(at.TEXT_BYTES, b"\0")
        note[at.RECORD_TEXT :][: at.TEXT_BYTES] = np.frombuffer(text, np.uint8)
        note[:16].view(np.int64)[:] = max(1, int(note[:8].view(np.int64)[0])), monotonic_ns()

    def read_cause(self, rank: int) -> str:
        """Return the failure cause that a rank has reported; "" for none."""
        return _text(self._bytes(rank, at.AREA_CAUSE, at.CAUSE_BYTES))

    def _bytes(self, rank: int, offset: int, count: int) -> npt.NDArray[np.uint8]:
        start = self._offsets[rank] + offset
        return self._mappings[rank].data[start : start + count]

    def _word(self, rank: int, offset: int) -> Words:
        return self._bytes(rank, offset, 8).view(np.int64)


def _text(raw: npt.NDArray[np.uint8]) -> str:
    return raw.tobytes().partition(b"\0")[0].decode(errors="replace")
