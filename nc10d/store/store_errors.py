"""Why a store cannot be reached or has gone, in words: what was seen, and what to do. Pure.

Every reason is the second half of a sentence that has named the store, host and port included.
"""

from __future__ import annotations

import errno
import socket

from nc10d.errors import NotANumberError

_SHOWN = 40


class Disconnected(OSError):
    """The server closed the connection."""


class NotAStore(OSError):
    """What listens there answered, but not as a store does."""


class NoAnswer(TimeoutError):
    """What listens there accepted the connection, and said nothing."""


_HOST_OR_PORT = "correct host or port (MASTER_ADDR, MASTER_PORT)"
# The first line that fits counts.
_UNREACHED: tuple[tuple[type[OSError], str], ...] = (
    (NotAStore, f"{{error}}; {_HOST_OR_PORT}, or end what listens there"),
    (
        NoAnswer,
        "something accepts connections there and says nothing: the server is frozen or overloaded, "
        f"or it is not a store; look at that process, or {_HOST_OR_PORT}",
    ),
    (
        Disconnected,
        "something there closes every connection ({error}): it is not a store, or one that has "
        "another token or none (NC10D_TOKEN_FILE, NC10D_TOKEN), is of another version or has no "
        f"room for more clients; look at that process, or {_HOST_OR_PORT}",
    ),
    (
        ConnectionRefusedError,
        "nobody listens there (connection refused); start the server (rank 0 of the job, the "
        f"launcher, or python -m nc10d.store), or {_HOST_OR_PORT}",
    ),
    (
        socket.gaierror,
        "the host's name is not known here ({error.strerror}); correct it (MASTER_ADDR), or give "
        "an address in numbers",
    ),
    (
        TimeoutError,
        "the host does not answer: it is down, another one, or behind a firewall; "
        f"{_HOST_OR_PORT}, or let the port through",
    ),
)
_CLOSED = (
    "the server closed the connection: it has ended, or a request was beyond its bounds on keys "
    "and values"
)
_GONE: tuple[tuple[type[OSError], str], ...] = (
    (NotAStore, "{error}"),
    (
        ConnectionRefusedError,
        "the server has ended: nobody listens there any more (connection refused)",
    ),
    (Disconnected, _CLOSED),
    (ConnectionError, _CLOSED),
)
_UNHEARD = {
    errno.EADDRINUSE: "another job or another rank 0 listens there: choose another port, or 0 for "
    "a free one",
    errno.EADDRNOTAVAIL: "it is not an address of this machine: give one that is",
    errno.EACCES: "ports below 1024 are the system's: choose another, or 0 for a free one",
}


def why_unreached(error: OSError) -> str:
    """Say why there was no connection to begin with."""
    return _told(error, _UNREACHED)


def why_gone(error: OSError) -> str:
    """Say why a connection that there was is of no use any more, or is not to be had again."""
    return _told(error, _GONE + _UNREACHED)


def why_unheard(error: OSError) -> str:
    """Say why a server cannot listen."""
    if isinstance(error, socket.gaierror):
        return f"the name is not known here ({error.strerror}); give one of this machine's"
    told = _UNHEARD.get(error.errno or 0)
    return f"{error.strerror or error}" + (f"; {told}" if told else "")


def _told(error: OSError, words: tuple[tuple[type[OSError], str], ...]) -> str:
    for kind, told in words:
        if isinstance(error, kind):
            return told.format(error=error)
    return f"{error.strerror or error}; {_HOST_OR_PORT}"


def not_a_number(store: str, key: str, value: bytes) -> NotANumberError:
    """Return what to raise where a number was to be under `key`, and `value` is."""
    shown = repr(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")
    return NotANumberError(
        f"{store}, key {key!r}: it holds {shown}, which is not a decimal number of 64 bits; "
        "nothing was added"
    )
