"""Messages between two ranks: a communicator for each direction, tags compared on the host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from device_ranks import LONG, after, device, full, once, value
from emulated import emulated_ranks, emulators, needs_emulators

import nc10d as dist
from nc10d import cuda
from nc10d.backend.nccl.backend import NcclBackend
from nc10d.backend.nccl.comm.options import NcclOptions
from nc10d.cuda.driver import call, driver
from nc10d.errors import CollectiveMismatch, DistError, PeerLost
from nc10d.group.process_group import ProcessGroup
from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with emulated_ranks() as ranks:
        yield ranks


def names(group: ProcessGroup) -> set[str]:
    """Return the names of the group's communicators on this rank."""
    backend = group.backend("cuda")
    assert isinstance(backend, NcclBackend)
    return {comm_stream.name for comm_stream in backend.started.comm_streams.all()}


def exchange(group: ProcessGroup, tags: list[int]) -> None:
    """Receive first, on both ranks, then send, a message for each tag."""
    peer = 1 - group.rank
    got = [full(group, -1.0) for _ in tags]
    works = [group.irecv(x, peer, tag=tag) for x, tag in zip(got, tags, strict=True)]
    works += [group.isend(full(group, float(tag)), peer, tag=tag) for tag in tags]
    for work in works:
        work.wait_blocking(LONG)
    assert [value(x) for x in got] == [float(tag) for tag in tags]


def tags_share_a_communicator_for_each_direction(group: ProcessGroup) -> None:
    mine = dist.new_group()
    assert isinstance(mine, ProcessGroup)
    exchange(mine, list(range(40)))
    assert names(mine) == {"0-1", "1-0"}
    dist.destroy_process_group(mine)


def sent_or_received(group: ProcessGroup, count: int, tag: int) -> None:
    """Send a message from rank 0 to rank 1, and wait for its end."""
    x = full(group, 0.0, count)
    start = group.irecv if group.rank else group.isend
    start(x, 1 - group.rank, tag=tag).wait_blocking(LONG)
    group.barrier()


def other_tags_are_refused(group: ProcessGroup) -> None:
    """The later rank sees the difference, and both raise the same error."""
    mine = dist.new_group()
    assert isinstance(mine, ProcessGroup)
    exchange(mine, [3, 3])
    with pytest.raises(CollectiveMismatch) as caught:
        sent_or_received(mine, 100, tag=4 + group.rank)
    text = str(caught.value)
    assert "ranks disagree on message #3 on devices" in text
    assert "rank 0 sends 400 bytes of float32 with tag 4" in text
    assert "rank 1 receives 400 bytes of float32 with tag 5" in text
    assert 'NcclOptions(links="tag")' in text
    dist.destroy_process_group(mine)


def tags_that_differed_long_ago_are_refused(group: ProcessGroup) -> None:
    """The latest messages are alike, and the first ones are out of sight."""
    mine = dist.new_group()
    assert isinstance(mine, ProcessGroup)
    exchange(mine, [1])
    tags = [*range(40)] if group.rank else [1, 0, *range(2, 40)]

    def send_or_receive() -> None:
        start = mine.irecv if group.rank else mine.isend
        works = [start(full(group, 0.0), 1 - group.rank, tag=tag) for tag in tags]
        for work in works:
            work.wait_blocking(LONG)
        mine.irecv(full(group, 0.0), 1 - group.rank).wait_blocking(LONG)  # nobody sends

    with pytest.raises(CollectiveMismatch, match="ranks disagree on"):
        send_or_receive()
    dist.destroy_process_group(mine)


def receives_from_any_rank_keep_their_order(group: ProcessGroup) -> None:
    """A named receive of another tag waits behind them: the message may come by its link."""
    mine = dist.new_group()
    assert isinstance(mine, ProcessGroup)
    if group.rank:
        x, y = full(group, 0.0), full(group, 0.0)
        works = [mine.irecv(x, None, tag=1), mine.irecv(y, 0, tag=2)]
        for work in reversed(works):
            work.wait_blocking(LONG)
        assert (value(x), value(y)) == (1.0, 2.0)
    else:
        for tag in (1, 2):
            mine.isend(full(group, float(tag)), 1, tag=tag).wait_blocking(LONG)
    dist.destroy_process_group(mine)


