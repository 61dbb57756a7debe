"""Connect a client to a store's server: retries until a deadline, Unix socket on the same host."""

from __future__ import annotations

import errno
import math
import socket
import time
from functools import partial
from ipaddress import ip_address

from nc10d.base.deadline import Deadline, monotonic
from nc10d.base.resolve import DEFAULT_SECONDS, dns_seconds, resolve
from nc10d.base.run_to_end import import_to_end
from nc10d.base.wait_report import WaitReport
from nc10d.store.connection import StoreConnection
from nc10d.store.store_errors import LoopbackDown, NoAnswer, NotAStore, explain_unreached

_UNIX_GRACE = 0.25
_ATTEMPT_SECONDS = 1.0
"""The least time in which a server may answer, if the deadline is not sooner."""
_RETRY_FIRST, _RETRY_LONGEST = 0.005, 0.25


def connect(
    host: str, port: int, deadline: Deadline, token: bytes | None = None
) -> StoreConnection:
    """Connect to a server that may not be up yet; raise the last OSError at the deadline.

    A last attempt that the deadline cut short says too little: the error before is raised.
    A host name that is not known is retried for 5 seconds, or NC10D_DNS_TIMEOUT: the names of some
    clusters appear with their hosts. NotAStore is raised at once: another program has the port, or
    the tokens differ; so is LoopbackDown, which no server can mend. With a `token`, the server must
    prove that it knows the same token.
    """
    pause, begun = _RETRY_FIRST, monotonic()
    waiter = f"a client of store {host}:{port}"
    report = WaitReport(waiter, deadline, waiter)
    cause: OSError | None = None
    try:
        while True:
            # An attempt ends when a line is due; the next may last longer.
            attempt = monotonic() + max(_ATTEMPT_SECONDS, report.next_seconds())
            try:
                return connect_once(host, port, min(deadline.at, attempt), token)
            except (NotAStore, LoopbackDown):
                raise
            except OSError as error:
                cut_short = attempt > deadline.at and isinstance(error, TimeoutError)
                cause = cause if cause and cut_short else error
            report.look(partial(explain_unreached, cause))
            until = deadline.at
            if isinstance(cause, socket.gaierror):
                until = min(until, begun + dns_seconds())
            left = until - monotonic()
            # Nothing announces that a server has come up: try again.
            time.sleep(max(0.0, min(pause, left)))
            if left <= pause:
                raise cause
            pause = min(pause * 2, _RETRY_LONGEST)
    finally:
        cause = None  # the error's traceback has this frame: a cycle that keeps callers' locals


def connect_once(
    host: str, port: int, deadline: float, token: bytes | None = None
) -> StoreConnection:
    """Connect to a server that is up; OSError (TimeoutError at the deadline) if it is not.

    If the server is on this host, return a connection over its Unix socket, which is faster.
    """
    sock = _open_socket(host, port, _seconds_left(deadline))
    connection = _shake_hands(sock, deadline, token)
    try:
        name = connection.unix_name()
    except BaseException:
        connection.close()
        raise
    if not name:
        return connection
    # The Unix socket fails if the server is in another network namespace, or has no descriptor
    # left for a second connection. Then the TCP connection is kept.
    try:
        faster = _connect_unix(name, min(deadline, monotonic() + _UNIX_GRACE), token)
    except OSError:
        return connection
    connection.close()
    return faster


def _open_socket(host: str, port: int, limit: float | None) -> socket.socket:
    """Connect to the first address of `host` that answers; OSError of the first if none does.

    LoopbackDown if all are loopback addresses, and the kernel has no way to one of them.
    """
    longest = max(dns_seconds(), DEFAULT_SECONDS)  # for a single question
    first: OSError | None = None
    found = resolve(host, port, longest if limit is None else min(limit, longest))
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(limit)
            sock.connect(address)
        except OSError as error:
            sock.close()
            first = first or error
            if error.errno == errno.ENETUNREACH and all(
                ip_address(x[4][0]).is_loopback for x in found
            ):
                raise LoopbackDown(error.strerror) from error
        else:
            return sock
    assert first is not None, "a host that is known has an address"
    raise first


def _connect_unix(name: bytes, deadline: float, token: bytes | None) -> StoreConnection:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(_seconds_left(deadline))
        sock.connect(name)
    except BaseException:
        sock.close()
        raise
    return _shake_hands(sock, deadline, token)


def _shake_hands(sock: socket.socket, deadline: float, token: bytes | None) -> StoreConnection:
    try:
        if token is None:
            return StoreConnection(sock, deadline)
        sealed = import_to_end("nc10d.store.sealed_connection")
        found: StoreConnection = sealed.SealedConnection(sock, deadline, token)
        return found
    except TimeoutError as error:
        sock.close()
        raise NoAnswer from error
    except BaseException:
        sock.close()
        raise


def _seconds_left(deadline: float) -> float | None:
    """Return the seconds left, as a socket's timeout (None: for ever); TimeoutError at 0."""
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError("the time was over before the connection was made")
    return None if math.isinf(left) else left
