"""Explain why a store cannot be reached or has gone, and how to correct it. Pure.

Every explanation is the second half of a sentence that has named the store with host and port.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from nc10d.errors import NotANumberError
from nc10d.store import wire as m

_SHOWN = 40
_NAMED_KEYS, _LONGEST_KEY = 8, 200


class Disconnected(OSError):
    """The server closed the connection."""


class NotAStore(OSError):
    """Another program than a store answered."""


class LoopbackDown(OSError):
    """No loopback address of this machine can be reached, whether a server listens or not."""


class Refused(NotAStore):
    """The store serves clients with another token, or without."""


class NoRoom(OSError):
    """The server has as many clients as it admits."""


class NoAnswer(TimeoutError):
    """The server, or another program, accepted the connection and sent nothing."""


OTHER_TOKEN = "what listens there does not know this job's token"
_SAME_TOKEN = (
    "give every process of the job the same token (NC10D_TOKEN_FILE or NC10D_TOKEN), "
    "the one that starts the store, too"
)
_REFUSALS: dict[bytes, tuple[type[OSError], str]] = {
    m.NEEDS_TOKEN: (Refused, "the store there needs the job's token, and this process has none"),
    m.HAS_NO_TOKEN: (Refused, "the store there has no token, and this process has one"),
    m.IS_FULL: (NoRoom, "it has no room for more clients"),
}
_HOST_OR_PORT = "correct host or port (MASTER_ADDR, MASTER_PORT)"
# The first type that matches counts.
_UNREACHED: tuple[tuple[type[OSError], str], ...] = (
    (Refused, f"{{error}}; {_SAME_TOKEN}, or {_HOST_OR_PORT}"),
    (NotAStore, f"{{error}}; {_HOST_OR_PORT}, or end what listens there"),
    (NoRoom, "{error} (Limits.clients, or --max-clients of python -m nc10d.store)"),
    (LoopbackDown, "{error}: the loopback interface of this machine is down (ip link set lo up)"),
    (
        NoAnswer,
        "something accepts connections there and says nothing: the server is frozen or overloaded, "
        f"or it is not a store; look at that process, or {_HOST_OR_PORT}",
    ),
    (
        Disconnected,
        "something there closes every connection ({error}): it is not a store, or one of another "
        "version, or torch's, and this process has a token (NC10D_TOKEN_FILE, NC10D_TOKEN); look "
        f"at that process, or {_HOST_OR_PORT}",
    ),
    (
        ConnectionRefusedError,
        "nobody listens there (connection refused); start the server (rank 0 of the job, the "
        f"launcher, or python -m nc10d.store), or {_HOST_OR_PORT}",
    ),
    (
        socket.gaierror,
        "the host's name is not known here ({error.strerror}); correct it (MASTER_ADDR), or give "
        "an address in numbers; if it will be known later, set NC10D_DNS_TIMEOUT to the seconds "
        "to wait for it",
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
_LOST: tuple[tuple[type[OSError], str], ...] = (
    (NotAStore, "{error}"),
    (
        ConnectionRefusedError,
        "the server has ended: nobody listens there any more (connection refused)",
    ),
    (Disconnected, _CLOSED),
    (ConnectionError, _CLOSED),
)
_NO_LISTENER = {
    errno.EADDRINUSE: "another job or another rank 0 listens there: choose another port, or 0 for "
    "a free one",
    errno.EADDRNOTAVAIL: "it is not an address of this machine: give one that is",
    errno.EACCES: "ports below 1024 are the system's: choose another, or 0 for a free one",
}


def refusal(reason: bytes) -> OSError:
    """Return the error for a server's refusal."""
    kind, text = _REFUSALS.get(reason, (NotAStore, "the store there is of another version"))
    return kind(text)


def explain_unreached(error: OSError) -> str:
    """Explain why no connection could be made."""
    return _explain(error, _UNREACHED)


def explain_lost(error: OSError) -> str:
    """Explain why a connection was lost, or could not be made again."""
    return _explain(error, _LOST + _UNREACHED)


def explain_no_listener(error: OSError) -> str:
    """Explain why a server cannot listen."""
    if isinstance(error, socket.gaierror):
        return f"the name is not known here ({error.strerror}); give one of this machine's"
    number = error.errno or 0
    advice = _NO_LISTENER.get(number)
    # The number's name, too: callers of torch look for EADDRINUSE.
    name = f" ({errno.errorcode[number]})" if number in errno.errorcode else ""
    return f"{error.strerror or error}{name}" + (f"; {advice}" if advice else "")


def _explain(error: OSError, texts: tuple[tuple[type[OSError], str], ...]) -> str:
    for kind, text in texts:
        if isinstance(error, kind):
            return text.format(error=error)
    return f"{error.strerror or error}; {_HOST_OR_PORT}"


def keys_text(keys: Sequence[str]) -> str:
    """Return keys as a part of an error's text, as given to the outermost store."""
    if not keys:
        return ""
    given = [getattr(key, "given", key) for key in keys[:_NAMED_KEYS]]
    shown = [repr(key if len(key) <= _LONGEST_KEY else f"{key[:_LONGEST_KEY]}...") for key in given]
    more = f", and {len(keys) - _NAMED_KEYS} more" if len(keys) > _NAMED_KEYS else ""
    return f", key{'s' if len(keys) > 1 else ''} {', '.join(shown)}{more}"


def not_a_number_error(store: str, key: str, value: bytes) -> NotANumberError:
    """Return the error for a `key` that holds `value` instead of a number."""
    shown = repr(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")
    return NotANumberError(
        f"{store}{keys_text([key])}: it holds {shown}, which is not a decimal number of 64 bits; "
        "nothing was added"
    )
