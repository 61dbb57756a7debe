"""Streams, blocks, graphs, errors and ends of groups on NCCL, over the emulators."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import device_ranks as on
import pytest
from emulated import emulated_ranks, emulators, needs_emulators
from folding_ranks import FOLDING
from reducing_ranks import REDUCING

from nc10d.backend.nccl.comm.options import NcclOptions
from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators

LAWS = [
    on.waiting_does_not_block_the_host,
    on.waiting_with_a_timeout_blocks_and_fails_in_the_caller_alone,
    on.the_current_stream_comes_first,
    on.the_current_stream_goes_on_behind,
    on.a_block_means_its_calls_in_order,
    on.messages_and_collectives_of_a_block_keep_their_order,
    on.gathers_and_scatters_may_be_ragged,
    on.equal_parts_come_and_go_in_one_array,
    on.strided_arrays_are_what_they_are_elsewhere,
    on.a_transposed_matrix_is_copied_by_a_kernel_each_way,
    on.the_same_arrays_again_are_the_same_call,
    on.a_block_with_another_array_in_its_middle_is_another,
    on.an_array_that_has_moved_is_looked_up_again,
    on.an_array_of_another_type_is_looked_up_again,
    on.an_array_in_the_place_of_a_freed_one_is_another,
    on.a_block_is_its_calls,
    on.a_plan_is_launched_again_and_again,
    on.operations_in_flight_keep_their_arrays,
    on.callbacks_and_await_come_when_it_is_over,
    on.both_kinds_of_arrays_in_one_group,
    on.mistakes_raise_before_anything_is_sent,
    on.a_graph_repeats_its_collectives,
    on.a_group_with_a_device_is_bound_to_it_at_once,
    on.groups_of_groups_end_alone,
    on.communicators_end_once,
    on.memory_is_registered_until_it_is_closed,
    on.an_abort_reaches_work_on_devices_that_it_has_not_used,
    on.a_collective_that_one_rank_never_enters_is_ended_by_an_abort,
    *FOLDING,
    *REDUCING,
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with emulated_ranks() as ranks:
        yield ranks


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws_hold_on_two_devices(two: Ranks, law: Callable[..., None]) -> None:
    two.run(on.afresh, [law] * 2)


BLOCKING, NONBLOCKING = "0", "1"
FAULTS = [
    (on.a_late_rank_is_a_timeout_for_all, BLOCKING, ""),
    (on.a_late_rank_is_a_timeout_for_all, NONBLOCKING, ""),
    (on.a_stuck_collective_is_ended_by_an_abort, BLOCKING, "ncclAllReduce@3=hang"),
    (on.an_asynchronous_error_reaches_everybody, BLOCKING, "0/ncclAllReduce@2=error:6"),
    (on.an_asynchronous_error_reaches_everybody, NONBLOCKING, "0/ncclAllReduce@2=error:6"),
    (on.a_refused_call_names_its_operation_and_ends_its_group, BLOCKING, "ncclBroadcast@2=fail:3"),
    (on.a_missing_rank_is_named, BLOCKING, ""),
]


@pytest.mark.parametrize(
    ("law", "nonblocking", "faults"), FAULTS, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_laws_hold_with_faults(law: Callable[..., None], nonblocking: str, faults: str) -> None:
    given = {"NC10D_EMULATED_FAULTS": faults, "NC10D_NCCL_NONBLOCKING": nonblocking}
    with emulated_ranks(2, "cuda:nccl", **given) as ranks:
        ranks.run(law)


def test_durations_are_the_devices() -> None:
    options = NcclOptions(timing=True, high_priority=True)
    ranks = Ranks(2, "processes", "nccl", timeout=20.0, pg_options=options)
    with emulators(NC10D_EMULATED_FAULTS="ncclAllReduce@*=delay:50"), ranks:
        ranks.run(on.durations_are_measured_by_the_device)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", ["cpu:cpu,cuda:nccl", "nccl"])
def test_a_death_ends_work_on_devices(tmp_path: Path, backend: str, size: int) -> None:
    law = on.a_death_ends_work_on_devices
    with emulated_ranks(size, backend) as ranks:
        with pytest.raises(RuntimeError, match="-9"):
            ranks.run(law, [str(tmp_path)] * size)
        words = {(tmp_path / f"words-{rank}").read_text() for rank in range(size) if rank != 1}
        (message,) = words
        assert re.search(r"rank 1 .* its last operation: #[12] barrier\(\);", message)
        assert re.search(r"rank 0 #[23] all_reduce\(dtype=float32, count=100, op=SUM\)", message)


BEFORE_GATHER = {"NC10D_EMULATED_NCCL_VERSION": "22703"}
NEVER_GATHERS = {"NC10D_EMULATED_FAULTS": "ncclGather@*=fail:3,ncclScatter@*=fail:3"}


def test_nccl_that_has_no_gather_gathers_by_messages() -> None:
    law = on.equal_parts_come_and_go_in_one_array
    with emulated_ranks(2, "nccl", **BEFORE_GATHER, **NEVER_GATHERS) as ranks:
        ranks.run(law)
    refused = pytest.raises(Exception, match="operation 0: gather")
    with emulated_ranks(2, "nccl", **NEVER_GATHERS) as ranks, refused:
        ranks.run(law)


STUCK = """
import ctypes
import numpy as np
from nc10d import cuda
import nc10d as dist

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(cuda.to_device(np.ones(3)))
ctypes.PyDLL(None).sleep(600)  # a call that keeps the GIL
"""


def test_a_process_whose_gil_is_stuck_is_ended_with_its_stacks() -> None:
    with emulators(NC10D_NCCL_HEARTBEAT="1"):
        done = subprocess.run(
            [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=100
        )
    assert done.returncode == 1, done.stderr
    assert "Timeout (0:00:01)" in done.stderr
    assert 'File "<string>", line 9' in done.stderr
