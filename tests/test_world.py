"""The default group: an init that can't succeed ends on time, and says who was missing."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import nc10d as dist
from nc10d.backend.cpu.host import Host
from nc10d.backend.cpu.mates import Card, host_id, version
from nc10d.deadline import Deadline
from nc10d.errors import RendezvousError, StoreError
from nc10d.rendezvous import rendezvous
from nc10d.store import HashStore, PrefixStore, Store
from nc10d.testing import run_ranks
from nc10d.world import current_world, own_world, prefix_store

HOST = "127.0.0.1"
LIMIT = 1.0  # seconds of an init's timeout here
LATE = 0.6  # when a rank comes that then does nothing more


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    """Load the engine, which may have to be compiled: that is not what is timed here."""
    with own_world():
        dist.init_process_group("cpu", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()


@pytest.fixture
def method() -> str:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return f"tcp://{HOST}:{sock.getsockname()[1]}"


@pytest.fixture
def others() -> Iterator[Callable[..., None]]:
    """Let another rank do something, on a thread, after some seconds; wait for it at the end."""
    threads: list[threading.Timer] = []

    def begin(delay: float, body: Callable[..., Any], *arguments: Any) -> None:
        threads.append(threading.Timer(delay, body, arguments))
        threads[-1].start()

    yield begin
    for thread in threads:
        thread.join()


def ends_on_time(error: type[Exception], told: str, **arguments: Any) -> None:
    """Demand that this init fails with `error` at its timeout, and leaves nothing behind."""
    with own_world():
        start = time.monotonic()
        with pytest.raises(error, match=told):
            dist.init_process_group("cpu", timeout=LIMIT, **arguments)
        took = time.monotonic() - start
        assert current_world().default is None
        assert not current_world().groups
    assert LIMIT <= took < LIMIT + 0.5


def test_a_store_that_is_never_there(method: str) -> None:
    ends_on_time(StoreError, "connect|reach", init_method=method, rank=1, world_size=2)


def test_a_rank_that_never_comes_to_the_store(method: str) -> None:
    ends_on_time(RendezvousError, "missing: 1", init_method=method, rank=0, world_size=2)


def test_a_rank_that_is_gone_after_the_meeting_in_the_store(
    method: str, others: Callable[..., None]
) -> None:
    def come_and_go() -> None:
        store, _, _ = rendezvous(method, 1, 2, 10.0)
        store.close()

    others(LATE, come_and_go)
    told = r"ranks \[1\] did not join"
    ends_on_time(RendezvousError, told, init_method=method, rank=0, world_size=2)


def silent_card(store: Store, rank: int) -> socket.socket:
    """Tell the others of a rank, and answer nobody."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"nc10d-test-{secrets.token_hex(8)}"
    listener.bind("\0" + name)
    listener.listen(8)
    card = Card(rank, host_id(), "here", os.getpid(), name, "0" * 32, version())
    fields = {field: getattr(card, field) for field in Card.__slots__}
    prefix_store("world/1", store).set(f"mates/card/{rank}", json.dumps(fields))
    return listener


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_stops_while_host_mates_meet(silent: int, others: Callable[..., None]) -> None:
    store, open_ends = HashStore(), []
    others(LATE, lambda: open_ends.append(silent_card(store, silent)))
    told = rf"ranks \[{silent}\] came, but did not introduce themselves"
    ends_on_time(RendezvousError, told, store=store, rank=1 - silent, world_size=2)
    open_ends[0].close()


class Late(PrefixStore):
    """A store whose answers come late."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        threading.Event().wait(LATE)
        return super().multi_get(keys)


def test_a_silent_host_mate_is_not_waited_for_longer_because_another_was_late(
    others: Callable[..., None],
) -> None:
    store = HashStore()

    def come_late() -> None:
        with pytest.raises(RendezvousError):
            Host(Late("world/1", store), 2, 3, Deadline.after(LIMIT))

    with silent_card(store, 0):
        others(0.0, come_late)
        told = r"ranks \[0\] came, but did not introduce themselves"
        ends_on_time(RendezvousError, told, store=store, rank=1, world_size=3)


def test_options_that_a_backend_does_not_know_are_refused_before_anyone_meets(method: str) -> None:
    with own_world():
        for backend, options in (("cpu", object()), (None, {"cpu": 1}), (None, object())):
            with pytest.raises(TypeError, match="pg_options of"):  # and not that nobody is there
                dist.init_process_group(backend, method, LIMIT, 2, 1, pg_options=options)
            assert not dist.is_initialized()


def refuse_and_go_on(group: dist.ProcessGroup) -> int:
    for make in (
        lambda: dist.new_group([0, 1], pg_options=1),
        lambda: dist.new_subgroups(1, pg_options=1),
        lambda: dist.new_subgroups_by_enumeration([[0], [1]], pg_options=1),
        lambda: dist.split_group(group, [[0, 1]], pg_options=1),
        lambda: group.split_group([[0, 1]], pg_options=1),
    ):
        if group.rank == 0:  # one rank's mistake: were it counted, names would differ afterwards
            with pytest.raises(TypeError, match="pg_options of the backend 'cpu' must be None"):
                make()
    after = dist.new_group([0, 1])
    assert isinstance(after, dist.ProcessGroup)
    after.barrier()
    return after.size


def test_a_rank_whose_options_are_refused_goes_on_with_the_others() -> None:
    assert run_ranks(refuse_and_go_on, 2) == [2, 2]
