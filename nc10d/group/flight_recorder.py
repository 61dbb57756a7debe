"""The flight recorder: each rank's latest operations in a group, and its progress.

The CPU's engine always keeps a ring of each rank's latest calls and messages (2048 in all groups
together), the NCCL backend a ring for each group. A FlightRecorder reads such a ring. Calls on
devices have separate numbers, and dumps under the group name "NAME on cuda".

With NC10D_DUMP_DIR set, every group writes a dump to `DIR/GROUP-rankR.json` when it fails.
NC10D_DUMP_SIGNAL names a signal, such as SIGUSR2, on which all groups in the process write a dump,
failed or not. `python -m nc10d.debug DIR` reads all ranks' dumps and reports which rank is late,
missing or different.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from nc10d.base.deadline import monotonic_ns, time_of_day_ns
from nc10d.base.signal_errors import raised_here, suppress_here
from nc10d.errors import DistError

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

FORMAT = "nc10d-dump-2"
FOLDER, SIGNAL = "NC10D_DUMP_DIR", "NC10D_DUMP_SIGNAL"
COMPLETED, STARTED = "completed", "started"
_log = logging.getLogger(__name__)
T = TypeVar("T", bound="Entry | Traffic | Dump")


@dataclass(frozen=True, slots=True)
class Entry:
    """A collective call, with its number in the group, or a message, with its number on the link.

    `begun` and `ended` are in ns of the system's monotonic clock; 0 if unknown or still to come.
    For a message of up to 4 KiB inside a host that did not wait, `begun` equals `ended`. `site` is
    the program's line, as "train.py:41", or "" if unknown.
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
        """The call, and the program's line if known."""
        return f"{self.call} at {self.site}" if self.site else self.call


@dataclass(frozen=True, slots=True)
class Traffic:
    """A rank's end of a link: how many messages "to" or "from" `peer` have ended."""

    direction: str
    peer: int
    count: int
    waits: bool


@dataclass(frozen=True, slots=True)
class Dump:
    """A rank's state in a group; `last` has the latest call number of each rank on the host.

    The dump's time is `written`, the time of day in s, and `clock`, the monotonic clock in ns.
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
        """Return the time of day, in ns, for a moment on the entries' monotonic clock."""
        return self.written * 1e9 - (self.clock - moment)

    @property
    def calls(self) -> list[Entry]:
        """The collectives among the entries."""
        return [entry for entry in self.entries if not entry.message]

    def to_json(self) -> str:
        """Return the text for the dump's file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Dump:
        """Return the dump in a file's text; ValueError if the text is not a dump."""
        try:
            raw = dict(json.loads(text))
            if raw.pop("format") != FORMAT:
                raise ValueError(f"not of the format {FORMAT}")
            entries = [_checked(Entry(**entry)) for entry in raw.pop("entries")]
            traffic = [_checked(Traffic(**end)) for end in raw.pop("traffic")]
            last = {int(rank): seq for rank, seq in raw.pop("last").items()}
            dump = _checked(cls(**raw, entries=entries, traffic=traffic, last=last))
        except RecursionError as error:
            raise ValueError("not a dump: it is nested too deep") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a dump: {error!r}") from error
        if dump.size != len(dump.ranks) or not 0 <= dump.rank < dump.size:
            raise ValueError(f"not a dump: rank {dump.rank} of {dump.size}")
        return dump


_WORD = 1 << 63
_FITS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: type(value) is str,
    "bool": lambda value: type(value) is bool,
    "int": lambda value: type(value) is int and -_WORD <= value < _WORD,
    "float": lambda value: type(value) in (int, float) and -_WORD < value < _WORD,
    "int | None": lambda value: value is None or _FITS["int"](value),
    "list[int]": lambda value: type(value) is list and all(map(_FITS["int"], value)),
    "dict[int, int]": lambda value: all(map(_FITS["int"], [*value, *value.values()])),
}
"""By a field's type: whether a value from a file has that type. Lists of records have."""


def _checked(record: T) -> T:
    """Return a record from a file; ValueError names the first value of a wrong type."""
    for item in fields(record):
        value = getattr(record, item.name)
        if not _FITS.get(str(item.type), lambda value: True)(value):
            raise ValueError(f"not a dump: {item.name} is {repr(value)[:40]}, not {item.type}")
    return record


