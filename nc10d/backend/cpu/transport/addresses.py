"""The address at which ranks of other hosts reach this rank.

NC10D_SOCKET_ADDRESS gives the address itself. NC10D_SOCKET_IFNAME names an interface, whose address
is taken. By default it is the address from which this host reaches the job's store.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from nc10d.errors import RendezvousError

if TYPE_CHECKING:
    from nc10d.store.base import Store

_GET_ADDRESS = 0x8915  # linux/sockios.h: SIOCGIFADDR
_GLOBAL_SCOPE = "00"  # net/if_inet6: an address that is valid beyond its link


def own_address(store: Store) -> str:
    """Return the address, IPv4 or IPv6, to listen on; RendezvousError if there is none."""
    explicit = os.environ.get("NC10D_SOCKET_ADDRESS")
    if explicit:
        return explicit
    name = os.environ.get("NC10D_SOCKET_IFNAME")
    return of_interface(name) if name else _towards(_server(store))


def of_interface(name: str) -> str:
    """Return an interface's address, IPv4 if it has any; RendezvousError if it has none."""
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
    # A file or hash store has no server: all of its ranks are on this machine.
    return (str(host), int(port)) if host and port else ("127.0.0.1", 1)


def _towards(server: tuple[str, int]) -> str:
    """Return the local address of the route to a server."""
    try:
        # Connecting a datagram socket sends nothing; the kernel only chooses the route.
        family, kind, _, _, address = socket.getaddrinfo(*server, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RendezvousError(f"no way to the store at {server[0]}: {error}") from error
