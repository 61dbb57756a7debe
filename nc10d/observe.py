"""The flight recorder: what each rank of a group did last, and how far it is.

The engine keeps a ring of the latest calls of each rank, always: it needs them to say how ranks
disagree. A FlightRecorder reads that ring. With NC10D_DUMP_DIR set, every group writes what its
recorder has to `DIR/GROUP-rankR.json` when it fails; NC10D_DUMP_SIGNAL names a signal, such as
SIGUSR2, on which all groups of the process do so, working or not. `python -m nc10d.debug DIR` reads
the files of all ranks and says which of them is late, missing or different.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from nc10d.errors import DistError

if TYPE_CHECKING:
    from nc10d.group import ProcessGroup

FORMAT = "nc10d-dump-1"
FOLDER, SIGNAL = "NC10D_DUMP_DIR", "NC10D_DUMP_SIGNAL"
COMPLETED, STARTED = "completed", "started"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective call: its number in the group, what it was, and whether it has ended.

    `begun` is in ns of the system's monotonic clock; 0 if it is not known.
    """

    seq: int
    call: str
    state: str
    begun: int = 0

    @property
    def op(self) -> str:
        """The operation's name."""
        return self.call.partition("(")[0]


@dataclass(frozen=True, slots=True)
class Traffic:
    """A rank's end of a link: messages that have begun "to" or "from" `peer`."""

    direction: str
    peer: int
    count: int
    waits: bool


@dataclass(frozen=True, slots=True)
class Dump:
    """What one rank knows of one group; `last` has every rank's number as seen from here."""

    group: str
    rank: int
    size: int
    ranks: list[int]
    host: str
    pid: int
    written: float
    why: str
    failed: int | None = None
    waits_for: int | None = None
    entries: list[Entry] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the dump as a file has it."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Dump:
        """Return the dump that a file has; ValueError if it is none."""
        try:
            raw = dict(json.loads(text))
            if raw.pop("format") != FORMAT:
                raise ValueError(f"not of the format {FORMAT}")
            entries = [Entry(**entry) for entry in raw.pop("entries")]
            traffic = [Traffic(**one) for one in raw.pop("traffic")]
            last = {int(rank): int(seq) for rank, seq in raw.pop("last").items()}
            return cls(**raw, entries=entries, traffic=traffic, last=last)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a dump: {error!r}") from error


class FlightRecorder:
    """Reads what the engine has kept of a group; costs a group's operations nothing.

    TypeError for a group whose backend for cpu arrays keeps no records.
    """

    def __init__(self, group: ProcessGroup) -> None:
        backend = group.backend("cpu")
        if not hasattr(backend, "recent"):
            raise TypeError(f"the backend {backend.name!r} of {group!r} keeps no records")
        self._backend: Any = backend
        self._name, self._ranks = group.name, [*group.ranks]

    def entries(self, failed: int | None = None) -> list[Entry]:
        """Return this rank's latest calls, oldest first; number `failed` can't have ended."""
        calls, waits_for = self._backend.recent()
        newest = calls[-1][0] if calls and waits_for is not None else failed
        return [
            Entry(seq, call, STARTED if seq == newest else COMPLETED, begun)
            for seq, begun, call in calls
        ]

    def dump(self, why: str = "asked for", error: DistError | None = None) -> Dump:
        """Return everything that is known here; `why` says what made you ask."""
        backend = self._backend
        return Dump(
            group=self._name,
            rank=backend.rank,
            size=backend.size,
            ranks=self._ranks,
            host=socket.gethostname(),
            pid=os.getpid(),
            written=time.time(),
            why=why if error is None else f"{type(error).__name__}: {error}",
            failed=None if error is None else error.rank,
            waits_for=backend.recent()[1],
            entries=self.entries(None if error is None else error.seq),
            traffic=[Traffic(*one) for one in backend.traffic()],
            last=backend.progress(),
        )

    def write(self, folder: Path, why: str = "asked for", error: DistError | None = None) -> Path:
        """Write the dump into a folder, which is made if need be; return the file."""
        folder.mkdir(parents=True, exist_ok=True)
        dump = self.dump(why, error)
        path = folder / f"{dump.group.replace('/', '.')}-rank{dump.rank}.json"
        # Whoever looks meanwhile must not find half a file.
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        part.write_text(dump.to_json())
        part.replace(path)
        return path


_attended: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def attend(group: ProcessGroup, environment: Mapping[str, str] = os.environ) -> None:
    """Have a group write dumps, if the environment says where; see the module."""
    folder = environment.get(FOLDER)
    if not folder or "cpu" not in group.config.devices:
        return
    backend = group.backend("cpu")
    health = getattr(backend, "health", None)
    if health is None:
        return
    recorder = FlightRecorder(group)
    health.on_failure = lambda error: _write(recorder, Path(folder), error=error)
    _attended.add(group)
    if environment.get(SIGNAL):
        _listen(environment[SIGNAL], Path(folder))


def _write(recorder: FlightRecorder, folder: Path, **why: Any) -> None:
    try:
        recorder.write(folder, **why)
    except OSError as error:  # what has failed is told all the same
        _log.warning("cannot write a dump to %s: %s", folder, error)


def _listen(name: str, folder: Path) -> None:
    """Write dumps on a signal, beside what it does already. Only the main thread can arrange it."""
    number = signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    before = signal.getsignal(number)
    if getattr(before, "writes_dumps", False):
        return
    if threading.current_thread() is not threading.main_thread():
        _log.warning("%s=%s: only groups of the main thread can arrange for it", SIGNAL, name)
        return

    def write_all(received: int, frame: FrameType | None) -> None:
        for group in [*_attended]:
            _write(FlightRecorder(group), folder, why=f"signal {number.name}")
        if callable(before):
            before(received, frame)

    write_all.writes_dumps = True  # type: ignore[attr-defined]
    signal.signal(number, write_all)
