"""The ranks of a host find each other: alone, among strangers, and when a rank fails."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import hmac
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from clocks import soon, until

from nc10d.backend.cpu.bootstrap import heartbeats, host_peers
from nc10d.backend.cpu.bootstrap.heartbeats import compiling
from nc10d.backend.cpu.bootstrap.host_peers import map_peers
from nc10d.backend.cpu.bootstrap.rank_info import RankInfo, host_id, version
from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.memory.arena import Arena
from nc10d.backend.cpu.memory.host_peer import HostPeer, mask, process
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.base.deadline import Deadline, monotonic
from nc10d.base.wait_report import WaitReport
from nc10d.errors import RendezvousError, UnsupportedPlatform
from nc10d.store import HashStore

ARENA_BYTES = 1 << 20


def descriptors() -> int:
    gc.collect()  # errors keep the frames, and with them the mappings, of the failed rank
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() <= before


def part(peers: list[HostPeer]) -> None:
    for peer in peers:
        peer.close()


def join(
    store: HashStore, rank: int, size: int, timeout: float = 10.0, by: Deadline | None = None
) -> list[int]:
    """Join, write the rank into its own arena, and return the numbers in all peers' arenas."""
    arena = Arena(ARENA_BYTES)
    arena.mapping.words(arena.allocate(64), 1)[0] = 100 + rank
    try:
        peers, _ = map_peers(store, rank, size, arena, by or Deadline.after(timeout))
        seen = [int(peer.mapping.words(0, 1)[0]) for peer in peers]
        part(peers)
        return seen
    finally:
        arena.close()


@pytest.mark.parametrize("size", [1, 2, 7, 24])
def test_each_rank_maps_each_local_peers_arena(size: int) -> None:
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda rank: join(store, rank, size), range(size)))
    assert found == [[100 + rank for rank in range(size)]] * size


class Renewed(Deadline):
    """A deadline that counts how often it has been moved."""

    __slots__ = ("moves",)

    def excuse(self, seconds: float) -> None:
        super().excuse(seconds)
        self.moves += 1


def counted(seconds: float) -> Renewed:
    deadline = Renewed(monotonic() + seconds)
    deadline.moves = 0
    return deadline


def test_a_rank_waits_beyond_its_deadline_for_a_peer_that_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeats, "LONGEST_PAUSE", 0.01)
    store, deadline = HashStore(), counted(1.0)
    with ThreadPoolExecutor() as pool:
        with compiling(store, Deadline.after(60)):
            waiting = pool.submit(join, store, 0, 2, by=deadline)
            until(lambda: deadline.moves)
        assert join(store, 1, 2) == waiting.result() == [100, 101]


def test_a_peer_that_compiles_no_longer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(heartbeats, "RENEWED_SECONDS", 0.01)
    store, deadline = HashStore(), counted(1.0)
    with ThreadPoolExecutor() as pool:
        with compiling(store, Deadline.after(60)):
            waiting = pool.submit(join, store, 0, 2, by=deadline)
            until(lambda: deadline.moves)
        with pytest.raises(RendezvousError, match="rank 1 came, and did not get ready"):
            waiting.result()


def test_heartbeats_before_a_wait_are_no_sign_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "LONGEST_PAUSE", 0.01)
    store, deadline = HashStore(), counted(0.0)
    with compiling(store, Deadline.after(60)):  # of the rank itself, for example
        store.wait([heartbeats.BEATS_KEY])
    with pytest.raises(RendezvousError, match="rank 1 came, and did not get ready"):
        join(store, 0, 2, by=deadline)
    assert deadline.moves == 0


def test_compiling_costs_no_time_before_a_deadline() -> None:
    store, deadline = HashStore(), Deadline.after(60)
    before = deadline.at
    with compiling(store, deadline):
        pass
    assert deadline.at > before
    assert not store.check([heartbeats.BEATS_KEY])


def info_of(store: HashStore, rank: int) -> RankInfo:
    store.wait([f"ranks/info/{rank}"], 10.0)
    return RankInfo(**json.loads(store.get(f"ranks/info/{rank}")))


def pretend(store: HashStore, rank: int, name: str = "nobody-listens-here") -> RankInfo:
    """Publish the info of a rank that is not there."""
    info = RankInfo(
        rank, host_id(), "host", os.getpid(), name, "0" * 32, version(), process(), [0], 1.0, 0, 0
    )
    store.set(f"ranks/info/{rank}", json.dumps(dataclasses.asdict(info)))
    return info


def call(info: RankInfo) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect("\0" + info.socket)
    return link


