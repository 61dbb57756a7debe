"""Laws of the backends over a library that is polled (MPI, UCC).

A test module imports the laws by `from polled_laws import *`, and defines a fixture `ranks` with
SIZE ranks on its backend. A rank runs each function with its group.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import own_reduction_cases as own
import pytest
from at_once import at_once
from call_pairs import EQUAL, PAIRS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from overlapping_blocks import (
    CALLS,
    IN_PLACE,
    Call,
    early,
    every_way,
    gathers_in_place,
    shares_alone,
)

import nc10d as dist
from nc10d.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG, PRODUCT, SUM, premul_sum
from nc10d.testing import Ranks

SIZE = 3


def whole_group(group: ProcessGroup, timeout: float = 20.0, options: Any = None) -> ProcessGroup:
    """Make a new group, which the test may break."""
    made = dist.new_group(range(group.size), timeout, pg_options=options)
    assert isinstance(made, ProcessGroup)
    return made


def raised(kind: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def options_of(group: ProcessGroup) -> Any:
    """Return the type of the options of the group's backend."""
    return getattr(dist, f"ProcessGroup{group.backend('cpu').name.upper()}").Options


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


# Blocks


@settings(max_examples=10)
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


@pytest.mark.parametrize("form", IN_PLACE)
def test_an_input_may_be_the_ranks_own_chunk_of_the_output(ranks: Ranks, form: str) -> None:
    ranks.run(gathers_in_place, [form] * SIZE)


# Calls that differ


def calls_differ(group: ProcessGroup) -> str:
    sub, x = whole_group(group), np.full(5, 7.0)
    text = raised(
        CollectiveMismatch, lambda: sub.all_reduce(x) if group.rank else sub.broadcast(x, 1)
    )
    assert (x == 7.0).all()
    assert raised(CollectiveMismatch, sub.barrier) == text
    return text


def test_different_calls_are_an_error_everywhere_and_touch_nothing(ranks: Ranks) -> None:
    one, *others = ranks.run(calls_differ)
    assert others == [one] * 2
    assert "all_reduce(dtype=float64, count=5, op=SUM)" in one
    call = re.escape("broadcast(dtype=float64, count=5, root=1)")
    assert re.search(f"{call} on rank 0|rank 0 called .*{call}", one)


def every_fact_is_compared(group: ProcessGroup) -> None:
    """Launch each pair of calls in a group of its own, of ranks 0 and 1."""
    for name, pair in (*PAIRS.items(), *EQUAL.items()):
        sub = dist.new_group([0, 1])
        if isinstance(sub, ProcessGroup):
            launch = functools.partial(
                sub.backend("cpu").launch, [pair[sub.rank](sub.rank)], 20.0, False
            )
            if name in EQUAL:
                launch()
            else:
                raised(CollectiveMismatch, launch)


def test_each_fact_of_a_call_is_compared(ranks: Ranks) -> None:
    ranks.run(every_fact_is_compared)


def sizes_differ(group: ProcessGroup) -> str:
    sub, rank = whole_group(group), group.rank
    outs = [np.zeros(2 + (rank == 2 and r == 0)) for r in range(SIZE)]
    ins = [np.ones(2) for _ in range(SIZE)]
    text = raised(CollectiveMismatch, lambda: sub.all_to_all(outs, ins))
    assert all((x == 0).all() for x in outs)
    return text


def test_sizes_that_only_two_ranks_know_are_compared_too(ranks: Ranks) -> None:
    texts = ranks.run(sizes_differ)
    assert all("all_to_all: rank 2 expects other sizes" in text for text in texts)


def wrong_length(group: ProcessGroup, sent: int, taken: int) -> None:
    sub = whole_group(group)
    if group.rank == 0:
        sub.isend(np.ones(sent), 1)
    if group.rank == 1:
        raised(CollectiveMismatch, lambda: sub.recv(np.ones(taken), 0))
    if group.rank == 2:  # the group has failed on rank 0 and 1, so on rank 2, too
        raised(CollectiveMismatch, lambda: sub.recv(np.ones(1), 0))
    group.barrier()


@pytest.mark.parametrize(("sent", "taken"), [(5, 3), (3, 5)])
def test_a_message_of_another_length_is_an_error(ranks: Ranks, sent: int, taken: int) -> None:
    ranks.run(wrong_length, [sent] * SIZE, [taken] * SIZE)


# Deadlines and departures


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


def test_a_timeout_fails_the_group_on_all_ranks(ranks: Ranks) -> None:
    for text in ranks.run(a_rank_is_late):
        assert re.search("all_reduce.* timed out on rank", text)


def waits_briefly(group: ProcessGroup) -> None:
    x = np.ones(3)
    if group.rank == 0:
        work = group.all_reduce(x, async_op=True)
        assert work is not None
        raised(CollectiveTimeout, lambda: work.wait(0.05))
        assert not work.is_completed()
        group.send(np.ones(1), 1)
        work.wait()
    else:
        if group.rank == 1:
            group.recv(np.ones(1), 0)
        group.all_reduce(x)
    assert (x == SIZE).all()


