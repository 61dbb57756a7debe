"""The default group: an init that cannot succeed ends on time and names the missing rank."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from clocks import takes
from ports import free_port

import nc10d as dist
from nc10d.backend.cpu.bootstrap.rank_info import RankInfo, host_id, version
from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.memory.host_peer import process
from nc10d.base.deadline import Deadline
from nc10d.errors import RendezvousError, StoreError
from nc10d.group.world import current_world, own_world, prefix_store
from nc10d.init_methods.meeting import meet
from nc10d.init_methods.methods import rendezvous
from nc10d.store import HashStore, PrefixStore, Store
from nc10d.testing import run_ranks

HOST = "127.0.0.1"
LIMIT = 1.0  # seconds of timeout of each init
LATE = 0.6  # seconds until a rank comes that then does nothing more


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    """Load the engine, whose compilation must not count in the times below."""
    with own_world():
        dist.init_process_group("cpu", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()


def method() -> str:
    """Return an address for a new store."""
    return f"tcp://{HOST}:{free_port()}"


@pytest.fixture
def others() -> Iterator[Callable[..., None]]:
    """Run functions of another rank on threads, after some seconds; wait for them at the end."""
    threads: list[threading.Timer] = []

    def begin(delay: float, body: Callable[..., Any], *arguments: Any) -> None:
        threads.append(threading.Timer(delay, body, arguments))
        threads[-1].start()

    yield begin
    for thread in threads:
        thread.join()


def ends_on_time(
    error: type[Exception],
    expected: str,
    arrange: Callable[[], dict[str, Any]],
    rank: int,
    size: int,
) -> None:
    """Require that an init fails with `error` at its timeout, and releases everything.

    `arrange` begins an attempt, and returns arguments of the init. If a step of an init restarted
    the timeout, every attempt would end LATE seconds too late.
    """

    def attempt() -> None:
        with own_world():
            with pytest.raises(error, match=expected):
                dist.init_process_group(
                    "cpu", timeout=LIMIT, rank=rank, world_size=size, **arrange()
                )
            assert current_world().default is None
            assert not current_world().groups

    assert takes(attempt, LIMIT, LIMIT + 0.5)


def test_an_absent_store_is_an_error_on_time() -> None:
    ends_on_time(StoreError, "connect|reach", lambda: {"init_method": method()}, 1, 2)


def test_a_rank_that_never_reaches_the_store_is_named() -> None:
    ends_on_time(RendezvousError, "missing: 1", lambda: {"init_method": method()}, 0, 2)


def test_a_rank_that_dies_after_the_rendezvous_is_named(others: Callable[..., None]) -> None:
    def come_and_go(where: str) -> None:
        store, _, _ = rendezvous(where, 1, 2, 10.0)
        store.close()

    def arrange() -> dict[str, Any]:
        where = method()
        others(LATE, come_and_go, where)
        return {"init_method": where}

    ends_on_time(RendezvousError, "rank 1 came, and did not get ready", arrange, 0, 2)


def keys_of_a_world(
    store: Store, rank: int, size: int, kind: type[PrefixStore] = PrefixStore
) -> PrefixStore:
    """Meet the other ranks in the store; return the keys of their world."""
    meetings = prefix_store("meeting/world", store)
    return kind(f"world/{meet(meetings, rank, size, Deadline.after(9), 9)}", store)


def silent_card(store: Store, rank: int, size: int = 2) -> socket.socket:
    """Meet the other ranks, publish a rank's info, and answer no connection."""
    keys = keys_of_a_world(store, rank, size)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"nc10d-test-{secrets.token_hex(8)}"
    listener.bind("\0" + name)
    listener.listen(8)
    card = RankInfo(
        rank, host_id(), "here", os.getpid(), name, "0" * 32, version(), process(), [0], 1.0, 0, 0
    )
    fields = {field: getattr(card, field) for field in RankInfo.__slots__}
    keys.set(f"ranks/info/{rank}", json.dumps(fields))
    return listener


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_stops_during_the_bootstrap_of_its_host_is_named(
    silent: int, others: Callable[..., None]
) -> None:
    open_ends = []

    def arrange() -> dict[str, Any]:
        store = HashStore()
        others(LATE, lambda: open_ends.append(silent_card(store, silent)))
        return {"store": store}

    expected = f"timed out.*: rank {silent} came, and then did not answer"
    ends_on_time(RendezvousError, expected, arrange, 1 - silent, 2)
    for end in open_ends:
        end.close()


class Late(PrefixStore):
    """Keys whose lists of values come late."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        threading.Event().wait(LATE)
        return super().multi_get(keys)


def test_a_silent_local_peer_gets_no_more_time_because_another_was_late(
    others: Callable[..., None],
) -> None:
    def come_late(store: Store) -> None:
        keys = keys_of_a_world(store, 2, 3, Late)
        with pytest.raises(RendezvousError):
            Context(keys, 2, 3, Deadline.after(LIMIT))

    with contextlib.ExitStack() as stack:

        def arrange() -> dict[str, Any]:
            store = HashStore()
            others(0.0, lambda: stack.enter_context(silent_card(store, 0, 3)))
            others(0.0, come_late, store)
            return {"store": store}

        expected = "timed out.*: rank 0 came, and then did not answer"
        ends_on_time(RendezvousError, expected, arrange, 1, 3)


def test_options_unknown_to_a_backend_are_refused_before_the_rendezvous() -> None:
    with own_world():
        wrong = [("cpu", object()), (None, {"cpu": 1}), (None, object()), (None, {"nccl": 5})]
        for backend, options in [*wrong, ("gloo", {"staged": "cpu"})]:
            with pytest.raises(TypeError, match="pg_options of"):  # not about missing ranks
                dist.init_process_group(backend, method(), LIMIT, 2, 1, pg_options=options)
            assert not dist.is_initialized()


def refuse_and_go_on(group: dist.ProcessGroup) -> int:
    for make in (
        lambda: dist.new_group([0, 1], pg_options=1),
        lambda: dist.new_subgroups(1, pg_options=1),
        lambda: dist.new_subgroups_by_enumeration([[0], [1]], pg_options=1),
        lambda: dist.split_group(group, [[0, 1]], pg_options=1),
        lambda: group.split_group([[0, 1]], pg_options=1),
    ):
        if group.rank == 0:  # a rank's mistake must not count, or later group names would differ
            with pytest.raises(TypeError, match="pg_options of the backend 'cpu' must be None"):
                make()
    after = dist.new_group([0, 1])
    assert isinstance(after, dist.ProcessGroup)
    after.barrier()
    return after.size


def test_a_rank_whose_options_are_refused_goes_on_with_the_others() -> None:
    assert run_ranks(refuse_and_go_on, 2) == [2, 2]
