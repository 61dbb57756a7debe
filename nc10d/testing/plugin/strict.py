"""Strict mode: a rank that drops a Work, or uses an array before the wait, is named.

    with watching() as watch:           # on the rank's own thread
        body()
    watch.check()

The debug level DETAIL finds writes to arrays in flight (nc10d.group.race_check). Strict mode adds:

| mistake | how it is found |
|---|---|
| a Work without a wait | the caller's Work notes every look; `check` raises for the others |
| a result that is read before the wait | until then the array holds `poison`: NaN, or 0xAA |

A read cannot be seen, but poison in a failed test's message can; `remarks` then names the calls.
The Works of all launches are watched. The level is the process's, and is raised while any rank in
this process is watched.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nc10d.base.call_site import called
from nc10d.base.deadline import Deadline
from nc10d.base.debug_level import DebugLevel, get_debug_level, set_debug_level
from nc10d.base.promise import PENDING
from nc10d.errors import DistError
from nc10d.group import race_check
from nc10d.group.dispatch import Dispatcher
from nc10d.group.race_check import ArrayUse, RaceCheckedWork
from nc10d.ops import Op
from nc10d.ops.facts import name_of
from nc10d.testing.outcomes import FRAMES, running_frames
from nc10d.work import Work

_UNWATCHED = vars(Dispatcher)["watch_work"]
MOST_CALLS = 3
"""Most calls that remarks list."""


class NotWaitedFor(AssertionError):
    """A Work was dropped, or kept, without a wait for the operation."""


class Call:
    """A rank's asynchronous call: where it was made, and where it was waited for."""

    def __init__(self, ops: Sequence[Op]) -> None:
        names = sorted({name_of(op) for op in ops})
        self.name = names[0] if len(names) == 1 else f"a batch of {len(ops)}"
        self.frames = running_frames(sys._getframe(1))
        self.waited = ""
        self.failed = False

    def __str__(self) -> str:
        return called(self.name, self.site)

    @property
    def site(self) -> str:
        """The line of the call."""
        return self.frames[-1].site if self.frames else ""


