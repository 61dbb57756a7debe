"""Reads in /proc (proc(5)) that the CPU engine cannot do without."""

from __future__ import annotations

import os
from pathlib import Path

from nc10d.errors import UnsupportedPlatform


def read(name: str) -> str:
    """Return the text of /proc/`name`; UnsupportedPlatform if that cannot be read."""
    try:
        return Path("/proc", name).read_text()
    except OSError as error:
        raise _unreadable(error) from error


def namespace(kind: str) -> int:
    """Return the number of this process's namespace for a `kind` ("net"); raises as `read`."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError as error:
        raise _unreadable(error) from error


def _unreadable(error: OSError) -> UnsupportedPlatform:
    return UnsupportedPlatform(f"nc10d needs /proc: {error}; mount it (mount -t proc proc /proc)")
