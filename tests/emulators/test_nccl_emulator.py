"""The libnccl emulator, between processes: results equal the reference, and errors equal NCCL's.

Reductions of every type are checked through the backend, in backend/nccl/test_nccl_conformance.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from driving import IN_PROGRESS, TYPES, Gpu, Refused
from emulated import needs_emulators
from nccl_world import fresh, world

from nc10d.group.process_group import ProcessGroup
from nc10d.testing import Ranks, reference

SIZE = 3
UNHANDLED_CUDA_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, NOT_READY = 1, 4, 5, 6, 600
Array = np.ndarray[Any, np.dtype[Any]]

pytestmark = needs_emulators


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(SIZE, "processes", "fake") as found:  # only the group's store is used
        yield found


# Copying collectives


def copies(group: ProcessGroup, count: int) -> dict[str, Array]:
    here, root = world(group), 2
    rows = [np.arange(count, dtype=np.float32) + 1000 * group.rank + c for c in range(SIZE)]
    one, all_of_them = rows[0], np.concatenate(rows)
    room = np.zeros(SIZE * count, np.float32)
    calls: dict[str, tuple[Array, Array, tuple[int, ...]]] = {
        "ncclBroadcast": (one, one, (root,)),
        "ncclAllGather": (one, room, ()),
        "ncclAlltoAll": (all_of_them, room, ()),
        "ncclGather": (one, room, (root,)),
        "ncclScatter": (all_of_them, np.zeros(count, np.float32), (root,)),
    }
    places = {name: (here.gpu.put(a), here.gpu.put(b)) for name, (a, b, _) in calls.items()}
    here.nccl("ncclGroupStart")
    for name, (_, _, more) in calls.items():
        here.call(name, *places[name], count, TYPES["float32"], *more)
    here.nccl("ncclGroupEnd")
    here.wait()
    return {name: here.gpu.get(places[name][1], out) for name, (_, out, _) in calls.items()}


@pytest.mark.parametrize("count", [0, 1, 13, 200_003])  # the last exceeds the shared buffer
def test_every_copying_collective_is_the_reference(ranks: Ranks, count: int) -> None:
    rows = [
        [np.arange(count, dtype=np.float32) + 1000 * r + c for c in range(SIZE)]
        for r in range(SIZE)
    ]
    first = [row[0] for row in rows]
    answers = ranks.run(copies, [count] * SIZE)
    for rank, got in enumerate(answers):
        wanted = {
            "ncclBroadcast": reference.broadcast(first, 2)[rank],
            "ncclAllGather": np.concatenate(reference.all_gather(first)[rank]),
            "ncclAlltoAll": np.concatenate(reference.all_to_all(rows)[rank]),
            "ncclGather": np.concatenate(first) if rank == 2 else np.zeros(SIZE * count, "f4"),
            "ncclScatter": reference.scatter(rows[2])[rank],
        }
        assert all(np.array_equal(got[name], right) for name, right in wanted.items()), rank


# Messages


def a_send_alone(group: ProcessGroup) -> bool:
    """A send completes only after its receive has been posted."""
    here, x = world(group), np.ones(4)
    at, over = here.gpu.put(x), True
    if group.rank == 0:
        here.call("ncclSend", at, 4, TYPES["float64"], 1)
        over = here.gpu.code("cuStreamQuery", here.stream) == 0
        group.store.set("a send is on its way", "1")
        here.wait()
    if group.rank == 1:
        group.store.wait(["a send is on its way"])
        here.call("ncclRecv", at, 4, TYPES["float64"], 0)
        here.wait()
    return over


def test_a_send_waits_for_its_receive(ranks: Ranks) -> None:
    assert ranks.run(a_send_alone)[0] is False


# Calls that differ between ranks


def other_counts(group: ProcessGroup) -> tuple[int, str, Array]:
    here, x = fresh(group), np.full(5, 7.0)
    at = here.gpu.put(x)
    here.call("ncclAllReduce", at, at, 5 - (group.rank == 2), TYPES["float64"], 0)
    here.wait()
    words = here.nccl.words(here.comm)
    state = here.nccl.state(here.comm)
    here.nccl("ncclCommAbort", here.comm)
    return state, words, here.gpu.get(at, x)


def test_calls_that_differ_are_an_error_on_every_rank(ranks: Ranks) -> None:
    for state, words, x in ranks.run(other_counts):
        assert (state, (x == 7.0).all()) == (INVALID_USAGE, True)
        assert "5 elements" in words
        assert "rank 2" in words


def other_lengths(group: ProcessGroup) -> int:
    here, x = fresh(group), np.zeros(8)
    at = here.gpu.put(x)
    if group.rank == 0:
        here.call("ncclSend", at, 8, TYPES["float64"], 1)
    if group.rank == 1:
        here.call("ncclRecv", at, 7, TYPES["float64"], 0)
        here.wait()
        group.store.set("the letter was opened", "1")
    group.store.wait(["the letter was opened"])
    state = here.nccl.state(here.comm)
    here.nccl("ncclCommAbort", here.comm)
    return state


def test_a_message_of_another_length_is_an_error(ranks: Ranks) -> None:
    assert ranks.run(other_lengths)[1] == INVALID_USAGE


# Nonblocking, abort, death


def nonblocking(group: ProcessGroup) -> tuple[int, float]:
    """Until a call has completed, the communicator refuses the next, as NCCL does."""
    here, x = world(group), np.ones(4)
    comm = here.nccl.init(group, blocking=False)
    at = here.gpu.put(x)
    assert here.nccl.ready(comm) == 0
    os.environ["NC10D_EMULATED_IN_PROGRESS"] = "0.2"
    call = "ncclAllReduce", at, at, 4, TYPES["float64"], 0, comm, here.stream
    first = here.nccl.code(*call)
    second = here.nccl.code(*call)
    del os.environ["NC10D_EMULATED_IN_PROGRESS"]
    assert (first, here.nccl.ready(comm)) == (IN_PROGRESS, 0)
    here.wait()
    here.nccl("ncclCommDestroy", comm)
    return second, float(here.gpu.get(at, x)[0])


def test_a_nonblocking_communicator_is_in_progress_and_then_is_not(ranks: Ranks) -> None:
    assert ranks.run(nonblocking) == [(INVALID_ARGUMENT, 3.0)] * SIZE


def one_rank_aborts(group: ProcessGroup) -> tuple[int, int]:
    """On other hosts the operation stays pending, with a reason, until they abort too."""
    here, x = fresh(group, hosts=True), np.ones(4)
    at = here.gpu.put(x)
    state = 0
    if group.rank:
        here.call("ncclAllReduce", at, at, 4, TYPES["float64"], 0)
    else:
        here.nccl("ncclCommAbort", here.comm)
        return 0, 0
    while not state:
        state = here.nccl.state(here.comm)
    stuck = here.gpu.code("cuStreamQuery", here.stream)
    here.nccl("ncclCommAbort", here.comm)
    here.wait()
    return state, stuck


def test_an_abort_reaches_the_peers_as_a_remote_error(ranks: Ranks) -> None:
    assert ranks.run(one_rank_aborts)[1:] == [(REMOTE_ERROR, NOT_READY)] * (SIZE - 1)


def one_rank_dies(group: ProcessGroup) -> int:
    here, x = fresh(group, hosts=True), np.ones(4)
    at = here.gpu.put(x)
    if group.rank == 2:
        os.environ["NC10D_EMULATED_FAULTS"] = "ncclAllReduce@1=die"
    here.call("ncclAllReduce", at, at, 4, TYPES["float64"], 0)
    while not (state := here.nccl.state(here.comm)):
        os.sched_yield()
    survivors = here.nccl.shrink(here.comm, [2], abort=True)
    here.nccl("ncclAllReduce", at, at, 4, TYPES["float64"], 0, survivors, here.stream)
    here.wait()
    assert (state, here.gpu.get(at, x)[0]) == (REMOTE_ERROR, SIZE - 1)
    return state


def test_a_death_is_a_remote_error_and_the_others_can_go_on() -> None:
    with (
        Ranks(SIZE, "processes", "fake") as ranks,
        pytest.raises(RuntimeError, match="the process ended with code -9"),
    ):
        ranks.run(one_rank_dies)


# Communicators made from communicators


def families(group: ProcessGroup) -> list[float]:
    """Split by parity in reverse order, then shrink, then revoke; split again afterwards."""
    here, x = fresh(group), np.full(2, float(2**group.rank))
    sums = []

    def add_up(comm: int) -> None:
        at = here.gpu.put(x)
        here.nccl("ncclAllReduce", at, at, 2, TYPES["float64"], 0, comm, here.stream)
        here.nccl("ncclBroadcast", at, at, 1, TYPES["float64"], 0, comm, here.stream)
        here.wait()
        sums.append(float(here.gpu.get(at, x)[1]))

    parity = here.nccl.split(here.comm, group.rank % 2, -group.rank)
    assert here.nccl.number("ncclCommUserRank", parity) == (1 if group.rank == 0 else 0)
    add_up(parity)
    if group.rank != 1:
        add_up(here.nccl.shrink(here.comm, [1], abort=False))
    here.nccl("ncclCommRevoke", here.comm, 0)
    at = here.gpu.put(x)
    call = "ncclAllReduce", at, at, 2, TYPES["float64"], 0, here.comm, here.stream
    assert here.nccl.code(*call) == INVALID_USAGE
    add_up(here.nccl.split(here.comm, 0, 0))
    return sums


def test_communicators_are_made_from_communicators(ranks: Ranks) -> None:
    assert ranks.run(families) == [[5.0, 5.0, 7.0], [2.0, 7.0], [5.0, 5.0, 7.0]]


# Faults set by the environment


def faulty(group: ProcessGroup) -> tuple[list[int], int, float]:
    here, x = fresh(group), np.ones(4)
    at = here.gpu.put(x)
    os.environ["NC10D_EMULATED_FAULTS"] = "1/ncclAllReduce@2=fail:2,ncclBroadcast@1=delay:100"
    call = "ncclAllReduce", at, at, 4, TYPES["float64"], 0, here.comm, here.stream
    codes = [here.nccl.code(*call), here.nccl.code(*call) if group.rank == 1 else 2]
    here.call("ncclBroadcast", at, at, 4, TYPES["float64"], 0)
    late = here.gpu.code("cuStreamQuery", here.stream)
    here.wait()
    del os.environ["NC10D_EMULATED_FAULTS"]
    return codes, late, float(here.gpu.get(at, x)[0])


def test_faults_occur_where_a_test_plants_them(ranks: Ranks) -> None:
    assert ranks.run(faulty) == [([0, 2], NOT_READY, 3.0)] * SIZE


# Caller's mistakes


def mistakes(group: ProcessGroup) -> list[int]:
    here = fresh(group)
    at = here.gpu.put(np.ones(4))
    host = np.ones(4)
    tail = here.comm, here.stream
    codes = [
        here.nccl.code("ncclAllReduce", at, at, 5000, TYPES["float64"], 0, *tail),  # past its end
        here.nccl.code("ncclAllReduce", host.ctypes.data, at, 4, TYPES["float64"], 0, *tail),
        here.nccl.code("ncclAllReduce", at, at, 4, 99, 0, *tail),
        here.nccl.code("ncclAllReduce", at, at, 4, TYPES["float64"], 9, *tail),
        here.nccl.code("ncclBroadcast", at, at, 4, TYPES["float64"], SIZE, *tail),
        here.nccl.code("ncclAllReduce", at, at, 4, TYPES["float64"], 0, 0, here.stream),
        here.nccl.code("ncclGroupEnd"),
    ]
    here.nccl("ncclGroupStart")
    here.nccl.code("ncclAllReduce", at, at, 4, 99, 0, *tail)
    codes.append(here.nccl.code("ncclGroupEnd"))
    here.nccl("ncclCommDestroy", here.comm)
    codes.append(here.nccl.code("ncclAllReduce", at, at, 4, TYPES["float64"], 0, *tail))
    return codes


def test_mistakes_are_refused_at_the_call(ranks: Ranks) -> None:
    wanted = [INVALID_ARGUMENT] * 6 + [INVALID_USAGE, INVALID_ARGUMENT, INVALID_ARGUMENT]
    assert ranks.run(mistakes) == [wanted] * SIZE


def same_gpu(group: ProcessGroup) -> tuple[int, int]:
    """Two ranks on a device are refused, unless NCCL_HOSTID gives them different hosts."""
    here = world(group)
    Gpu(0)
    codes = []
    for host in ("", f"host {group.rank}"):
        os.environ["NCCL_HOSTID"] = host
        try:
            here.nccl.init(group)
            codes.append(0)
        except Refused as error:
            codes.append(error.code)
    del os.environ["NCCL_HOSTID"]
    Gpu(group.rank)
    return codes[0], codes[1]


def test_one_gpu_for_two_ranks_is_refused_as_nccl_does(ranks: Ranks) -> None:
    assert ranks.run(same_gpu) == [(INVALID_USAGE, 0)] * SIZE


def another_gpus_stream(group: ProcessGroup) -> int:
    here = world(group)
    stream = Gpu((group.rank + 1) % SIZE).stream()
    Gpu(group.rank)
    at = here.gpu.put(np.ones(4))
    return here.nccl.code("ncclAllReduce", at, at, 4, TYPES["float64"], 0, here.comm, stream)


def test_a_stream_of_another_gpu_is_refused(ranks: Ranks) -> None:
    assert ranks.run(another_gpus_stream) == [UNHANDLED_CUDA_ERROR] * SIZE


# The words of ncclConfig_t after `blocking`; names are two words each.
FIELDS = ["cgaClusterSize", "minCTAs", "maxCTAs", "netName", "", "splitShare", "trafficClass"]
FIELDS += ["commName", "", "collnetEnable", "CTAPolicy", "shrinkShare", "nvlsCTAs"]
FIELDS += ["nChannelsPerNetPeer", "nvlinkCentricSched", "graphUsageMode"]
UNDEFINED = -(2**31)


def configured(group: ProcessGroup, values: dict[str, int]) -> int:
    here = world(group)
    words = [0 if name in ("netName", "commName", "") else UNDEFINED for name in FIELDS]
    for name, value in values.items():
        words[FIELDS.index(name)] = value
    comm, code = here.nccl.init_rank(1, here.nccl.unique_id(), 0, fields=words)
    if not code:
        here.nccl("ncclCommDestroy", comm)
    return code


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, 0),
        ({"minCTAs": 4, "maxCTAs": 4}, 0),
        ({"maxCTAs": 4}, 0),
        ({"minCTAs": 4}, INVALID_ARGUMENT),  # an unset maximum is the least number
        ({"minCTAs": 4, "maxCTAs": 3}, INVALID_ARGUMENT),
        ({"minCTAs": 0, "maxCTAs": 3}, INVALID_ARGUMENT),
        ({"cgaClusterSize": -1}, INVALID_ARGUMENT),
        ({"splitShare": 2}, INVALID_ARGUMENT),
        ({"CTAPolicy": 3}, INVALID_ARGUMENT),
        ({"nvlsCTAs": 0}, INVALID_ARGUMENT),
        ({"nChannelsPerNetPeer": 65}, INVALID_ARGUMENT),
        ({"graphUsageMode": 3}, INVALID_ARGUMENT),
    ],
    ids=str,
)
def test_a_config_is_checked_as_nccl_does(
    ranks: Ranks, values: dict[str, int], wanted: int
) -> None:
    assert ranks.run(configured, [values] * SIZE) == [wanted] * SIZE