def silent(info: RankInfo, open_links: contextlib.ExitStack) -> None:
    link = open_links.enter_context(call(info))
    link.shutdown(socket.SHUT_WR)


def ends_at_once(info: RankInfo, open_links: contextlib.ExitStack) -> None:
    call(info).close()


def wrong_secret(info: RankInfo, open_links: contextlib.ExitStack) -> None:
    link = open_links.enter_context(call(info))
    with open(os.devnull) as file:
        hello = host_peers.HELLO.pack(1, b"f" * 32)
        socket.send_fds(link, [hello], [file.fileno(), file.fileno()])


def garbage(info: RankInfo, open_links: contextlib.ExitStack) -> None:
    link = open_links.enter_context(call(info))
    link.sendall(os.urandom(5000))


def no_descriptors(info: RankInfo, open_links: contextlib.ExitStack) -> None:
    link = open_links.enter_context(call(info))
    link.sendall(host_peers.HELLO.pack(1, host_peers.proof_of(info.secret, info)))


def reads_the_store(info: RankInfo, open_links: contextlib.ExitStack) -> None:
    """Knows everything but the job's token."""
    link = open_links.enter_context(call(info))
    with open(os.devnull) as file:
        hello = host_peers.HELLO.pack(1, hmac.digest(b"", info.secret.encode(), "sha256"))
        socket.send_fds(link, [hello], [file.fileno(), file.fileno()])


STRANGERS = [silent, ends_at_once, wrong_secret, garbage, no_descriptors, reads_the_store]


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_turned_away_and_the_ranks_still_find_each_other(
    monkeypatch: pytest.MonkeyPatch, stranger: Callable[[RankInfo, contextlib.ExitStack], None]
) -> None:
    monkeypatch.setenv("NC10D_TOKEN", "5c" * 32)
    store = HashStore()
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as open_links:
        first = pool.submit(join, store, 0, 2)
        stranger(info_of(store, 0), open_links)
        second = pool.submit(join, store, 1, 2)
        assert first.result() == second.result() == [100, 101]


def test_silent_strangers_delay_nobody_however_many_there_are() -> None:
    def attempt() -> float:
        store, start = HashStore(), time.monotonic()
        with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as open_links:
            first = pool.submit(join, store, 0, 2)
            info = info_of(store, 0)
            for _ in range(30):
                open_links.enter_context(call(info))
            second = pool.submit(join, store, 1, 2)
            assert first.result() == second.result() == [100, 101]
        return time.monotonic() - start

    assert soon(1.5, attempt)


@pytest.mark.parametrize("places", [1, host_peers.BACKLOG])
def test_strangers_who_come_first_take_no_ranks_place(
    monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    monkeypatch.setattr(host_peers, "BACKLOG", places)
    store = HashStore()
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as open_links:
        first = pool.submit(join, store, 0, 2)
        info = info_of(store, 0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(50):
                link = open_links.enter_context(socket.socket(socket.AF_UNIX))
                link.setblocking(False)
                link.connect("\0" + info.socket)
                link.close()
        second = pool.submit(join, store, 1, 2)
        assert first.result() == second.result() == [100, 101]


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Leave this process no more than so many descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + count, hard))
    held: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("called", [False, True])
def test_a_rank_without_descriptors_reports_that_and_blames_no_rank(
    called: bool, left: int
) -> None:
    store, arena, ends = HashStore(), Arena(ARENA_BYTES), socket.socketpair()
    mine, other = pretend(store, 0), pretend(store, 1)
    deadline = Deadline.after(10.0)
    report = WaitReport("rank 0 of 2", deadline)
    with contextlib.closing(arena), ends[0] as here, ends[1] as there, open(os.devnull) as file:
        host_peers._send(there, other, mine.secret, arena, file.fileno())
        calls = {
            True: lambda: host_peers._read_hello(here, mine, [mine, other], {1}),
            False: lambda: host_peers._receive(here, other, mine, deadline, report),
        }
        with descriptors_left(left), pytest.raises(OSError, match="Too many open files") as caught:
            calls[called]()
    assert caught.value.errno == errno.EMFILE


