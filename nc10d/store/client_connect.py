"""Connecting a client to a store's server: retries until a deadline, Unix socket on one host."""

from __future__ import annotations

import contextlib
import math
import socket
import time

from nc10d.store.connection import StoreConnection
from nc10d.store.store_errors import NoAnswer, NotAStore

_NEAR_GRACE = 0.25
_RETRY_FIRST, _RETRY_LONGEST = 0.005, 0.25


def connect(host: str, port: int, deadline: float, token: bytes | None = None) -> StoreConnection:
    """Connect to a server that may not be up yet; the last OSError once the deadline has come.

    A name that does not resolve yet counts as not up yet: cluster names appear with their hosts.
    Foreign is raised at once: who listens there does so instead of a store. With a `token` the
    server must know it too.
    """
    pause = _RETRY_FIRST
    while True:
        try:
            return connect_once(host, port, deadline, token)
        except NotAStore:
            raise
        except OSError:
            left = deadline - time.monotonic()
            # Nobody tells us when a server that is not there yet comes up: ask again.
            time.sleep(max(0.0, min(pause, left)))
            if left <= pause:
                raise
        pause = min(pause * 2, _RETRY_LONGEST)


def connect_once(
    host: str, port: int, deadline: float, token: bytes | None = None
) -> StoreConnection:
    """Connect to a server that is up; OSError (TimeoutError at the deadline) if it is not.

    On the server's own host the connection moves to its Unix socket, which is faster.
    """
    link = _link(_dialled(host, port, _left(deadline)), deadline, token)
    try:
        name = link.near_name()
    except BaseException:
        link.close()
        raise
    if not name:
        return link
    # Not to be found from here means another network namespace, and nothing is lost; no answer
    # soon, that the server has no descriptor for a second connection.
    with contextlib.suppress(OSError):
        near = _connect_near(name, min(deadline, time.monotonic() + _NEAR_GRACE), token)
        link.close()
        return near
    return link


def _dialled(host: str, port: int, limit: float | None) -> socket.socket:
    try:
        return socket.create_connection((host, port), limit)
    except UnicodeError as error:  # longer than any name can be
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error


def _connect_near(name: bytes, deadline: float, token: bytes | None) -> StoreConnection:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(_left(deadline))
        sock.connect(name)
    except BaseException:
        sock.close()
        raise
    return _link(sock, deadline, token)


def _link(sock: socket.socket, deadline: float, token: bytes | None) -> StoreConnection:
    try:
        if token is None:
            return StoreConnection(sock, deadline)
        from nc10d.store.sealed_connection import SealedConnection

        return SealedConnection(sock, deadline, token)
    except TimeoutError as error:
        sock.close()
        raise NoAnswer from error
    except BaseException:
        sock.close()
        raise


def _left(deadline: float) -> float | None:
    """Return the seconds left, as sockets take them; TimeoutError if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time was over before the connection was made")
    return None if math.isinf(left) else left
