"""What each rank of a host shows the others while it waits long.

A rank's board lies at a known place of its arena. Its owner alone writes the notice, between two
changes of its version, which is odd meanwhile. A notice changes as others of the group come; until
it is taken away all of its versions are of one wait.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from nc10d.backend.cpu.deadlock.wait_graph import WaitNotice
from nc10d.backend.cpu.memory.arena import ArenaMapping as Mapped
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at

NONE = (0, None)


class NoticeSlot:
    """One rank's board, as one of the host's ranks sees it."""

    def __init__(self, mapping: Mapped) -> None:
        self._mapping = mapping
        self._version = mapping.base + at.BOARD_VERSION
        self._first: int | None = None

    def show(self, standing: WaitNotice | None) -> None:
        """Show a notice in place of the one before; None takes it away."""
        most = at.BOARD_NOTICE_BYTES - 8
        raw = None if standing is None else standing.packed(most)
        version = self.version()
        writing = version | 1  # already, if an interrupt has ended the last change
        entry_points.compare_and_swap(self._version, version, writing)
        self._write(raw or b"")
        # Before it can be seen: a rank that sees it may answer at once.
        if standing is None:
            self._first = None
        elif self._first is None:
            self._first = writing + 1
        entry_points.compare_and_swap(self._version, writing, writing + 1)

    def read(self) -> tuple[int, WaitNotice | None]:
        """Return the version and the notice; None if there is none, or it is just being changed."""
        version = int(entry_points.load_word(self._version))
        if version & 1:
            return NONE
        raw = self._read()
        if entry_points.load_word(self._version) != version or not raw:
            return NONE
        return version, WaitNotice.unpacked(raw)

    def version(self) -> int:
        """Return the notice's version."""
        return int(entry_points.load_word(self._version))

    def holds(self, version: int) -> bool:
        """Say whether a version is of the wait that the notice is of now; its owner asks."""
        first = self._first
        return first is not None and first <= version <= self.version()

    def _write(self, raw: bytes) -> None:
        data = self._mapping.data
        data[at.BOARD_NOTICE + 8 : at.BOARD_NOTICE + 8 + len(raw)] = memoryview(raw)
        self._mapping.words(at.BOARD_NOTICE, 1)[0] = len(raw)

    def _read(self) -> bytes:
        place, most = at.BOARD_NOTICE, at.BOARD_NOTICE_BYTES - 8
        count = min(max(int(self._mapping.words(place, 1)[0]), 0), most)
        return self._mapping.data[place + 8 : place + 8 + count].tobytes()


if TYPE_CHECKING:
    from nc10d.backend.cpu.control.connections import ControlConnections, Message

AT_A_TIME = 16
"""Messages that a rank sends at one look. Who waits in a large group for one that is only slow
needs all others, as far as it knows, and so does every rank of it."""

Known = tuple[int, WaitNotice | None]
"""The version of what a rank shows, and that."""


class NoticeExchange:
    """What one rank has heard from others, and has told them."""

    def __init__(self) -> None:
        self.heard: dict[int, Known] = {}
        self._sent: dict[tuple[int, int], int] = {}

    def hear(self, message: Message) -> None:
        """Take in what has come, by the shortest way or not; what can't be read is nothing."""
        who, version = message["who"], message["version"]
        if version <= self.heard.get(who, (0, None))[0]:
            return
        try:
            standing = WaitNotice.unpacked(base64.b64decode(message["notice"], validate=True))
        except (ValueError, struct.error):
            return
        self.heard = self.heard | {who: (version, standing)}

    def pass_on(
        self,
        known: Mapping[int, Known],
        me: int,
        near: Collection[int],
        control: ControlConnections,
    ) -> None:
        """Send what leads to this rank to those whom it needs; host mates read each other.

        What is more than `AT_A_TIME` messages is left for the next look, its own notice goes first.
        """
        mine = known[me][1]
        assert mine is not None, "who passes on waits itself"
        # Those behind this rank first: so not all tell the same ones at the same time.
        needed = sorted({need.rank for need in mine.needs}, key=lambda rank: (rank < me, rank))
        left = AT_A_TIME
        for who in sorted(known, key=lambda one: one != me):
            version, standing = known[who]
            to = [r for r in needed if r != who and (who not in near or r not in near)]
            to = [r for r in to if self._sent.get((r, who)) != version and not control.behind(r)]
            to = to[:left]
            left -= len(to)
            if to and standing is not None:
                raw = standing.packed(at.BOARD_NOTICE_BYTES) or b""
                notice = base64.b64encode(raw).decode()
                message = {"kind": "waits", "who": who, "version": version, "notice": notice}
                control.send(to, message | {"group": ""})
                self._sent |= {(rank, who): version for rank in to}
