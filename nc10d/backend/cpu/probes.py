"""What waiting ranks tell ranks of other hosts: who waits for what.

A rank that waits sends to those whom it needs what it shows on its noticeboard, and what has led to
it, each once. What comes is kept: it is looked at when its receiver waits itself. What is old does
no harm (circles.py), and takes one place a rank.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from nc10d.backend.cpu.circles import Standing
from nc10d.backend.cpu.native import layout as at

if TYPE_CHECKING:
    from nc10d.backend.cpu.control import Control, Message

AT_A_TIME = 16
"""Messages that a rank sends at one look. Who waits in a large group for one that is only slow
needs all others, as far as it knows, and so does every rank of it."""

Known = tuple[int, Standing | None]
"""The version of what a rank shows, and that."""


class Probes:
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
            standing = Standing.unpacked(base64.b64decode(message["notice"], validate=True))
        except (ValueError, struct.error):
            return
        self.heard = self.heard | {who: (version, standing)}

    def pass_on(
        self, known: Mapping[int, Known], me: int, near: Collection[int], control: Control
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
