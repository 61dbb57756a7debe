"""What each rank of a host shows the others while it waits long.

A rank's board lies at a known place of its arena. Its owner alone writes the notice, between two
changes of its version, which is odd meanwhile. A notice changes as others of the group come; until
it is taken away all of its versions are of one wait.
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
        self._first: int | None = None

    def show(self, standing: Standing | None) -> None:
        """Show a notice in place of the one before; None takes it away."""
        most = at.BOARD_NOTICE_BYTES - 8
        raw = None if standing is None else standing.packed(most)
        version = self.version()
        writing = version | 1  # already, if an interrupt has ended the last change
        engine.compare_and_swap(self._version, version, writing)
        self._write(raw or b"")
        # Before it can be seen: a rank that sees it may answer at once.
        if standing is None:
            self._first = None
        elif self._first is None:
            self._first = writing + 1
        engine.compare_and_swap(self._version, writing, writing + 1)

    def read(self) -> tuple[int, Standing | None]:
        """Return the version and the notice; None if there is none, or it is just being changed."""
        version = int(engine.load_word(self._version))
        if version & 1:
            return NONE
        raw = self._read()
        if engine.load_word(self._version) != version or not raw:
            return NONE
        return version, Standing.unpacked(raw)

    def version(self) -> int:
        """Return the notice's version."""
        return int(engine.load_word(self._version))

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
