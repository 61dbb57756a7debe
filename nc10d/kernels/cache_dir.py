"""The folder of compiled code on disk, and the lock that lets a single process compile for all.

Contract: `code_folder` returns an existing folder that only this user can enter, named by a hash of
the package's sources and of all versions and settings that shape the code. Its files were written
by this user for exactly these. They are pickles, so no other user may be able to write there.
Standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
# The sources that can change the machine code of a kernel, and of all other code (which may contain
# helpers of kernels): a change to the engine leaves the kernels compiled.
KERNEL_SOURCES = ("arrays/dtypes.py", "ops.py", "kernels/*.py")
SOURCES = (*KERNEL_SOURCES, "backend/cpu/native/*.py")
LOCK_SECONDS = 120.0


def code_folder(sources: tuple[str, ...], parts: tuple[object, ...]) -> Path:
    """Return the folder for these sources (patterns) and `parts` (versions, CPU); made if missing.

    It lies in NC10D_CACHE_DIR, else in nc10d in the user's cache folder. If that is not private or
    not writable, it lies in this user's folder in /tmp, at worst in a folder for this process.
    """
    folder = _root() / _digest(sources, parts)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _digest(sources: tuple[str, ...], parts: tuple[object, ...]) -> str:
    """Hash the contents of the package's `sources`, and `parts`."""
    total = hashlib.sha256(repr(parts).encode())
    for path in matching(PACKAGE, sources):
        total.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return total.hexdigest()[:20]


def matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files in `folder` that match, sorted; FileNotFoundError if a pattern matches none.

    A digest that silently leaves a source out would accept code compiled from another version.
    """
    found: set[Path] = set()
    for pattern in patterns:
        here = set(folder.glob(pattern))
        if not here:
            raise FileNotFoundError(f"{folder} has no file that matches {pattern!r}")
        found |= here
    return sorted(found)


@functools.cache
def _root() -> Path:
    """Return the first private folder of: NC10D_CACHE_DIR, the user's cache, /tmp."""
    asked = os.environ.get("NC10D_CACHE_DIR")
    wanted = Path(asked) if asked else _user_cache()
    problem = _make_private(wanted)
    if problem is None:
        return wanted
    if asked:
        warnings.warn(f"NC10D_CACHE_DIR is not used: {problem}", RuntimeWarning, stacklevel=2)
    shared = Path(tempfile.gettempdir()) / f"nc10d-{os.geteuid()}"
    return shared if _make_private(shared) is None else _throw_away()


def _user_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "nc10d"


def _throw_away() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="nc10d-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _make_private(folder: Path) -> str | None:
    """Make `folder` if it is missing; return why it can't be trusted or used, or None."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        return _distrust(folder, folder.lstat(), folder.parent.stat())
    except OSError as error:
        return f"{folder}: {error.strerror}"


def _distrust(folder: Path, found: os.stat_result, parent: os.stat_result) -> str | None:
    """Return why other users could have written to `folder`, or this user can't; else None."""
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder"
    if found.st_uid != os.geteuid():
        return f"{folder} belongs to user {found.st_uid}"
    if found.st_mode & 0o077:
        return f"{folder} is open to others (mode {stat.S_IMODE(found.st_mode):o}, not 700)"
    if parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX:
        return f"{folder.parent} lets others replace the folders in it"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is not writable"
    return None


@contextlib.contextmanager
def exclusive(path: Path, limit: float = LOCK_SECONDS) -> Iterator[bool]:
    """Hold a lock on the file `path` (made if missing) against other processes and threads.

    Blocks until the holder lets go, which the kernel does for it if it dies. Yields False, not
    holding the lock, if that takes longer than `limit` seconds or the file system has no locks:
    the lock saves work, it guards nothing (files are replaced whole). With a limit of 0 it never
    blocks, and raises BlockingIOError if another process or thread holds the lock.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    waiter = _Waiter(fd)
    try:
        yield waiter.acquire(limit)
    finally:
        waiter.close()


def take_for_life(path: Path) -> bool:
    """Take the lock on the file `path` until this process ends; False if it is taken.

    True as well where the file system has no locks. Never blocks.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return False
    except OSError:
        pass
    return True


class _Waiter:
    """Waits for a file lock with a time limit, which flock itself does not have.

    A contended wait runs on its own thread. A thread that outlives its limit closes the file (and
    so gives the lock back) when it gets the lock at last.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._state = threading.Lock()
        self._held = threading.Event()
        self._abandoned = False
        self._waiting = False

    def acquire(self, limit: float) -> bool:
        """Return True once the lock is held, False after `limit` seconds; see `exclusive`."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if limit == 0:
                raise
            self._waiting = True
            threading.Thread(target=self._block, daemon=True, name="nc10d-cache-lock").start()
            return self._held.wait(limit)
        except OSError:
            return False

    def _block(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        with self._state:
            self._waiting = False
            self._held.set()
            if self._abandoned:
                self._release()

    def close(self) -> None:
        """Release the lock, or give up waiting for it."""
        with self._state:
            self._abandoned = True
            if not self._waiting:
                self._release()

    def _release(self) -> None:
        # Unlocked first: a child that was forked meanwhile shares the open file.
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)
