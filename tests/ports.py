"""Ports of this machine: a free one, and a wait until a server has given one up."""

from __future__ import annotations

import contextlib
import socket
import time

HOST = "127.0.0.1"


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_refused(port: int) -> None:
    """Return once no server listens on `port`; fail after 30 s."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            connection = socket.create_connection((HOST, port), 5)
        except ConnectionRefusedError:
            return
        # A server closes its listener at its end, and a connection in its queue is reset.
        with connection, contextlib.suppress(ConnectionResetError, TimeoutError):
            connection.recv(1)
    raise AssertionError(f"{port} is still served")
