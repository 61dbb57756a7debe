"""Hosts that are apart: bytes go over the wire, and nothing else holds a group together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clocks import soon
from jobs import all_say
from namespaces import job

from nc10d.testing.hosts.namespaces import Network, network, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network(3) as made:
        yield made


REDUCE = """
group = join()
x = np.full({count}, rank + 1.0, np.float32)
group.barrier()
say("ready")
hear()
group.all_reduce(x)
assert (x == size * (size + 1) / 2).all()
say("right")
hear()
"""


@pytest.mark.parametrize(
    ("hosts", "family"),
    [
        ([0, 1], 4),
        ([0, 0, 0, 1, 1, 1], 4),
        ([0, 1, 2], 6),
        ([0, 0, 1, 2], 4),
        ([0, 0, 1, 2], 6),
        pytest.param([0, 1], 6, marks=pytest.mark.long),
        pytest.param([0, 0, 0, 1, 1, 1], 6, marks=pytest.mark.long),
        pytest.param([0, 1, 2], 4, marks=pytest.mark.long),
    ],
)
def test_the_bytes_of_an_all_reduce_go_over_the_wire(
    net: Network, hosts: list[int], family: int
) -> None:
    count = 1 << 20
    # Each host sends its part of every other host's piece, and its own piece to every other host.
    others = len(set(hosts)) - 1
    needed = 2 * others * 4 * count // len(set(hosts))

    def most() -> int:
        with job(net, REDUCE.format(count=count), hosts, family) as ranks:
            all_say(ranks, "ready")
            before = [net.sent(host) for host in set(hosts)]
            for rank in ranks:
                rank.tell("go")
            all_say(ranks, "right")
            sent = [net.sent(host) - old for host, old in zip(set(hosts), before, strict=True)]
        assert min(sent) >= needed
        return max(sent)

    # On a busy machine TCP sends some again: an attempt of a few must keep the upper bound.
    assert soon(1.1 * needed, most)


def test_no_rank_listens_once_the_group_has_formed(net: Network) -> None:
    code = """
group = join()
tables = [open(f"/proc/net/{name}").read().splitlines()[1:] for name in ("tcp", "tcp6")]
listening = {int(line.split()[1].rpartition(":")[2], 16)
             for table in tables for line in table if line.split()[3] == "0A"}
say(*sorted(listening - {29500}), "is all")
hear()
"""
    with job(net, code, [0, 1, 2]) as ranks:
        all_say(ranks, "is all")


def test_an_interface_can_be_named(net: Network) -> None:
    with job(net, REDUCE.format(count=8), [0, 1], NC10D_SOCKET_IFNAME="eth0") as ranks:
        all_say(ranks, "ready")


def test_an_explicit_address_counts_however_the_store_is_reached(net: Network) -> None:
    code = """
os.environ["NC10D_SOCKET_ADDRESS"] = f"fd87::{rank + 1}"
group = join()
x = np.full(8, rank + 1.0)
group.all_reduce(x)
assert (x == 3.0).all()
rows = [line.split() for line in open("/proc/net/tcp").read().splitlines()[1:]]
rows = [row for row in rows if row[3] == "01"]  # established: earlier jobs' ends linger
ports = [{int(place.rpartition(":")[2], 16) for place in row[1:3]} for row in rows]
say("by IPv6 only" if all(29500 in pair for pair in ports) else rows)
hear()
"""
    with job(net, code, [0, 1]) as ranks:
        all_say(ranks, "by IPv6 only")


def test_an_absent_interface_is_an_error_that_lists_the_present_interfaces(net: Network) -> None:
    code = """
try:
    join(timeout=60.0)
except dist.DistError as error:
    say(error)
hear()
"""
    with job(net, code, [0, 1], NC10D_SOCKET_IFNAME="ib7") as ranks:
        assert all("'ib7' has no address here (there are" in rank.line() for rank in ranks)


@pytest.mark.slow
def test_a_vanished_host_is_found_out_by_its_silence() -> None:
    code = """
group = join()
x = np.ones(1 << 18)
group.all_reduce(x)
say("ready")
try:
    while True:
        group.all_reduce(x)
except dist.DistError as error:
    say(type(error).__name__, error.rank)
hear()
"""
    with network(3) as net, job(net, code, [0, 1, 2], NC10D_PEER_TIMEOUT="3") as ranks:
        all_say(ranks, "ready")
        net.cut(2)
        # And not after the operation's 30 seconds: that would be a CollectiveTimeout.
        assert [rank.line() for rank in ranks[:2]] == ["PeerLost 2"] * 2
