"""The user at the other end of a connection within this machine, as the kernel reports it.

For TCP the kernel is asked for the socket at the other end, by addresses and ports: through netlink
(sock_diag(7), linux/inet_diag.h), or, where a sandbox has none, in /proc/net/tcp (proc(5)). A
connection from another machine has no such socket here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from pathlib import Path
from struct import Struct

_CREDENTIALS = Struct("3i")  # SO_PEERCRED: pid, uid, gid
_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
_ANY = 0xFFFFFFFF
_ESTABLISHED = 1
"""The only state in which the user is known: root owns a socket that its process has closed."""
_HEADER = Struct("=IHHII")  # nlmsghdr
_QUERY = Struct("=BBBBI")  # inet_diag_req_v2, before the socket
_PORTS, _SOCKET = Struct("!HH"), Struct("=4s16s16sI8s")  # inet_diag_sockid
_FOUND = Struct("=BBBB48s5I")  # inet_diag_msg
_SECONDS = 1.0

Ends = tuple[socket.AddressFamily, bytes, bytes, int, int]
"""Family; the other end's address and this end's; the other port and this end's."""


def peer_uid(sock: socket.socket) -> int | None:
    """Return the user id of the process that connected to `sock`; None if not known here."""
    if sock.family == socket.AF_UNIX:
        packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(packed)[1])
    try:
        ends = _ends(sock)
    except (OSError, ValueError):
        return None  # the connection has gone
    try:
        return _by_netlink(ends)
    except OSError:
        return _by_proc(ends)


def _ends(sock: socket.socket) -> Ends:
    peer, own = (
        ipaddress.ip_address(end[0].partition("%")[0])
        for end in (sock.getpeername(), sock.getsockname())
    )
    if isinstance(peer, ipaddress.IPv6Address) and isinstance(own, ipaddress.IPv6Address):
        peer, own = peer.ipv4_mapped or peer, own.ipv4_mapped or own
    family = socket.AF_INET if peer.version == 4 else socket.AF_INET6
    return family, peer.packed, own.packed, sock.getpeername()[1], sock.getsockname()[1]


def _by_netlink(ends: Ends) -> int | None:
    family, peer, own, *ports = ends
    wanted = _SOCKET.pack(_PORTS.pack(*ports), peer, own, 0, b"\xff" * 8)
    query = _QUERY.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY) + wanted
    header = _HEADER.pack(_HEADER.size + len(query), _BY_FAMILY, _REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as netlink:
        netlink.settimeout(_SECONDS)
        netlink.send(header + query)
        reply = netlink.recv(4096)
    if _HEADER.unpack_from(reply)[1] != _BY_FAMILY:
        raise OSError("no such socket, or no such service")
    _, state, _, _, found, *rest = _FOUND.unpack_from(reply, _HEADER.size)
    # The kernel has compared addresses, whose form may differ: IPv4 in the form of IPv6.
    return int(rest[3]) if state == _ESTABLISHED and found[:4] == wanted[:4] else None


def _by_proc(ends: Ends) -> int | None:
    _, peer, own, *ports = ends
    mapped = b"" if len(peer) == 16 else b"\0" * 10 + b"\xff" * 2  # a socket for both versions
    for name, prefix in {"tcp6": mapped, "tcp": b""}.items():
        want = [
            f"{_hex(prefix + address)}:{port:04X}"
            for address, port in zip((peer, own), ports, strict=True)
        ]
        with contextlib.suppress(OSError):
            lines = Path("/proc/net", name).read_text().splitlines()[1:]
            for row in map(str.split, lines):
                if [*row[1:3], int(row[3], 16)] == [*want, _ESTABLISHED]:
                    return int(row[7])
    return None


def _hex(address: bytes) -> str:
    """Return an address as /proc prints it: in words of the machine's byte order."""
    words = (address[at : at + 4] for at in range(0, len(address), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
