"""The folder of compiled code on disk, and the lock that lets a single process compile for all.

Contract: `code_folder` returns a folder to which only this user and root can write, named by a hash
over the package's sources and all versions and settings that shape the code. Its files were written
for exactly these. They are pickles: another user that can write there, or swap a folder on the way
there, could run code as this user. Standard library only.
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
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nc10d.base.deadline import Deadline

PACKAGE = Path(__file__).resolve().parent.parent
# The sources that can change a kernel's machine code, and all other machine code (which may contain
# kernels' helpers): a change to the engine leaves the kernels compiled.
KERNEL_SOURCES = ("arrays/dtypes.py", "ops/*reductions.py", "kernels/**/*.py")
CODEC_SOURCES = ("codec/tags.py", "codec/messages.py", "codec/opcodes.py")
SOURCES = (*KERNEL_SOURCES, *CODEC_SOURCES, "backend/cpu/native/*.py")
LOCK_SECONDS = 120.0
_RETRY_SECONDS = 0.01


def code_folder(sources: tuple[str, ...], parts: tuple[object, ...]) -> Path:
    """Return the folder for these sources (patterns) and `parts` (versions, CPU); made if missing.

    The folder lies in NC10D_CACHE_DIR, else in nc10d in the user's cache folder. If other users
    could write there, or if that place is read-only and lacks the folder, the folder lies in this
    user's folder in /tmp, or else in one for this process. Where nothing can be written the
    returned folder is missing.
    """
    name = _digest(sources, parts)
    for root in roots():
        with contextlib.suppress(OSError):
            (root / name).mkdir(mode=0o700, exist_ok=True)
        if distrust(root / name) is None:
            return root / name
    return _throw_away() / name


def _digest(sources: tuple[str, ...], parts: tuple[object, ...]) -> str:
    """Hash the package's `sources` by contents, and `parts`."""
    total = hashlib.sha256(repr(parts).encode())
    for path in matching(PACKAGE, sources):
        total.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return total.hexdigest()[:20]


def matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the matching files, sorted; FileNotFoundError if a pattern matches none."""
    # A digest that silently leaves a source out would accept code compiled from another version.
    found: set[Path] = set()
    for pattern in patterns:
        here = set(folder.glob(pattern))
        if not here:
            raise FileNotFoundError(f"{folder} has no file that matches {pattern!r}")
        found |= here
    return sorted(found)


@functools.cache
def roots() -> tuple[Path, ...]:
    """Return the trusted ones of: NC10D_CACHE_DIR or the user's cache; this user's folder in /tmp.

    A folder may be read-only, as in a container's image: the code in it is used.
    """
    asked = os.environ.get("NC10D_CACHE_DIR")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    wanted = [Path(asked) if asked else Path(home) / "nc10d"]
    with contextlib.suppress(FileNotFoundError):  # no folder for temporary files
        wanted.append(Path(tempfile.gettempdir()) / f"nc10d-{os.geteuid()}")
    made = [make_folder(folder) for folder in wanted]
    # Resolved once: the path that is looked at is the path that is used, without links.
    real = [folder.resolve() for folder in wanted]
    problems = [why or distrust(folder) for why, folder in zip(made, real, strict=True)]
    if asked and problems[0]:
        warnings.warn(f"NC10D_CACHE_DIR is not used: {problems[0]}", RuntimeWarning, stacklevel=2)
    return tuple(folder for folder, why in zip(real, problems, strict=True) if why is None)


@functools.cache
def _throw_away() -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="nc10d-"))
    except OSError:
        return Path("/nonexistent")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def make_folder(folder: Path) -> str | None:
    """Make `folder` and its parents if they are missing; return why that is impossible, or None."""
    try:
        for path in [*reversed(folder.parents), folder]:
            if not path.exists():
                path.mkdir(mode=0o700 if path == folder else 0o755, exist_ok=True)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return None


def distrust(folder: Path) -> str | None:
    """Return why another user could write to `folder` or swap it, or None; a link is refused.

    `folder` is absolute and resolved. The parts are checked from / on, so that nobody else can swap
    a part after its check.
    """
    try:
        path = [*reversed(folder.parents), folder]
        return weakness([(str(part), part.lstat()) for part in path], os.geteuid())
    except OSError as error:
        return f"{folder}: {error.strerror}"


def weakness(path: Sequence[tuple[str, os.stat_result]], user: int) -> str | None:
    """Return the first part of a path by which others could redirect the path, or None."""
    # `path` has the parts from / on. Each must belong to `user` or to root (the owner of /, which
    # has another number in a user namespace). Only those may write to a part, but for sticky parts
    # above the last, such as /tmp. Nobody else can swap a part whose parents are like that.
    trusted = {user, 0, path[0][1].st_uid}
    for name, found in path:
        if not stat.S_ISDIR(found.st_mode):
            return f"{name} is not a folder"
        if found.st_uid not in trusted:
            return f"{name} belongs to user {found.st_uid}"
        sticky = found.st_mode & stat.S_ISVTX and name != path[-1][0]
        if found.st_mode & 0o022 and not sticky:
            return f"{name} lets others write (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def replace(path: Path, data: bytes) -> None:
    """Replace the file `path` by `data`, atomically for readers."""
    fd, name = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@contextlib.contextmanager
def exclusive(path: Path, limit: float = LOCK_SECONDS) -> Iterator[bool]:
    """Hold a lock on the file `path` (made if missing) against other processes and threads.

    Blocks until the lock is free; the kernel frees the lock of a dead holder. Yields False, without
    the lock, if that takes longer than `limit` seconds or the file system has no locks: the lock
    saves work and guards nothing (files are replaced whole). With a limit of 0 the call never
    blocks, and raises BlockingIOError if another process or thread holds the lock.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _locked(fd, limit)
    finally:
        # Unlocked first: a child that was forked meanwhile shares the open file.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def take_for_life(path: Path) -> bool:
    """Take the lock on `path` until this process ends; False if it is taken. Never blocks."""
    # True as well where the file system has no locks.
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return False
    except OSError:
        pass
    return True


def _locked(fd: int, limit: float) -> bool:
    """Return True once the lock is held, False after `limit` seconds; see `exclusive`."""
    deadline = Deadline.after(limit)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if limit == 0:
                raise
        except OSError:
            return False
        if deadline.expired():
            return False
        time.sleep(_RETRY_SECONDS)  # flock has no limit, and nothing announces its end
