"""TCP congestion control of the sockets between hosts: not BBR, unless the user asks for it.

BBR paces data by a rate that it has measured. A collective sends in bursts between pauses, which
such a rate does not describe: collectives become slower, and their times vary. Where BBR is a
host's default, nc10d's own sockets use another algorithm.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from nc10d.errors import RendezvousError

VARIABLE = "NC10D_TCP_CONGESTION"
PACED = "bbr"
UNPACED = ("cubic", "reno")
"""The replacements, in order: the usual default, and the algorithm that every kernel has."""
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def tcp_socket(address: str) -> socket.socket:
    """Return a new socket for an IPv4 or IPv6 address, to connect or to listen.

    NC10D_TCP_CONGESTION names the congestion control; if it is empty, the kernel's default is
    kept. RendezvousError if the kernel does not allow it.
    """
    # Set before the socket connects: a socket that has begun to pace goes on pacing afterwards.
    wire = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    requested = os.environ.get(VARIABLE)
    if requested and not _set(wire, requested):
        wire.close()
        raise RendezvousError(
            f"{VARIABLE}={requested!r}: the kernel has no such congestion control for this process "
            f"(it allows {_allowed()})"
        )
    # An explicit value is respected, even BBR; only an unasked default is replaced.
    if requested is None and control(wire).startswith(PACED):
        # An unprivileged process may set only algorithms that the kernel allows it.
        for name in UNPACED:
            if _set(wire, name):
                break
    return wire


def control(wire: socket.socket) -> str:
    """Return the name of a TCP socket's congestion control; empty if it is unknown."""
    try:
        name = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    except OSError:  # a kernel without the option
        return ""
    return name.partition(b"\0")[0].decode()


def _set(wire: socket.socket, name: str) -> bool:
    try:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError:
        return False
    return True


def _allowed() -> str:
    try:
        return ", ".join(_ALLOWED.read_text().split())
    except OSError:
        return "an unknown list"
