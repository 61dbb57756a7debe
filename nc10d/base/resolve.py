"""Host names as addresses, within a time that the system's resolver does not know."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from nc10d.base.signal_errors import Thread
from nc10d.base.variables import seconds_of

VARIABLE = "NC10D_DNS_TIMEOUT"
DEFAULT_SECONDS = 5.0
_Found = Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]]


def dns_seconds() -> float:
    """Return for how long a name that is not known is asked for again; ValueError if malformed."""
    return seconds_of(VARIABLE, DEFAULT_SECONDS)


def resolve(host: str, port: int, limit: float = DEFAULT_SECONDS) -> _Found:
    """Return the stream addresses of `host`, in the system's order; blocks for `limit` seconds.

    Called off the main thread. socket.gaierror if the name is not known, or the name servers have
    not answered by then.
    """
    look_up = partial(socket.getaddrinfo, port=port, type=socket.SOCK_STREAM)
    try:
        # As bytes: a str goes through a codec in Python, which raises a copy of an error that a
        # signal's handler raises meanwhile.
        return look_up(host.encode("ascii"), flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        pass
    answers: list[_Found | OSError] = []

    def ask() -> None:
        try:
            answers.append(look_up(host))
        except UnicodeError as error:  # the name is too long
            answers.append(socket.gaierror(socket.EAI_NONAME, str(error)))
        except OSError as error:
            answers.append(error)

    # The system's call has no limit, and no signal ends the call: a thread waits for it.
    asking = Thread(target=ask, name="nc10d-dns", daemon=True)
    asking.start()
    asking.join(min(limit, threading.TIMEOUT_MAX))
    if not answers:
        raise socket.gaierror(socket.EAI_AGAIN, "its name servers do not answer")
    if isinstance(answers[0], OSError):
        raise answers[0]
    return answers[0]