def other_user(name: str, ready: int) -> None:
    """As another user, answer on an abstract socket; exit with the number of descriptors got."""
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen()
        os.write(ready, b"!")
        link, _ = listener.accept()
        link.settimeout(30.0)
        _, fds, _, _ = socket.recv_fds(link, 1000, 8)
        os._exit(len(fds))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_memory_is_not_handed_to_another_user_who_answers_in_a_ranks_place() -> None:
    store, name = HashStore(), f"nc10d-test-{os.getpid()}"
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            other_user(name, write)
        finally:
            os._exit(100)
    os.read(read, 1)
    os.close(read)
    os.close(write)
    pretend(store, 0, name)
    with pytest.raises(RendezvousError, match="another user answers in the place of rank 0"):
        join(store, 1, 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_rank_that_never_publishes_its_info_is_named() -> None:
    with pytest.raises(
        RendezvousError, match=r"timed out after .*: ranks 1, 2 came, and did not get ready"
    ):
        join(HashStore(), 0, 3, timeout=0.2)


def test_a_rank_that_dies_after_publishing_its_info_is_an_error_within_the_timeout() -> None:
    def attempt() -> float:
        store = HashStore()
        pretend(store, 1)
        start = time.monotonic()
        expected = (
            r"rank 0 of 2 timed out after 0.5 s at .*py:\d+: rank 1 came, and then did not answer"
        )
        with pytest.raises(RendezvousError, match=expected) as raised:
            join(store, 0, 2, timeout=0.5)
        assert "changed" not in str(raised.value), "silence is no sign of a changed store"
        assert time.monotonic() - start > 0.4
        return time.monotonic() - start

    assert soon(2.0, attempt)


def test_a_dead_lower_rank_is_an_error_at_once() -> None:
    def attempt() -> float:
        store = HashStore()
        pretend(store, 0)
        start = time.monotonic()
        with pytest.raises(RendezvousError, match=r"rank 1 could not reach.*one of them has ended"):
            join(store, 1, 2, timeout=10.0)
        return time.monotonic() - start

    assert soon(2.0, attempt)


def test_a_rank_that_fails_during_the_bootstrap_leaves_no_descriptors_of_its_peers() -> None:
    """Rank 1 joins rank 0 properly, and then waits in vain for rank 2."""
    store = HashStore()
    pretend(store, 2)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(join, store, rank, 3, 0.5) for rank in (0, 1)]
        for future in both:
            with pytest.raises(RendezvousError):
                future.result()


def test_another_process_in_a_ranks_place_is_refused() -> None:
    store = HashStore()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0nc10d-test-impostor")
        listener.listen(1)
        pretend(store, 0, "nc10d-test-impostor")

        def answer() -> None:
            link, _ = listener.accept()
            with link, open(os.devnull) as file:
                link.recv(100)
                hello = host_peers.HELLO.pack(0, b"f" * 32)
                socket.send_fds(link, [hello], [file.fileno(), file.fileno()])

        impostor = threading.Thread(target=answer)
        impostor.start()
        with pytest.raises(RendezvousError, match="in the place of rank 0"):
            join(store, 1, 2)
        impostor.join()


def test_ranks_of_other_hosts_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    pretend(store, 1)
    monkeypatch.setenv("NC10D_HOST_ID", "elsewhere")
    assert join(store, 0, 2) == [100]


def test_ranks_of_another_version_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    pretend(store, 1)
    monkeypatch.setattr(host_peers, "version", lambda: "older")
    with pytest.raises(RendezvousError, match="rank 1: another version"):
        join(store, 0, 2)


def test_a_host_that_can_not_form_gives_its_memory_and_descriptors_back() -> None:
    with pytest.raises(RendezvousError):
        Context(HashStore(), 0, 2, Deadline.after(0.05))


def test_more_ranks_than_a_mask_has_bits_are_refused() -> None:
    store = HashStore()
    for rank in range(1, 65):
        pretend(store, rank)
    with pytest.raises(UnsupportedPlatform, match="at most 64"):
        Context(store, 0, 65, Deadline.after(1.0))


def test_rank_63_has_a_bit_of_its_own() -> None:
    bits = [mask([rank]) for rank in range(64)]
    assert len(set(bits)) == 64
    assert mask(range(64)) == -1
    words = np.zeros(1, np.int64)
    address = plain.address(words)
    for bit in bits:
        assert entry_points.compare_and_swap(address, words[0], words[0] | bit) is not None
    assert words[0] == -1


def hosts(size: int) -> list[Any]:
    store = HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda r: Context(store, r, size, Deadline.after(60.0)), range(size)))


def test_64_ranks_ring_each_others_doorbells() -> None:
    made = hosts(64)
    try:
        bells = [made[0].arena.mapping.base, made[63].arena.mapping.base]
        before = [entry_points.load_word(bell) for bell in bells]
        made[5].ring(mask([0, 63]))
        assert [entry_points.load_word(bell) for bell in bells] == [value + 1 for value in before]
    finally:
        for host in made:
            host.close()
