"""Lines of the user's program: which frames are the user's, and a line as text in errors."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType

from nc10d.base.run_to_end import callers
from nc10d.base.signal_errors import raised_here

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_programs: tuple[str, ...] = ()
_libraries: tuple[str, ...] = ()
_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_PACKAGES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_ADAPTERS = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}torch{os.sep}autograd{os.sep}")
bystanders: dict[int, threading.Thread | None] = {}
"""By ident, threads that make no call of any rank: those older than ranks that are threads, such as
a test runner's. None: the module `threading` has not started the thread. Idents are reused."""
rank_threads: list[str] = []
"""Prefixes of the names of threads that are ranks, registered by the code that starts them."""
idle_code: set[CodeType] = set()
"""The code of functions that wait for ranks' results, and make no call meanwhile."""
MOST_BYTES = 63
"""The longest text of a line. The engine keeps the text with each call, behind it a zero."""


def count_as_users(init: str, libraries: Sequence[str] = ()) -> None:
    """Count the code in the folder with a package's `__init__.py` as a user's.

    For nc10d's own programs. The files and folders that `libraries` names stay nc10d's.
    """
    global _programs, _libraries
    folder = f"{Path(init).parent}{os.sep}"
    _programs = (*_programs, folder)
    _libraries = (*_libraries, *[f"{folder}{name}" for name in libraries])


def is_own(name: str) -> bool:
    """Return whether a file is nc10d's, and belongs to none of nc10d's programs."""
    return name.startswith(_PACKAGE) and not name.startswith(_programs)


def is_users(name: str) -> bool:
    """Return whether a file is the user's: not nc10d's, the standard library's or an adapter's.

    nc10d's own programs count as a user's (see `count_as_users`). torch is an adapter: its modules
    and optimizers call nc10d for the program.
    """
    if name.startswith(_PACKAGE):
        return name.startswith(_programs) and not name.startswith(_libraries)
    if name.startswith(_LIBRARY) and not name.startswith(_PACKAGES):
        return False
    adapter = _is_torchs(name) or any(part in name for part in _ADAPTERS)
    return not (adapter or name.startswith("<frozen"))


def _is_torchs(name: str) -> bool:
    file = getattr(sys.modules.get("torch"), "__file__", None)
    folder = "" if file is None else f"{os.path.dirname(file)}{os.sep}"
    return bool(folder) and name.startswith(folder) and not name.startswith(f"{folder}testing")


def text_at(name: str, line: int) -> str:
    """Return a line as "train.py:41", relative to the working directory.

    A text longer than MOST_BYTES loses its beginning, which becomes "…".
    """
    name = name.removeprefix(f"{_folder()}{os.sep}")
    raw = f"{name}:{line}".encode(errors="replace")
    if len(raw) > MOST_BYTES:
        raw = "…".encode() + raw[len(raw) - MOST_BYTES + 3 :]
    return raw.decode(errors="ignore")


def here() -> str:
    """Return the line of the user's program that this thread's call comes from, or ""."""
    for innermost in (sys._getframe(1), *callers.get(threading.get_ident(), ())):
        frame: FrameType | None = innermost
        while frame is not None and not is_users(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            return text_at(frame.f_code.co_filename, frame.f_lineno or 0)
    return ""


def _folder() -> str:
    try:
        return os.getcwd()
    except raised_here(OSError):  # the folder has been deleted
        return ""


def called(call: str, site: str) -> str:
    """Return a call for an error text, with the site if known."""
    return f"{call} at {site}" if site else call


_frames_lock = threading.RLock()


def frames_of_threads() -> dict[int, FrameType]:
    """Return the innermost frame of each thread.

    CPython 3.11.7 allocates the result under its lock for the list of threads. A garbage collection
    that starts there runs finalizers, which hand over the GIL; the next thread that asks for frames
    then waits for that lock and keeps the GIL: the process stands still (python/cpython#106883).
    """
    with _frames_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()