def a_batch_keeps_no_host_waiting(group: ProcessGroup) -> None:
    """Streams wait for a batch's messages, as for single ones; a graph captures them."""
    mine = dist.new_group()
    assert isinstance(mine, ProcessGroup)
    exchange(mine, [0])
    x, stream = full(group, float(group.rank)), cuda.Stream(device(group))

    def transfer() -> None:
        op = dist.irecv if group.rank else dist.isend
        (work,) = dist.batch_isend_irecv([dist.P2POp(op, x, 1 - group.rank, mine)])
        work.wait()

    if group.rank:
        transfer()
        group.store.set("waits", "")
    else:
        group.store.wait(["waits"], LONG)
        transfer()
    assert value(x) == 0.0
    mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with cuda.on_device(device(group)), cuda.stream(stream):
        call("cuStreamBeginCapture", stream.handle, mode)
        transfer()
        graph = call("cuStreamEndCapture", stream.handle)
        runs = call("cuGraphInstantiate", graph, 0)
        x.fill_from(np.full(100, 3.0 + group.rank, np.float32))
        call("cuGraphLaunch", runs, stream.handle)
        stream.synchronize()
        call("cuGraphDestroy", graph)
        call("cuGraphExecDestroy", runs)
    assert value(x) == 3.0
    dist.destroy_process_group(mine)


def a_missing_sender_is_named(group: ProcessGroup) -> None:
    """By the rank's number in the group, and not among the two ranks of the link."""
    mine = dist.new_group()
    assert isinstance(mine, ProcessGroup)
    if not group.rank:
        with pytest.raises(
            DistError,
            match=r"rank 0 timed out.*: rank 1 did not come to .* messages from rank 1 to rank 0",
        ):
            mine.recv(full(group, 0.0), 1, timeout=0.3)
        once(group, "timed out")
    after(group, "timed out")
    dist.destroy_process_group(mine)


def a_sender_that_has_left_is_an_error_at_once(group: ProcessGroup) -> None:
    """Before a link is formed, and afterwards."""
    for formed in False, True:
        mine = dist.new_group()
        assert isinstance(mine, ProcessGroup)
        if formed:
            sent_or_received(mine, 8, tag=0)
        if not group.rank:
            with pytest.raises(PeerLost, match=r"rank 1 has left group .* waits for it in"):
                mine.irecv(full(group, 0.0), 1).wait_blocking(LONG)
        dist.destroy_process_group(mine)


def both_sides_count_the_same_messages(group: ProcessGroup) -> None:
    """A rank that leaves says how many there were, whether in a block or by themselves."""
    mine, x = dist.new_group(), full(group, 1.0)
    assert isinstance(mine, ProcessGroup)
    if group.rank:
        for _ in range(3):
            mine.recv(x, 0)
    else:
        with mine.coalescing_manager():
            for _ in range(3):
                mine.send(x, 1)
    cuda.synchronize(device(group))
    backend = mine.backend("cuda")
    assert isinstance(backend, NcclBackend)
    link = backend.started.comm_streams.find("0-1")
    assert link is not None
    assert link.calls == 3
    dist.destroy_process_group(mine)


def other_sizes_are_refused(group: ProcessGroup) -> None:
    mine = dist.new_group()
    assert isinstance(mine, ProcessGroup)
    with pytest.raises(CollectiveMismatch, match=r"sends 32 bytes .* rank 1 receives 36"):
        sent_or_received(mine, 8 + group.rank, tag=0)
    dist.destroy_process_group(mine)


def other_dtypes_are_refused(group: ProcessGroup) -> None:
    """Also of as many bytes."""
    mine = dist.new_group()
    assert isinstance(mine, ProcessGroup)
    kind = np.int32 if group.rank else np.float32
    x = cuda.to_device(np.zeros(4, kind), device(group))
    start = mine.irecv if group.rank else mine.isend
    with pytest.raises(CollectiveMismatch, match=r"sends 16 bytes of float32 .* 16 bytes of int32"):
        start(x, 1 - group.rank).wait_blocking(LONG)
    dist.destroy_process_group(mine)


