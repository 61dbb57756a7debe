"""The flight recorder: what each rank of a group did last, and how far it is.

The engine keeps a ring of each rank's latest calls and messages (2048 in all groups together),
always. A FlightRecorder reads that ring. With NC10D_DUMP_DIR set, every group writes what its
recorder has to `DIR/GROUP-rankR.json` when it fails; NC10D_DUMP_SIGNAL names a signal, such as
SIGUSR2, on which all groups of the process do so, working or not. `python -m nc10d.debug DIR` reads
the files of all ranks and says which of them is late, missing or different.
"""

from __future__ import annotations

import contextlib
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
    from nc10d.group.process_group import ProcessGroup

FORMAT = "nc10d-dump-2"
FOLDER, SIGNAL = "NC10D_DUMP_DIR", "NC10D_DUMP_SIGNAL"
COMPLETED, STARTED = "completed", "started"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective call, or one message that has passed: its number in the group, or on its link.

    `begun` and `ended` are in ns of the system's monotonic clock, 0 if that is not known or has not
    come; a message of up to 4 KiB inside a host that did not wait began when it ended. `site` is
    the line of the program, as "train.py:41", "" if it is not known.
    """

    seq: int
    call: str
    state: str
    begun: int = 0
    ended: int = 0
    site: str = ""
    message: bool = False

    @property
    def op(self) -> str:
        """The operation's name."""
        return self.call.partition("(")[0]

    @property
    def where(self) -> str:
        """The call, and the line that made it if that is known."""
        return f"{self.call} at {self.site}" if self.site else self.call


@dataclass(frozen=True, slots=True)
class Traffic:
    """A rank's end of a link: messages that have begun "to" or "from" `peer`."""

    direction: str
    peer: int
    count: int
    waits: bool


@dataclass(frozen=True, slots=True)
class Dump:
    """What one rank knows of one group; `last` has every rank's number as seen from here.

    It was `written` at a time of day in s, when the clock of its entries stood at `clock` ns.
    """

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
    clock: int = 0

    def day(self, moment: int) -> float:
        """Return the time of day, in ns, of a moment of this rank's entries."""
        return self.written * 1e9 - (self.clock - moment)

    @property
    def calls(self) -> list[Entry]:
        """The collectives among the entries."""
        return [entry for entry in self.entries if not entry.message]

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
        records = backend.call_records
        if records is None:
            raise TypeError(f"the backend {backend.name!r} of {group!r} keeps no records")
        self._backend = records
        self._name, self._ranks = group.name, [*group.ranks]

    def entries(self) -> list[Entry]:
        """Return this rank's latest calls and messages in the group, oldest first."""
        return [
            Entry(
                seq=one.seq,
                call=call,
                state=COMPLETED if one.ended else STARTED,
                begun=one.begun,
                ended=one.ended,
                site=one.site,
                message=message,
            )
            for one, call, message in self._backend.logged()
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
            clock=time.monotonic_ns(),
            why=why if error is None else f"{type(error).__name__}: {error}",
            failed=None if error is None else error.rank,
            waits_for=backend.waits_for(),
            entries=self.entries(),
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
    if environment.get(SIGNAL) and not folder:
        _log.warning("%s writes nothing: %s does not say where to", SIGNAL, FOLDER)
    if not folder or "cpu" not in group.config.devices:
        return
    records = group.backend("cpu").call_records
    if records is None:
        return
    recorder = FlightRecorder(group)
    records.observe_failure(lambda error: _write(recorder, Path(folder), error=error))
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
            with contextlib.suppress(DistError):  # it is over, or the parent's
                _write(FlightRecorder(group), folder, why=f"signal {number.name}")
        if callable(before):
            before(received, frame)

    write_all.writes_dumps = True  # type: ignore[attr-defined]
    signal.signal(number, write_all)
