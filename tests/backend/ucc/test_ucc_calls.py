"""The UCC backend has the laws of polled backends, and handles deaths, UCC's errors and devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from emulated_ucc import emulated
from polled_laws import *  # noqa: F403  (the laws)
from polled_laws import SIZE, OnDevice, a_rank_is_late, raised, whole_group

import nc10d as dist
from nc10d.backend.ucc.backend import UccOptions
from nc10d.backend.ucc.ucc_table import ENUMS
from nc10d.errors import CollectiveTimeout, DistError, PeerLost, UCCError
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AllReduce, Send, premul_sum
from nc10d.testing import Ranks

KINDS = ENUMS["ucc_coll_type_t"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with (
        emulated(tmp_path_factory.mktemp("ucc")),
        Ranks(SIZE, "processes", "ucc", timeout=20.0) as found,
    ):
        yield found


def test_a_rank_that_does_not_come_is_named_at_the_deadline(ranks: Ranks) -> None:
    for text in ranks.run(a_rank_is_late):
        assert "waiting for rank 2" in text


def ucc_never_ends(group: ProcessGroup) -> str:
    sub = whole_group(group)
    sub.set_timeout(0.5)
    os.environ["UCC_EMULATOR_FAULT"] = f"never {KINDS['UCC_COLL_TYPE_ALLREDUCE']} 1"
    try:
        text = raised(CollectiveTimeout, lambda: sub.all_reduce(np.ones(3, np.int32)))
        sub.close()
        return text
    finally:
        del os.environ["UCC_EMULATOR_FAULT"]
        group.barrier()


def test_a_collective_that_ucc_does_not_end_is_a_timeout_on_all_ranks(ranks: Ranks) -> None:
    texts = ranks.run(ucc_never_ends)
    assert len(set(texts)) == 1
    assert "all ranks had entered it, and UCC has not ended it" in texts[0]


def ucc_fails(group: ProcessGroup, stage: str) -> str:
    sub = whole_group(group)
    code = ENUMS["ucc_status_t"]["UCC_ERR_NO_RESOURCE"]
    if group.rank == 1:
        os.environ["UCC_EMULATOR_FAULT"] = f"{stage} {KINDS['UCC_COLL_TYPE_ALLREDUCE']} {code}"
    try:
        return raised(UCCError, lambda: sub.all_reduce(np.ones(3, np.int32)))
    finally:
        os.environ.pop("UCC_EMULATOR_FAULT", None)
        group.barrier()


@pytest.mark.parametrize("stage", ["init", "post", "end"])
def test_an_error_of_ucc_names_its_status_on_all_ranks(ranks: Ranks, stage: str) -> None:
    one, *others = ranks.run(ucc_fails, [stage] * SIZE)
    assert others == [one] * 2
    assert "UCC_ERR_NO_RESOURCE (Resources are not available)" in one


def scatters(group: ProcessGroup) -> None:
    code = ENUMS["ucc_status_t"]["UCC_ERR_NOT_SUPPORTED"]
    os.environ["UCC_EMULATOR_FAULT"] = f"init {KINDS['UCC_COLL_TYPE_SCATTER']} {code}"
    try:
        out = np.zeros(2)
        group.scatter_single(out, np.arange(6.0) if group.rank == 1 else None, 1)
        assert (out == [2 * group.rank, 2 * group.rank + 1]).all()
    finally:
        del os.environ["UCC_EMULATOR_FAULT"]


def test_a_scatter_goes_by_scatterv_where_ucc_has_no_scatter(ranks: Ranks) -> None:
    ranks.run(scatters)


def a_rank_closes_midway(group: ProcessGroup, unaware: bool) -> str:
    """Rank 1 closes the group; if `unaware`, it has not seen that all ranks are in the call."""
    sub = whole_group(group)
    os.environ["UCC_EMULATOR_FAULT"] = f"never {KINDS['UCC_COLL_TYPE_ALLREDUCE']} 1"
    try:
        work = sub.all_reduce(np.ones(3, np.int32), async_op=True)
        assert work is not None
        if group.rank == 1:
            if unaware:
                vars(sub.backend("cpu")._group)["advance"] = lambda: None
            group.barrier()
            sub.close()
            return raised(DistError, work.wait)
        group.barrier()
        return raised(PeerLost, work.wait)
    finally:
        del os.environ["UCC_EMULATOR_FAULT"]
        group.barrier()


@pytest.mark.parametrize("unaware", [False, True])
def test_a_rank_that_leaves_in_the_middle_of_a_collective_is_named(
    ranks: Ranks, unaware: bool
) -> None:
    texts = ranks.run(a_rank_closes_midway, [unaware] * SIZE)
    assert all("rank 1" in text for text in texts)


def survivor(rank: int, store: str) -> str:
    """Return a program: rank 2 dies, and the others print the error."""
    return (
        "import os, nc10d, numpy as np\n"
        f"dist, rank = nc10d, {rank}\n"
        f"dist.init_process_group('ucc', 'file://{store}', 20, 3, rank)\n"
        "if rank == 2: os.kill(os.getpid(), 9)\n"
        "try: dist.all_reduce(np.ones(3))\n"
        "except dist.PeerLost as error: print(error)\n"
    )


def test_a_dead_rank_is_named_at_once(tmp_path: Any) -> None:
    with emulated(tmp_path):
        jobs = [
            subprocess.Popen(
                [sys.executable, "-c", survivor(rank, str(tmp_path / "store"))],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]
        texts = [job.communicate(timeout=60)[0] for job in jobs]
    assert texts[2] == ""
    assert texts[0] == texts[1]
    assert "rank 2" in texts[0]


def refuses_device_arrays(group: ProcessGroup) -> None:
    backend = group.backend("cpu")
    for op, text in (
        (AllReduce(OnDevice("|b1")), "UCC has no SUM of bool on a device"),
        (AllReduce(OnDevice(), premul_sum(2.0)), "UCC has no PREMUL_SUM"),
        (AllReduce(OnDevice(strides=(8,))), "contiguous, only"),
        (Send(OnDevice(), (group.rank + 1) % SIZE), "no messages on cuda"),
    ):
        assert text in raised(TypeError, lambda op=op: backend.launch([op], 5.0, False))  # type: ignore[misc]
    group.barrier()


def test_device_arrays_that_ucc_does_not_take_are_refused_before_anything_is_sent(
    ranks: Ranks,
) -> None:
    ranks.run(refuses_device_arrays)


def test_a_missing_library_is_named_with_what_to_do() -> None:
    code = "import nc10d; nc10d.init_process_group('ucc', rank=0, world_size=1)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NC10D_UCC_LIBRARY": "/nowhere/libucc.so.1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "the backend 'ucc' can't work on this machine" in done.stderr
    assert "/nowhere/libucc.so.1" in done.stderr
    assert "NC10D_UCC_LIBRARY" in done.stderr


def alone_on_ucc(group: ProcessGroup) -> None:
    own = dist.ProcessGroupUCC(group.store, group.rank, SIZE, 20, UccOptions(any_order=True))
    x = np.full(3, group.rank + 1)
    own.all_reduce(x)
    assert (x == 6).all()
    dist.destroy_process_group(own)


def test_a_group_is_made_by_its_class(ranks: Ranks) -> None:
    ranks.run(alone_on_ucc)
