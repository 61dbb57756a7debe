"""How the kernel decides when to send what goes to another host: its congestion control.

BBR sends by the clock, at a rate it has measured; a collective sends in bursts between pauses, of
which that rate is no measure. Between namespaces of one machine an all_reduce of 4 MiB took three
times as long by BBR as by the others, and the time of one of 1 MiB changed by a factor of two from
one second to the next. So where BBR is a host's default, nc10d's own sockets do without it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from nc10d.errors import RendezvousError

VARIABLE = "NC10D_TCP_CONGESTION"
PACED = "bbr"
UNPACED = ("cubic", "reno")
"""What takes its place: the usual one, and the one that everybody may use on every kernel."""
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def tcp_socket(address: str) -> socket.socket:
    """Return a new socket for an IPv4 or IPv6 address, to connect or to listen.

    How it sends is chosen before: what BBR has begun with its clock goes on so under any other.
    NC10D_TCP_CONGESTION names it; empty, it is the kernel's default. RendezvousError if that
    can't be had.
    """
    wire = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    asked = os.environ.get(VARIABLE)
    if asked and not _set(wire, asked):
        wire.close()
        raise RendezvousError(
            f"{VARIABLE}={asked!r}: the kernel has no such congestion control for this process "
            f"(it allows {_allowed()})"
        )
    if asked is None and control(wire).startswith(PACED):
        for name in UNPACED:
            if _set(wire, name):
                break
    return wire


def control(wire: socket.socket) -> str:
    """Return the name of a TCP socket's congestion control; empty if the kernel does not tell."""
    try:
        name = wire.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    except OSError:
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
        return "it does not tell which"
