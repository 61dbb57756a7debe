"""What each rank of a host shows the others while it waits long, and what they have found out.

A rank's board lies at a known place of its arena. Its owner alone writes the notice, between two
changes of its version, which is odd meanwhile. The verdict beside it is written by whoever has
found that this rank is stuck, for the version that the notice had.
"""

from __future__ import annotations

from nc10d.backend.cpu.arena import Mapping
from nc10d.backend.cpu.circles import Standing
from nc10d.backend.cpu.native import engine
from nc10d.backend.cpu.native import layout as at

NONE = (0, None)


class Noticeboard:
    """One rank's board, as one of the host's ranks sees it."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._version = mapping.base + at.BOARD_VERSION
        self._lock = mapping.base + at.BOARD_VERDICT

    def show(self, standing: Standing | None) -> None:
        """Show a notice in place of the one before; None takes it away."""
        most = at.BOARD_NOTICE_BYTES - 8
        raw = None if standing is None else standing.packed(most)
        version = engine.load_word(self._version)
        engine.compare_and_swap(self._version, version, version + 1)
        self._write(at.BOARD_NOTICE, raw or b"")
        engine.compare_and_swap(self._version, version + 1, version + 2)

    def read(self) -> tuple[int, Standing | None]:
        """Return the version and the notice; None if there is none, or it is just being changed."""
        version = int(engine.load_word(self._version))
        if version & 1:
            return NONE
        raw = self._read(at.BOARD_NOTICE, at.BOARD_NOTICE_BYTES)
        if engine.load_word(self._version) != version or not raw:
            return NONE
        return version, Standing.unpacked(raw)

    def version(self) -> int:
        """Return the notice's version."""
        return int(engine.load_word(self._version))

    def tell(self, version: int, verdict: str) -> None:
        """Tell a rank that it is stuck in what a version shows; the first to tell is heard."""
        if engine.compare_and_swap(self._lock, 0, -version) == 0:
            self._write(at.BOARD_VERDICT_TEXT, verdict.encode(errors="replace"))
            engine.compare_and_swap(self._lock, -version, version)

    def verdict(self) -> str | None:
        """Return what this rank was told of the notice that it shows now, and forget the rest."""
        told = int(engine.load_word(self._lock))
        if told <= 0:
            return None
        text = self._read(at.BOARD_VERDICT_TEXT, at.BOARD_VERDICT_BYTES)
        engine.compare_and_swap(self._lock, told, 0)
        return text.decode(errors="replace") if told == self.version() else None

    def _write(self, place: int, raw: bytes) -> None:
        room = at.BOARD_NOTICE_BYTES if place == at.BOARD_NOTICE else at.BOARD_VERDICT_BYTES
        raw = raw[: room - 8]
        data = self._mapping.data
        data[place + 8 : place + 8 + len(raw)] = memoryview(raw)
        self._mapping.words(place, 1)[0] = len(raw)

    def _read(self, place: int, room: int) -> bytes:
        count = min(max(int(self._mapping.words(place, 1)[0]), 0), room - 8)
        return self._mapping.data[place + 8 : place + 8 + count].tobytes()
