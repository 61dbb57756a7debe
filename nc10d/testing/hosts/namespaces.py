"""Hosts on one machine: network namespaces, connected by a bridge in a separate namespace.

    with network(2) as net:
        subprocess.run([*net.inside(1), "ping", net.address(0)])

Only root can make them; `why_not` returns the missing condition. A host sends through its only
device, which counts the bytes. The sockets use the congestion control reno: the machine's default
may be BBR, whose pacing makes bursts last for random times.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from nc10d.errors import UnsupportedPlatform

DEVICE = "eth0"
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
_NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET of <sched.h>
_networks = itertools.count()


@dataclass(frozen=True)
class Network:
    """Hosts by number, each with an IPv4 and an IPv6 address on its only device."""

    names: list[str]

    def address(self, host: int, family: int = 4) -> str:
        """Return a host's address; `family` is 4 or 6."""
        return f"10.87.0.{host + 1}" if family == 4 else f"fd87::{host + 1}"

    def inside(self, host: int) -> list[str]:
        """Return the words before a command that make the command run on a host."""
        return ["ip", "netns", "exec", self.names[host]]

    def sent(self, host: int) -> int:
        """Return the number of bytes that a host has sent."""
        (found,) = json.loads(ip("-n", self.names[host], "-s", "-j", "link", "show", DEVICE))
        return int(found["stats64"]["tx"]["bytes"])

    def cut(self, host: int) -> None:
        """Disconnect a host: afterwards it neither sends nor receives."""
        ip("-n", self.names[host], "link", "set", DEVICE, "down")


def ip(*words: str) -> str:
    """Run iproute2's `ip`; return its output. UnsupportedPlatform if it is missing or fails."""
    if shutil.which("ip") is None:
        raise UnsupportedPlatform("network namespaces need ip (iproute2)")
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"network namespaces can't be made here: {done.stderr.strip()}"
        raise UnsupportedPlatform(message)
    return done.stdout


def enter(name: str) -> None:
    """Move this thread, and the threads and processes that it starts later, to the host `name`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), _NETWORK_NAMESPACE):
            code = ctypes.get_errno()
            raise OSError(code, f"setns: {os.strerror(code)}", name)


def why_not() -> str | None:
    """Return the reason why namespaces can't be made here, or None."""
    try:
        with network(1):
            return None
    except UnsupportedPlatform as error:
        return str(error)


@contextlib.contextmanager
def network(hosts: int) -> Iterator[Network]:
    """Make hosts and connect them; UnsupportedPlatform where namespaces can't be made."""
    prefix = f"nc10d-{os.getpid()}-{next(_networks)}"
    switch = f"{prefix}-switch"
    net = Network([f"{prefix}-{host}" for host in range(hosts)])
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for host, name in enumerate(net.names):
            _connect(net, switch, host, name)
        yield net
    finally:
        for name in [*net.names, switch]:
            with contextlib.suppress(UnsupportedPlatform):
                ip("netns", "delete", name)


def _connect(net: Network, switch: str, host: int, name: str) -> None:
    ip("netns", "add", name)
    peer = ["peer", "name", f"port{host}", "netns", switch]
    ip("link", "add", DEVICE, "netns", name, "type", "veth", *peer)
    ip("-n", switch, "link", "set", f"port{host}", "master", "bridge", "up")
    ip("-n", name, "addr", "add", f"{net.address(host)}/24", "dev", DEVICE)
    ip("-n", name, "addr", "add", f"{net.address(host, 6)}/64", "dev", DEVICE, "nodad")
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "link", "set", DEVICE, "up")
    with contextlib.suppress(UnsupportedPlatform):  # /proc/sys may not be writable
        ip("netns", "exec", name, "sh", "-c", f"echo reno > {CONGESTION}")