def test_a_wait_that_is_too_short_leaves_the_call_alone(ranks: Ranks) -> None:
    ranks.run(waits_briefly)


def a_rank_leaves(group: ProcessGroup) -> None:
    sub = whole_group(group)
    before = time.monotonic()
    if group.rank == 2:
        work = sub.isend(np.arange(4.0), 0, tag=2**31 - 1)
        assert work is not None
        work.wait()
        dist.destroy_process_group(sub)
    else:
        if group.rank == 0:
            got = np.zeros(4)
            sub.recv(got, 2, tag=2**31 - 1)
            assert (got == np.arange(4.0)).all(), "what it sent before must arrive"
            group.send(np.zeros(1), 1)
        else:
            group.recv(np.zeros(1), 0)  # rank 1's failure is rank 0's, too
        text = raised(PeerLost, lambda: sub.recv(np.ones(1), 2))
        assert "rank 2" in text
        assert time.monotonic() - before < 10, "no rank waits for the group's timeout"
    group.barrier()


def test_a_rank_that_waits_for_a_departed_rank_raises_peer_lost(ranks: Ranks) -> None:
    ranks.run(a_rank_leaves)


def a_rank_leaves_before_a_call(group: ProcessGroup) -> None:
    sub = whole_group(group)
    if group.rank == 0:
        dist.destroy_process_group(sub)
    else:
        assert "rank 0" in raised(PeerLost, lambda: sub.all_reduce(np.ones(3)))
    group.barrier()


def test_a_call_that_a_departed_rank_missed_raises_peer_lost(ranks: Ranks) -> None:
    ranks.run(a_rank_leaves_before_a_call)


# Works, threads and options


def no_thread_waits(group: ProcessGroup, count: int) -> None:
    x, over, names = np.full(count, group.rank + 0.5), threading.Event(), []
    work = group.all_reduce(x, async_op=True)
    assert work is not None

    def note(future: Any) -> None:
        names.append(threading.current_thread().name)
        over.set()

    work.get_future().then(note)
    assert over.wait(10), "the thread must move the call along"
    assert (x == 4.5).all()
    assert names == [f"nc10d-{group.backend('cpu').name}"]


@pytest.mark.parametrize("count", [3, 50_000])
def test_a_call_ends_although_no_thread_waits_for_it(ranks: Ranks, count: int) -> None:
    ranks.run(no_thread_waits, [count] * SIZE)


def many_threads(group: ProcessGroup) -> None:
    groups = [whole_group(group) for _ in range(4)]
    sums = np.zeros((4, 30))

    def work(number: int) -> None:
        for turn in range(30):
            x = np.full(200, float(turn + number))
            groups[number].all_reduce(x)
            sums[number, turn] = x[-1]

    at_once(*(functools.partial(work, number) for number in range(4)))
    assert (sums == SIZE * (np.arange(4)[:, None] + np.arange(30))).all()


def test_threads_may_use_groups_of_their_own_at_once(ranks: Ranks) -> None:
    ranks.run(many_threads)


def in_any_order(group: ProcessGroup) -> bytes:
    sub = whole_group(group, options=options_of(group)(any_order=True))
    generators = [np.random.default_rng(rank) for rank in range(SIZE)]
    arrays = [generator.random(1000, np.float32) + np.float32(0.5) for generator in generators]
    x, found = arrays[group.rank], b""
    for op, want in (
        (SUM, sum(arrays)),
        (AVG, sum(arrays) / np.float32(3)),
        (PRODUCT, arrays[0] * arrays[1] * arrays[2]),
        (premul_sum(2.0), 2 * sum(arrays)),
    ):
        for dtype, error in ((np.float32, 1e-6), (np.float16, 1e-2)):
            y = x.astype(dtype)
            sub.all_reduce(y, op)
            assert np.allclose(y, want, rtol=error)
            found += y.tobytes()
    out = np.zeros(1, np.float32)
    sub.reduce_scatter_tensor(out, x[:3].copy(), AVG)
    assert np.allclose(out, sum(arrays)[group.rank] / 3, rtol=1e-6)
    sub.close()
    return found


def test_ranks_get_the_same_bits_where_the_library_chooses_the_order(ranks: Ranks) -> None:
    assert len(set(ranks.run(in_any_order))) == 1


def refuses_options(group: ProcessGroup) -> None:
    name = options_of(group).__name__
    assert name in raised(TypeError, lambda: whole_group(group, options="fast"))
    group.barrier()


@pytest.mark.parametrize("name", own.OPS)
def test_ones_own_reductions_fold_in_rank_order(ranks: Ranks, name: str) -> None:
    for count in (0, 1, 300):
        ranks.run(own.in_every_form, [name] * SIZE, [count] * SIZE)


def test_arrays_hold_the_fields_and_rows_of_records(ranks: Ranks) -> None:
    ranks.run(own.fields)
    ranks.run(own.rows)


def test_options_of_another_type_are_refused(ranks: Ranks) -> None:
    ranks.run(refuses_options)
