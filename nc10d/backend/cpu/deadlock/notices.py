"""Publication of wait notices: in shared memory on a host, by control messages between hosts.

Each rank has a notice slot at a fixed offset in its arena, and only that rank writes there. The
slot's version is odd while the notice is being written, and even and greater afterwards (a
seqlock). A notice changes while other ranks arrive. All versions until the notice is withdrawn
describe the same wait.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from nc10d.backend.cpu.deadlock.wait_graph import WaitNotice
from nc10d.backend.cpu.memory.arena import ArenaMapping
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at

if TYPE_CHECKING:
    from nc10d.backend.cpu.control.connections import ControlConnections, Message

NONE = (0, None)


class NoticeSlot:
    """A rank's notice slot, mapped by a rank on the same host."""

    def __init__(self, mapping: ArenaMapping) -> None:
        self._mapping = mapping
        self._version = mapping.base + at.NOTICE_VERSION
        self._first: int | None = None

    def publish(self, notice: WaitNotice | None) -> None:
        """Publish a notice in place of the last; None withdraws it. Only the slot's owner calls."""
        most = at.NOTICE_BYTES - 8
        raw = None if notice is None else notice.packed(most)
        version = self.version()
        writing = version | 1  # odd already if an interrupt has ended the last change
        entry_points.compare_and_swap(self._version, version, writing)
        self._write(raw or b"")
        # Before the notice becomes visible: a rank that reads the notice may answer at once.
        if notice is None:
            self._first = None
        elif self._first is None:
            self._first = writing + 1
        entry_points.compare_and_swap(self._version, writing, writing + 1)

    def read(self) -> tuple[int, WaitNotice | None]:
        """Return (version, notice), or NONE if there is none or a write is going on."""
        version = self.version()
        if version & 1:
            return NONE
        place, most = at.NOTICE_START, at.NOTICE_BYTES - 8
        count = min(max(int(self._mapping.words(place, 1)[0]), 0), most)
        raw = self._mapping.data[place + 8 : place + 8 + count].tobytes()
        if self.version() != version or not raw:
            return NONE
        return version, WaitNotice.unpacked(raw)

    def version(self) -> int:
        """Return the notice's version."""
        return int(entry_points.load_word(self._version))

    def holds(self, version: int) -> bool:
        """Return whether `version` describes the current wait; only the slot's owner calls."""
        first = self._first
        return first is not None and first <= version <= self.version()

    def _write(self, raw: bytes) -> None:
        data = self._mapping.data
        data[at.NOTICE_START + 8 : at.NOTICE_START + 8 + len(raw)] = memoryview(raw)
        self._mapping.words(at.NOTICE_START, 1)[0] = len(raw)


MESSAGES_PER_LOOK = 16
"""Most messages that a rank sends after a look at the notices.

While a rank in a large group is slow, every other rank needs all ranks whose notices it has not
received. Without a limit each rank would send a message to all others."""

VersionedNotice = tuple[int, WaitNotice | None]
"""A rank's notice, behind its version."""


class NoticeExchange:
    """The notices that a rank has received from other hosts and has forwarded to them."""

    def __init__(self) -> None:
        self.received: dict[int, VersionedNotice] = {}
        self._sent: dict[tuple[int, int], int] = {}

    def receive(self, message: Message) -> None:
        """Keep a notice, but not a malformed one, nor an older version than has come already."""
        waiter, version = message["waiter"], message["version"]
        if version <= self.received.get(waiter, NONE)[0]:
            return
        try:
            notice = WaitNotice.unpacked(base64.b64decode(message["notice"], validate=True))
        except (ValueError, struct.error):
            return
        # Replaced, not changed: the waiting thread may be reading the dict.
        self.received = self.received | {waiter: (version, notice)}

    def forward(
        self,
        notices: Mapping[int, VersionedNotice],
        me: int,
        near: Collection[int],
        control: ControlConnections,
    ) -> None:
        """Send `notices` to the ranks that rank `me` needs; local peers read shared memory.

        At most MESSAGES_PER_LOOK messages are sent, beginning with this rank's own notice; the
        others follow at the next look.
        """
        mine = notices[me][1]
        assert mine is not None, "only a waiting rank forwards notices"
        # Each rank begins with the ranks after itself, so that not all send to the same rank first.
        needed = sorted({need.rank for need in mine.needs}, key=lambda rank: (rank < me, rank))
        left = MESSAGES_PER_LOOK
        for waiter in sorted(notices, key=lambda rank: rank != me):
            version, notice = notices[waiter]
            to = [r for r in needed if r != waiter and (waiter not in near or r not in near)]
            to = [r for r in to if self._sent.get((r, waiter)) != version]
            to = [r for r in to if not control.backlogged(r)][:left]
            left -= len(to)
            if to and notice is not None:
                raw = notice.packed(at.NOTICE_BYTES) or b""
                text = base64.b64encode(raw).decode()
                message = {"kind": "wait_notice", "waiter": waiter, "version": version}
                control.send(to, message | {"notice": text, "group": ""})
                self._sent |= {(rank, waiter): version for rank in to}
