"""Sockets between hosts: this rank's address there, and congestion control.

NC10D_SOCKET_ADDRESS gives the address itself. NC10D_SOCKET_IFNAME names an interface, whose address
is taken. The default is the address from which this host reaches the job's store.

Congestion control is not BBR, unless the user asks for BBR, which paces data by a measured rate. A
collective sends in bursts between pauses, which such a rate does not describe:
collectives become slower, and their times vary. Where BBR is a host's default, nc10d's own sockets
use another algorithm.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from nc10d.base.resolve import DEFAULT_SECONDS, dns_seconds, resolve
from nc10d.errors import RendezvousError
from nc10d.store.base import Store

_GET_ADDRESS = 0x8915  # linux/sockios.h: SIOCGIFADDR
_GLOBAL_SCOPE = "00"  # net/if_inet6: an address that is valid beyond the link

VARIABLE = "NC10D_TCP_CONGESTION"
PACED = "bbr"
UNPACED = ("cubic", "reno")
"""The replacements, in order: the usual default, and the algorithm that every kernel has."""
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def own_address(store: Store) -> str:
    """Return the address, IPv4 or IPv6, to listen on; RendezvousError if there is none."""
    explicit = os.environ.get("NC10D_SOCKET_ADDRESS")
    if explicit:
        return explicit
    name = os.environ.get("NC10D_SOCKET_IFNAME")
    return of_interface(name) if name else _towards(_server(store))


def of_interface(name: str) -> str:
    """Return an interface's address, IPv4 if there is one; RendezvousError if there is none."""
    found = _ipv4(name) or _ipv6(name)
    if found is None:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise RendezvousError(f"interface {name!r} has no address here (there are {names})")
    return found


def _ipv4(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            raw = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    # struct ifreq: 16 bytes of name, then sockaddr_in with the address behind family and port.
    return socket.inet_ntoa(raw[20:24])


def _ipv6(name: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        digits, _, _, scope, _, interface = line.split()
        if interface == name and scope == _GLOBAL_SCOPE:
            return str(ipaddress.IPv6Address(int(digits, 16)))
    return None


def _server(store: Store) -> tuple[str, int]:
    # Prefix stores and other wrappers have no address of their own.
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    # A file or hash store has no server: all ranks are on this machine.
    return (str(host), int(port)) if host and port else ("127.0.0.1", 1)


def _towards(server: tuple[str, int]) -> str:
    """Return the local address of the route to a server."""
    try:
        # Connecting a datagram socket sends nothing; the kernel only chooses the route.
        limit = max(dns_seconds(), DEFAULT_SECONDS)  # as the store's client, which knows the name
        family, _, _, _, address = resolve(*server, limit)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousError(f"no way to the store at {server[0]}: {error}") from error


def tcp_socket(address: str) -> socket.socket:
    """Return a new socket for an IPv4 or IPv6 address, to connect or to listen."""
    # NC10D_TCP_CONGESTION names the congestion control; if it is empty, the kernel's default is
    # kept. RendezvousError if the kernel does not allow it.
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
        # An unprivileged process may set only algorithms that the kernel allows.
        for name in UNPACED:
            if _set(wire, name):
                break
    return wire


def control(wire: socket.socket) -> str:
    """Return the name of a TCP socket's congestion control; empty if unknown."""
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
