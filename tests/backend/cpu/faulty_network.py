"""Hosts whose packets the test forwards itself: it loses, delays, reorders and repeats them.

    with faulty_network(2, Faults(loss=0.1), seed=1) as net, job(net, code, [0, 1]) as ranks:
        net.cut(0)  # neither sends nor receives
        net.heal()

A host is a network namespace whose only device is a TUN device: the kernel gives its packets to
this process, and takes packets from it (Documentation/networking/tuntap.rst). So all traffic stays
in the namespaces and here. The faults of a packet follow from a generator of a seed, and from the
order in which packets come. There is no limit of bandwidth.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nc10d.errors import UnsupportedPlatform
from nc10d.testing.hosts.namespaces import DEVICE, Network, enter, ip

_SET_DEVICE = 0x400454CA  # TUNSETIFF of <linux/if_tun.h>
_BARE_PACKETS = 0x1001  # IFF_TUN | IFF_NO_PI of the same: no header but that of IP
_MOST_BYTES = 1 << 16
_BATCH = 64
_numbers = itertools.count()


@dataclass(frozen=True)
class Faults:
    """The fate of packets: probabilities, and seconds.

    A packet takes `delay` and up to `jitter` more, so that packets closer than that overtake each
    other.
    """

    loss: float = 0.0
    duplicates: float = 0.0
    delay: float = 0.0
    jitter: float = 0.0


class FaultyNetwork(Network):
    """Hosts by number; `faults` holds for packets that come from now on."""

    def __init__(self, names: list[str], faults: Faults) -> None:
        super().__init__(names)
        self.faults = faults
        self.silenced: frozenset[tuple[int, int]] = frozenset()
        """The (sender, receiver) pairs whose packets are lost."""

    def silence(self, sender: int, receiver: int) -> None:
        """Lose all that one host sends to another, packets under way included."""
        self.silenced = self.silenced | {(sender, receiver)}

    def cut(self, host: int) -> None:
        """Disconnect a host: it can neither send nor receive."""
        for other in range(len(self.names)):
            self.silence(host, other)
            self.silence(other, host)

    def heal(self) -> None:
        """Let packets pass between all hosts again."""
        self.silenced = frozenset()


class _Forwarder:
    """Reads packets from the devices of hosts, and writes each to the device of its receiver."""

    def __init__(self, net: FaultyNetwork, devices: list[int], seed: int) -> None:
        self._net, self._devices, self._random = net, devices, random.Random(seed)
        self._under_way: list[tuple[float, int, int, int, bytes]] = []
        self._count = 0
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="forwarder")
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)

    def _run(self) -> None:
        hosts = {fd: host for host, fd in enumerate(self._devices)}
        poller = select.poll()
        for fd in (*hosts, self._stop):
            poller.register(fd, select.POLLIN)
        while True:
            left = self._under_way[0][0] - time.monotonic() if self._under_way else None
            ready = [fd for fd, _ in poller.poll(None if left is None else max(0.0, 1000 * left))]
            if self._stop in ready:
                return
            for fd in ready:
                self._take(hosts[fd], fd)
            self._deliver()

    def _take(self, sender: int, device: int) -> None:
        for _ in range(_BATCH):
            try:
                packet = os.read(device, _MOST_BYTES)
            except BlockingIOError:
                return
            receiver = packet[19] - 1  # the last byte of an IPv4 destination
            if packet[0] >> 4 == 4 and 0 <= receiver < len(self._devices):
                self._send(sender, receiver, packet)

    def _send(self, sender: int, receiver: int, packet: bytes) -> None:
        faults, chance = self._net.faults, self._random.random
        for _ in range(1 + (chance() < faults.duplicates)):
            if chance() >= faults.loss:
                due = time.monotonic() + faults.delay + faults.jitter * chance()
                self._count += 1
                heapq.heappush(self._under_way, (due, self._count, sender, receiver, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, sender, receiver, packet = heapq.heappop(self._under_way)
            if (sender, receiver) not in self._net.silenced:
                with contextlib.suppress(BlockingIOError):  # a full queue loses packets, too
                    os.write(self._devices[receiver], packet)


@contextlib.contextmanager
def faulty_network(hosts: int, faults: Faults = Faults(), seed: int = 0) -> Iterator[FaultyNetwork]:
    """Make hosts and forward their packets; UnsupportedPlatform where that is not possible."""
    prefix = f"nc10d-{os.getpid()}-faulty{next(_numbers)}"
    net = FaultyNetwork([f"{prefix}-{host}" for host in range(hosts)], faults)
    with contextlib.ExitStack() as stack:
        devices = [_made(stack, net, host) for host in range(hosts)]
        forwarder = _Forwarder(net, devices, seed)
        stack.callback(forwarder.close)
        yield net


def why_not_faulty() -> str | None:
    """Return the reason why such hosts can't be made here, or None."""
    try:
        with faulty_network(1):
            return None
    except UnsupportedPlatform as error:
        return str(error)


def _made(stack: contextlib.ExitStack, net: FaultyNetwork, host: int) -> int:
    """Make a host; return the descriptor of its device."""
    name = net.names[host]
    ip("netns", "add", name)
    stack.callback(ip, "netns", "delete", name)
    with ThreadPoolExecutor(1) as pool:  # a thread of its own: it stays in that namespace
        device = pool.submit(_device, name).result()
    stack.callback(os.close, device)
    ip("-n", name, "addr", "add", f"{net.address(host)}/24", "dev", DEVICE)
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "link", "set", DEVICE, "up")
    return device


def _device(namespace: str) -> int:
    enter(namespace)
    device = -1
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH22x", DEVICE.encode(), _BARE_PACKETS))
    except OSError as error:
        if device >= 0:
            os.close(device)
        raise UnsupportedPlatform(f"hosts whose packets a test forwards: {error}") from error
    return device
