"""The UCC backend handles blocks, mismatches, deadlines, deaths, UCC's errors and callbacks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from emulated_ucc import emulated
from hypothesis import example, given, settings
from hypothesis import strategies as st
from overlapping_blocks import CALLS, Call, early, every_way, shares_alone
from polled_laws import (
    SIZE,
    calls_differ,
    every_fact_is_compared,
    raised,
    sizes_differ,
    whole_group,
)

import nc10d as dist
from nc10d.backend.ucc.backend import UccOptions
from nc10d.backend.ucc.ucc_table import ENUMS
from nc10d.errors import CollectiveTimeout, DistError, PeerLost, UCCError
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG, PRODUCT, AllReduce, Send, premul_sum
from nc10d.testing import Ranks

KINDS = ENUMS["ucc_coll_type_t"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with (
        emulated(tmp_path_factory.mktemp("ucc")),
        Ranks(SIZE, "processes", "ucc", timeout=20.0) as found,
    ):
        yield found


# Blocks


@settings(max_examples=6, deadline=None)
@example([("message", 0, 0), ("sum", 0, 0)], "i4", "C")
@given(CALLS, st.sampled_from(["i4", "f8", "u1"]), st.sampled_from("CF"))
def test_a_block_is_its_calls_in_order(
    ranks: Ranks, calls: list[Call], dtype: str, order: str
) -> None:
    ranks.run(every_way, [calls] * SIZE, [dtype] * SIZE, [order] * SIZE)


def test_a_rank_with_overlapping_arrays_orders_the_block_for_all_ranks(ranks: Ranks) -> None:
    ranks.run(shares_alone)


@pytest.mark.parametrize("src", [1, None])
def test_an_early_message_waits_for_its_turn(ranks: Ranks, src: int | None) -> None:
    ranks.run(early, [src] * SIZE)


# Mismatches, deadlines, deaths


def test_different_calls_are_an_error_everywhere_and_touch_nothing(ranks: Ranks) -> None:
    one, *others = ranks.run(calls_differ)
    assert others == [one] * 2
    assert "broadcast(dtype=float64, count=5, root=1)" in one
    assert "all_reduce(dtype=float64, count=5, op=SUM)" in one


def test_each_fact_of_a_call_is_compared(ranks: Ranks) -> None:
    ranks.run(every_fact_is_compared)


def test_sizes_that_only_two_ranks_know_are_compared_too(ranks: Ranks) -> None:
    texts = ranks.run(sizes_differ)
    assert all("all_to_all: rank 2 expects other sizes" in text for text in texts)


def a_rank_is_late(group: ProcessGroup) -> str:
    sub = whole_group(group)
    sub.set_timeout(0.3)
    call = lambda: sub.all_reduce(np.ones(3))  # noqa: E731
    if group.rank < 2:
        text = raised(CollectiveTimeout, call)
        group.barrier()
        return text
    group.barrier()
    return raised(CollectiveTimeout, call)


def test_a_rank_that_does_not_come_is_named_at_the_deadline(ranks: Ranks) -> None:
    for text in ranks.run(a_rank_is_late):
        assert "rank 2" in text


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


# Works and options


def no_thread_waits(group: ProcessGroup) -> str:
    x, over, names = np.full(50_000, group.rank + 0.5), threading.Event(), []
    work = group.all_reduce(x, async_op=True)
    assert work is not None

    def note(future: Any) -> None:
        names.append(threading.current_thread().name)
        over.set()

    work.get_future().then(note)
    assert over.wait(10), "the thread must move the call along"
    assert (x == 4.5).all()
    return names[0]


def test_a_call_ends_although_no_thread_waits_for_it(ranks: Ranks) -> None:
    assert set(ranks.run(no_thread_waits)) == {"nc10d-ucc"}


def in_any_order(group: ProcessGroup) -> bytes:
    sub = whole_group(group, options=UccOptions(any_order=True))
    rng = [np.random.default_rng(rank) for rank in range(SIZE)]
    all_of = [generator.random(1000, np.float32) + np.float32(0.5) for generator in rng]
    x = all_of[group.rank]
    for op, want in (
        (dist.SUM, sum(all_of)),
        (AVG, sum(all_of) / np.float32(3)),
        (PRODUCT, all_of[0] * all_of[1] * all_of[2]),
        (premul_sum(2.0), 2 * sum(all_of)),
    ):
        for dtype, error in ((np.float32, 1e-6), (np.float16, 1e-2)):
            y = x.astype(dtype)
            sub.all_reduce(y, op)
            assert np.allclose(y, want, rtol=error)
    out = np.zeros(1, np.float32)
    sub.reduce_scatter_tensor(out, x[:3].copy(), AVG)
    assert np.allclose(out, sum(all_of)[group.rank] / 3, rtol=1e-6)
    sub.close()
    return y.tobytes()


def test_ucc_may_choose_the_order_of_sums(ranks: Ranks) -> None:
    assert len(set(ranks.run(in_any_order))) == 1


def refuses_options(group: ProcessGroup) -> None:
    assert "UccOptions" in raised(TypeError, lambda: whole_group(group, options="fast"))
    group.barrier()


def test_options_of_another_type_are_refused(ranks: Ranks) -> None:
    ranks.run(refuses_options)


class OnDevice:
    """An array that claims to be in CUDA memory."""

    def __init__(self, typestr: str = "<f4", strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4,),
            "typestr": typestr,
            "data": (1 << 32, False),
            "strides": strides,
            "version": 3,
        }


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
