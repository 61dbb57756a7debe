"""Ports of this machine: one that is free, and one that is served no more."""

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
            # A server closes its listener at its end; a connection in its queue is reset.
            connection, reset = socket.create_connection((HOST, port), 5), ConnectionResetError
            with connection, contextlib.suppress(reset):
                connection.recv(1)
        except OSError:
            return
    raise AssertionError(f"{port} is still served")
