"""A network with faults: loss, delay, reordering, duplicates and partitions that heal harm nobody.

A rank is lost when its process ends, which is told at once, or when nothing comes from its host for
NC10D_PEER_TIMEOUT seconds.
"""

from __future__ import annotations

import threading
import time

import pytest
from faulty_network import Faults, FaultyNetwork, faulty_network, why_not_faulty
from jobs import Rank, all_say
from namespaces import job

REASON = why_not_faulty()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

CALLS = """
group = join(timeout={timeout})
say("ready")


def calls(number):
    count = (1, 300, 9001)[number % 3]
    x = np.arange(count) + rank
    group.all_reduce(x)
    assert (x == np.arange(count) * size + size * (size - 1) // 2).all()
    y = np.full(count, number * (rank == number % size))
    group.broadcast(y, number % size)
    assert (y == number).all()
    sent = group.isend(y + rank, (rank + 1) % size)
    group.recv(x, (rank - 1) % size)
    sent.wait()
    assert (x == number + (rank - 1) % size).all()


number = 0
try:
    while (words := hear().split()) != ["end"]:
        for _ in range(int(words[0])):
            calls(number)
            number += 1
            time.sleep(float(words[1]))
        say("right")
except dist.DistError as error:
    say(type(error).__name__, error.rank, "-", error.cause)
    hear()
"""
"""Each line "CALLS SECONDS" of the test makes so many rounds of calls, with so long pauses."""
PATIENCE = 250.0
"""Seconds for a line of a rank whose packets are lost."""
FAULTS = [Faults(loss, duplicates=loss, delay=0.005, jitter=0.03) for loss in (0.02, 0.05, 0.1)]


def code(timeout: float = 250.0) -> str:
    return CALLS.format(timeout=timeout)


def tell(ranks: list[Rank], calls: int, pause: float) -> None:
    for rank in ranks:
        rank.tell(f"{calls} {pause}")


def lasts(seconds: float) -> None:
    """Let a fault last for so long."""
    threading.Event().wait(seconds)


def test_results_are_right_at_ten_percent_loss() -> None:
    with faulty_network(2) as net, job(net, code(), [0, 1]) as ranks:
        all_say(ranks, "ready", PATIENCE)
        net.faults = Faults(loss=0.1, duplicates=0.1, delay=0.001, jitter=0.003)
        tell(ranks, 2, 0.0)
        all_say(ranks, "right", PATIENCE)


def faulty_job(seconds: float) -> None:
    """Form a group of four at 10 % loss; let it be busy, and idle, at each kind of faults."""
    with faulty_network(2, FAULTS[-1]) as net, job(net, code(), [0, 0, 1, 1]) as ranks:
        all_say(ranks, "ready", PATIENCE)
        end = time.monotonic() + seconds
        for left in range(len(FAULTS), 0, -1):
            net.faults = FAULTS[-left]
            until = end - (end - time.monotonic()) * (left - 1) / left
            while time.monotonic() < until:
                for calls, pause in ((10, 0.0), (2, 4.0)):
                    tell(ranks, calls, pause)
                    all_say(ranks, "right", PATIENCE)


@pytest.mark.slow
def test_loss_delay_reordering_and_duplicates_change_nothing() -> None:
    faulty_job(40.0)


@pytest.mark.long
@pytest.mark.timeout(4000)
def test_an_hour_of_loss_has_no_false_death() -> None:
    faulty_job(3600.0)


@pytest.mark.slow
@pytest.mark.parametrize("calls", [0, 1000])
def test_a_partition_of_five_seconds_is_lived_through(calls: int) -> None:
    with faulty_network(2) as net, job(net, code(), [0, 0, 1, 1]) as ranks:
        all_say(ranks, "ready", PATIENCE)
        tell(ranks, calls, 0.005)
        lasts(0.5)
        net.cut(1)
        lasts(5.0)
        net.heal()
        all_say(ranks, "right", PATIENCE)
        tell(ranks, 1, 0.0)
        all_say(ranks, "right", PATIENCE)


def cut(net: FaultyNetwork) -> None:
    net.cut(1)


def deafen(net: FaultyNetwork) -> None:
    net.silence(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("calls", [1, 10_000])
@pytest.mark.parametrize("fault", [cut, deafen])
def test_a_partition_that_stays_is_told_on_both_sides(fault: object, calls: int) -> None:
    assert callable(fault)
    with faulty_network(2) as net, job(net, code(), [0, 0, 1, 1], NC10D_PEER_TIMEOUT="3") as ranks:
        all_say(ranks, "ready", PATIENCE)
        tell(ranks, calls, 0.005)
        if calls == 1:
            all_say(ranks, "right", PATIENCE)
        fault(net)
        tell(ranks, 1, 0.0)
        # The calls have a timeout of minutes: it does not end them.
        near, far = {rank.line(PATIENCE) for rank in ranks[:2]}, {rank.line() for rank in ranks[2:]}
    (text,) = near
    assert text in {f"PeerLost {rank} - {why}" for rank in (2, 3) for why in TOLD}, text
    (text,) = far
    assert text in {f"PeerLost {rank} - {SILENT}" for rank in (0, 1)}, text


SILENT = "no answer for 3 s"
TOLD = SILENT, "Connection reset by peer", "its connection was closed"


@pytest.mark.slow
def test_a_killed_rank_is_told_at_once_where_packets_are_lost() -> None:
    variables = {"NC10D_PEER_TIMEOUT": "200"}  # silence tells nothing meanwhile
    with faulty_network(2) as net, job(net, code(), [0, 0, 1, 1], **variables) as ranks:
        all_say(ranks, "ready", PATIENCE)
        net.faults = FAULTS[-1]
        tell(ranks[:3], 1, 0.0)
        ranks[3].process.kill()
        (text,) = {rank.line(PATIENCE) for rank in ranks[:3]}
    assert text in {f"PeerLost 3 - {why}" for why in (*TOLD[1:], "killed by signal 9")}, text