def tags_on_request_are_received_in_any_order(group: ProcessGroup) -> None:
    options = {"nccl": NcclOptions(links="tag")}
    mine = dist.new_group(pg_options=options)
    assert isinstance(mine, ProcessGroup)
    if group.rank:
        for tag in (2, 1):
            x = full(group, 0.0)
            mine.recv(x, 0, tag=tag)
            assert value(x) == float(tag)
    else:
        works = [mine.isend(full(group, float(tag)), 1, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait_blocking(LONG)
    assert names(mine) == {"0-1-1", "0-1-2"}
    dist.destroy_process_group(mine)


def graphs_with_messages_are_not_compared(group: ProcessGroup) -> None:
    """A rank repeats a captured send; the other receives call by call."""
    mine = dist.new_group()
    assert isinstance(mine, ProcessGroup)
    exchange(mine, [1])
    x, stream = full(group, 7.0), cuda.Stream(device(group))
    if group.rank:
        for tag in (5, 5, 5, 6):
            mine.recv(x, 0, tag=tag)
            assert value(x) == 7.0
    else:
        mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with cuda.on_device(device(group)), cuda.stream(stream):
            call("cuStreamBeginCapture", stream.handle, mode)
            mine.send(x, 1, tag=5)
            graph = call("cuStreamEndCapture", stream.handle)
            runs = call("cuGraphInstantiate", graph, 0)
            for _ in range(3):
                call("cuGraphLaunch", runs, stream.handle)
            mine.send(x, 1, tag=6)
            stream.synchronize()
            call("cuGraphDestroy", graph)
            call("cuGraphExecDestroy", runs)
    dist.destroy_process_group(mine)


def messages_go_with_collectives_where_queues_are_few(group: ProcessGroup) -> None:
    """A block of an exchange is one kernel: two would share a queue, and hold each other up."""
    peer, x, got = 1 - group.rank, full(group, float(group.rank)), full(group, -1.0)
    for tag in (3, 4):
        group.all_reduce(full(group, 1.0))
        with group.coalescing_manager():
            group.irecv(got, peer, tag=tag)
            group.isend(x, peer, tag=tag)
        assert value(got) == peer
    assert names(group) == {"all"}
    with group.coalescing_manager():
        group.all_reduce(x)
        (group.irecv if group.rank else group.isend)(got, peer)
    assert value(x) == 1.0
    with pytest.raises(CollectiveMismatch, match=r"400 bytes .* with tag 6, rank 1"):
        sent_or_received(group, 100, tag=6 + group.rank)


LAWS = [
    tags_share_a_communicator_for_each_direction,
    other_tags_are_refused,
    tags_that_differed_long_ago_are_refused,
    receives_from_any_rank_keep_their_order,
    a_batch_keeps_no_host_waiting,
    a_missing_sender_is_named,
    a_sender_that_has_left_is_an_error_at_once,
    other_dtypes_are_refused,
    both_sides_count_the_same_messages,
    other_sizes_are_refused,
    tags_on_request_are_received_in_any_order,
    graphs_with_messages_are_not_compared,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws_of_messages(two: Ranks, law: Callable[[ProcessGroup], None]) -> None:
    two.run(law)


@pytest.mark.parametrize("count", [2, 8, 40])
def test_both_ranks_may_receive_first_whatever_the_tags(count: int) -> None:
    """A GPU has few hardware queues, and streams that share a queue wait for each other."""
    with emulated_ranks(CUDA_DEVICE_MAX_CONNECTIONS="8") as ranks:
        ranks.run(exchange, [list(range(count))] * 2)


@pytest.mark.parametrize("queues", ["1", "2"])
def test_blocks_of_messages_need_a_single_queue(queues: str) -> None:
    with emulated_ranks(CUDA_DEVICE_MAX_CONNECTIONS=queues) as ranks:
        ranks.run(messages_go_with_collectives_where_queues_are_few)


def other_tags_are_found_without_boards(group: ProcessGroup) -> None:
    """Both messages arrive; the ranks compare what they have had while an operation is pending."""
    exchange(group, [1, 2])

    def exchange_wrongly() -> None:
        x = full(group, 0.0)
        if group.rank:
            group.recv(x, 0, tag=4)
        else:
            group.send(x, 1, tag=3)
        group.irecv(x, 1 - group.rank, tag=9).wait_blocking(LONG)  # nobody sends

    with pytest.raises(CollectiveMismatch, match=r"400 bytes .* with tag 3, rank 1"):
        exchange_wrongly()


def test_a_group_of_nccl_alone_compares_tags_by_its_store() -> None:
    with emulated_ranks(2, "nccl") as ranks:
        ranks.run(other_tags_are_found_without_boards)


ACROSS_HOSTS = """
import sys
import numpy as np
import nc10d as dist
from nc10d import cuda

rank = int(sys.argv[1])
dist.init_process_group(init_method=sys.argv[2], rank=rank, world_size=2, timeout=30.0)
x = cuda.to_device(np.zeros(8, np.float32), rank)
for tag in (1, 2, 3 + rank):
    if rank:
        dist.recv(x, 0, tag=tag)
    else:
        dist.send(x, 1, tag=tag)
try:
    dist.irecv(x, 1 - rank, tag=9).wait_blocking()  # pending: nobody sends
except dist.CollectiveMismatch as error:
    print(error)
"""


def test_hosts_compare_their_messages_while_operations_are_pending(tmp_path: Path) -> None:
    with emulators():
        started = [
            subprocess.Popen(
                [sys.executable, "-c", ACROSS_HOSTS, str(rank), f"file://{tmp_path}/store"],
                env={**os.environ, "NC10D_HOST_ID": host},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate("ab")
        ]
    texts = [process.communicate(timeout=100)[0] for process in started]
    assert texts[0] == texts[1]
    assert "ranks disagree on message #3 on devices" in texts[0]
    assert "with tag 3" in texts[0]
    assert "with tag 4" in texts[0]