class PoisonedWork(RaceCheckedWork):
    """A checked work whose results reach the program's arrays by a wait only."""

    __slots__ = ("unattended",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.unattended = False
        """Whether the work ends without a wait: it has a callback, or the caller has dropped it."""

    def _enter(self, use: ArrayUse) -> None:
        if use.written and use.array.flags.writeable:
            use.before = use.array.copy()
            poison(use.array)

    def end_unattended(self) -> None:
        """Let the work end as soon as the operation has, though no thread waits."""
        self.unattended = True
        self._inner._attach(lambda _: self._poll())

    def _on_end(self) -> None:
        if self.unattended:
            self._end()

    def _give_back(self) -> ValueError | None:
        found = super()._give_back()
        if self._inner._exception is not None:  # a failed operation leaves arrays as they were
            for use in self.uses:
                if use.before is not None and use.array.flags.writeable:
                    np.copyto(use.array, use.before)
        return found


class WatchedWork(Work):
    """The caller's stand-in for a Work, which notes whether anybody looks at it."""

    __slots__ = ("_call", "_inner", "_watch_of")

    def __init__(self, inner: Work, call: Call, watch: Watch) -> None:
        super().__init__(inner.ops)
        self._inner, self._call, self._watch_of = inner, call, watch

    def _poll(self) -> None:
        if self._inner._look():
            self._follow(self._inner)

    def _block(self, deadline: Deadline) -> None:
        if not self._inner._look():
            self._inner._block(deadline)
        self._poll()

    def _watch(self) -> None:
        self._seen()
        if isinstance(self._inner, PoisonedWork):
            self._inner.end_unattended()
        self._inner._attach(self._follow)

    def _follow(self, inner: Work) -> None:
        if inner._state != PENDING:
            self._seen()
            self._call.failed = inner._exception is not None
            self._finish(inner._exception, inner._result)

    def _seen(self) -> None:
        if not self._call.waited:
            frames = running_frames(sys._getframe(1))
            self._call.waited = frames[-1].site if frames else "an unknown line"

    def _value(self) -> object:
        return self._result if self._result is not None else self._inner._value()

    def _require_unattended(self, what: str) -> None:
        self._inner._require_unattended(what)

    def __del__(self) -> None:
        # The arrays get their results, or stay read-only for ever.
        if self._state == PENDING and isinstance(self._inner, PoisonedWork):
            self._inner.end_unattended()


class Watch:
    """A rank's asynchronous calls in strict mode."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def check(self) -> None:
        """Raise NotWaitedFor for the first call without a wait that did not fail."""
        missing = [call for call in self.calls if not call.waited]
        if not missing:
            return
        first = missing[0]
        there = [call for call in self.calls if str(call) == str(first)]
        which = f" (call {there.index(first) + 1} of {len(there)} there)" if there[1:] else ""
        more = f", nor were {len(missing) - 1} others" if missing[1:] else ""
        error = NotWaitedFor(
            f"{first}{which} was never waited for{more}: call wait() on the Work that it returns, "
            "else its arrays may still be in use"
        )
        setattr(error, FRAMES, first.frames)
        raise error

    def remarks(self, error: BaseException) -> tuple[str, ...]:
        """Return sentences about calls that may explain the rank's error."""
        if isinstance(error, DistError):
            return tuple(advice for word, advice in _ADVICE.items() if word in str(error))
        missing = [call for call in self.calls if not call.waited]
        found = [
            f"{call} had not been waited for: until its wait(), its array is read-only and {_HOLDS}"
            for call in missing[-MOST_CALLS:]
        ]
        if any(word in str(error) for word in _POISON):
            late = [call for call in self.calls if call.waited][-MOST_CALLS:]
            found += [
                f"{call} was waited for at {call.waited}; before, its array {_HELD}"
                for call in late
            ]
        return tuple(found)


_HOLDS = "holds NaN (integers: bytes 0xAA)"
_HELD = _HOLDS.replace("holds", "held")
_SEND = (
    "in strict mode a send waits for its receiver, as a large message does anywhere: let one of "
    "the ranks receive first, or use isend, or sendrecv"
)
_ADVICE = {
    " waits in send #": _SEND,
    " waits in send to ": _SEND,
    "ranks disagree on operation": (
        "the ranks made different calls: a call stands under a condition, in another order, or "
        "with an argument that differs between ranks"
    ),
}
_POISON = ("nan", *(str(-int("55" * size, 16) - 1) for size in (2, 4, 8)))
_POISON += tuple(str(int("AA" * size, 16)) for size in (2, 4, 8))


def poison(x: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Fill an array with NaN, or with bytes 0xAA; bools stay, as other bytes are none."""
    if x.dtype.kind in "iu":
        x[...] = np.frombuffer(b"\xaa" * x.dtype.itemsize, x.dtype)[0]
    elif x.dtype.kind != "b":
        with np.errstate(all="ignore"):
            x[...] = np.array(np.nan).astype(x.dtype)


_watches: dict[int, Watch] = {}
_lock = threading.Lock()


def _current() -> Watch | None:
    """Return this thread's watch, or the only watch: a rank may have its own threads."""
    found = _watches.get(threading.get_ident())
    return found or (next(iter(_watches.values())) if len(_watches) == 1 else None)


def _watch_work(_: Dispatcher, ops: Sequence[Op], work: Work | None) -> Work | None:
    watch = _current()
    if watch is None or work is None or work._state != PENDING:
        return work
    call = Call(ops)
    watch.calls.append(call)
    return WatchedWork(work, call, watch)


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Watch this rank's calls in the block; other ranks in the process may be watched, too."""
    global _level
    watch = Watch()
    with _lock:
        if not _watches:
            _level = get_debug_level()
            Dispatcher.watch_work = staticmethod(_watch_work)
            race_check.kind_of_work = PoisonedWork
            set_debug_level(DebugLevel.DETAIL)
        _watches[threading.get_ident()] = watch
    try:
        yield watch
    finally:
        with _lock:
            del _watches[threading.get_ident()]
            if not _watches:
                set_debug_level(_level)
                Dispatcher.watch_work = _UNWATCHED
                race_check.kind_of_work = RaceCheckedWork


_level = DebugLevel.OFF
