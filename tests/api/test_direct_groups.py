"""Groups that are made by their backend's class work alone and beside others."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import nc10d
from nc10d.errors import RendezvousError
from nc10d.group.world import own_world
from nc10d.store import HashStore, PrefixStore, Store


def on_threads(size: int, run: Callable[[int], Any]) -> list[Any]:
    """Call run(rank) on a thread with a World of its own for each rank; return the results."""
    results: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        with own_world():
            try:
                results[rank] = run(rank)
            except Exception as error:  # noqa: BLE001  (raised below)
                results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


CLASSES = [(nc10d.ProcessGroupCPU, "cpu"), (nc10d.ProcessGroupGloo, "gloo")]


@pytest.mark.parametrize(("kind", "name"), CLASSES)
def test_a_group_works_without_a_default_group(kind: Any, name: str) -> None:
    store = HashStore()

    def run(rank: int) -> Any:
        group = kind(store, rank, 2, timedelta(seconds=20))
        assert isinstance(group, nc10d.ProcessGroup)
        assert not nc10d.is_initialized()
        assert (group.rank(), group.size(), group.timeout) == (rank, 2, 20.0)
        assert nc10d.get_backend(group) == name
        x = np.full(3, rank + 1.0)
        work = group.all_reduce(x, async_op=True)
        work.wait()
        nc10d.broadcast(x[:1], 1, group=group)
        if rank:
            group.send(x, 0)
        else:
            group.recv(x, 1)
        group.barrier()
        nc10d.destroy_process_group(group)
        with pytest.raises(nc10d.GroupClosed):
            group.barrier()
        return x.tolist()

    assert on_threads(2, run) == [[3.0] * 3] * 2


def test_groups_of_a_store_are_apart_and_each_has_a_name() -> None:
    store = HashStore()

    def run(rank: int) -> Any:
        groups = [nc10d.ProcessGroupCPU(store, rank, 2, 20) for _ in range(2)]
        groups.append(nc10d.ProcessGroupCPU(PrefixStore("mine", store), 1 - rank, 2, 20))
        sums = []
        for number, group in enumerate(groups):
            x = np.array([10.0 * number + group.rank()])
            group.all_gather_into_tensor(both := np.zeros(2), x)
            sums.append(both.tolist())
        for group in groups:
            group.close()
        return [group.name() for group in groups], sums

    (names, sums), other = on_threads(2, run)
    assert (names, sums) == other
    assert len(set(names)) == 3
    assert sums == [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]


def alone(store: Store, *arguments: Any) -> nc10d.ProcessGroup:
    return nc10d.ProcessGroupCPU(store, *arguments)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((0, 0), ValueError, "world_size"),
        ((2, 2), ValueError, "rank"),
        ((0, 1, -1.0), ValueError, "timeout"),
        ((0, 1, "fast"), TypeError, "pg_options of the backend 'cpu'"),
        ((0, 1, "fast", "slow"), TypeError, "timeout must be seconds"),
        ((0, 2, 0.1), RendezvousError, "missing: 1"),
    ],
)
def test_wrong_arguments_and_a_missing_rank_are_named(
    arguments: tuple[Any, ...], kind: type[Exception], text: str
) -> None:
    with own_world(), pytest.raises(kind, match=text):
        alone(HashStore(), *arguments)


def test_classes_have_the_options_of_their_backends() -> None:
    from nc10d.backend.nccl.comm.options import NcclOptions
    from nc10d.backend.ucc.backend import UccOptions

    assert nc10d.ProcessGroupNCCL.Options is NcclOptions
    assert nc10d.ProcessGroupUCC.Options is UccOptions


@pytest.mark.parametrize("name", ["NCCL", "UCC"])
def test_a_backend_that_can_not_work_here_says_so(name: str) -> None:
    if nc10d.is_backend_available(name):
        pytest.skip(f"{name} works here")
    kind = getattr(nc10d, f"ProcessGroup{name}")
    with own_world(), pytest.raises(nc10d.UnsupportedPlatform, match="can't work on this machine"):
        kind(HashStore(), 0, 1, kind.Options())