class FlightRecorder:
    """A reader of a backend's records about a group; the group's operations cost no more.

    `device` ("cpu", "cuda") chooses the backend; by default, the group's first device counts. On a
    device a call ends when this rank has seen its end. TypeError for a backend that keeps no
    records.
    """

    def __init__(self, group: ProcessGroup, device: str | None = None) -> None:
        chosen = device or ("cpu" if "cpu" in group.config.devices else group.config.first)
        backend = group.backend(chosen)
        records = backend.call_records
        if records is None:
            raise TypeError(f"the backend {backend.name!r} of {group!r} keeps no records")
        self._backend = records
        self._name = group.name if chosen == "cpu" else f"{group.name} on {chosen}"
        self._ranks = [*group.ranks]

    def entries(self) -> list[Entry]:
        """Return this rank's latest calls and messages in the group, oldest first."""
        return [
            Entry(
                seq=record.seq,
                call=call,
                state=COMPLETED if record.ended else STARTED,
                begun=record.begun,
                ended=record.ended,
                site=record.site,
                message=message,
            )
            for record, call, message in self._backend.logged()
        ]

    def dump(self, why: str = "asked for", error: DistError | None = None) -> Dump:
        """Return this rank's records; `why` is the reason that the dump reports."""
        backend = self._backend
        return Dump(
            group=self._name,
            rank=backend.rank,
            size=backend.size,
            ranks=self._ranks,
            host=socket.gethostname(),
            pid=os.getpid(),
            written=time_of_day_ns() / 1e9,
            clock=monotonic_ns(),
            why=why if error is None else f"{type(error).__name__}: {error}",
            failed=None if error is None else error.rank,
            waits_for=backend.waits_for(),
            entries=self.entries(),
            traffic=[Traffic(*end) for end in backend.traffic()],
            last=backend.progress(),
        )

    def dump_on_failure(self, folder: Path) -> None:
        """Have the group write a dump into a folder when the group fails."""
        self._backend.observe_failure(
            lambda error: write_or_warn(lambda: self.write(folder, error=error), folder)
        )

    def write(self, folder: Path, why: str = "asked for", error: DistError | None = None) -> Path:
        """Write the dump into a folder, made if missing; return the file's path."""
        folder.mkdir(parents=True, exist_ok=True)
        dump = self.dump(why, error)
        path = folder / f"{dump.group.replace('/', '.')}-rank{dump.rank}.json"
        # A reader must not find half a file.
        descriptor, part = tempfile.mkstemp(suffix=".part", prefix=path.stem[:100], dir=folder)
        with open(descriptor, "w") as file:  # with mode 600: calls and lines are the user's own
            file.write(dump.to_json())
        os.replace(part, path)
        return path


_recorded: weakref.WeakKeyDictionary[ProcessGroup, set[str]] = weakref.WeakKeyDictionary()
"""The groups that write dumps, and their devices."""


def dump_automatically(group: ProcessGroup, device: str = "cpu") -> None:
    """Have a group write a backend's dumps, if the environment names a folder; see the module."""
    folder, signal_name = os.environ.get(FOLDER), os.environ.get(SIGNAL)
    if signal_name and not folder:
        _log.warning("%s writes nothing: %s does not say where to", SIGNAL, FOLDER)
    if not folder or device not in group.config.devices:
        return
    if group.backend(device).call_records is None or device in _recorded.get(group, ()):
        return
    _recorded.setdefault(group, set()).add(device)
    FlightRecorder(group, device).dump_on_failure(Path(folder))
    if signal_name:
        _dump_on_signal(signal_name, Path(folder))


def write_or_warn(write: Callable[[], object], place: object) -> None:
    """Call `write`; an OSError becomes a warning, as the group's own error must still be raised."""
    try:
        write()
    except raised_here(OSError) as error:
        _log.warning("cannot write a dump to %s: %s", place, error)


def _dump_on_signal(name: str, folder: Path) -> None:
    """Write dumps on a signal, then call the handler set before; only the main thread can."""
    number = signal.Signals.__members__.get(name if name.startswith("SIG") else f"SIG{name}")
    if number is None:
        raise ValueError(f"{SIGNAL}={name!r} is not a signal, such as USR2")
    before = signal.getsignal(number)
    if getattr(before, "writes_dumps", False):
        return
    if threading.current_thread() is not threading.main_thread():
        _log.warning("%s=%s: only groups of the main thread can arrange for it", SIGNAL, name)
        return

    def write_all(received: int, frame: FrameType | None) -> None:
        for group, devices in [*_recorded.items()]:
            for device in devices:
                with suppress_here(DistError):  # the group is closed, or the parent process's
                    recorder = FlightRecorder(group, device)
                    why = f"signal {number.name}"
                    write_or_warn(partial(recorder.write, folder, why=why), folder)
        if callable(before):
            before(received, frame)

    write_all.writes_dumps = True  # type: ignore[attr-defined]
    signal.signal(number, write_all)
