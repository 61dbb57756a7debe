"""A fault scenario: Ctrl-C in every call that waits for another rank."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from benchmarks.faults.forked_ranks import ForkedRanks, Report
from benchmarks.faults.results import LIMIT, TIMEOUT, Result, counted, numbers, outcome_of
from benchmarks.libraries.c10d import C10dLibrary

Call = Callable[[Any], object]
"""Takes a group that only this call uses: the other rank never calls in it."""
_PATIENCE = 2 * LIMIT
_SOON, _LATER = 0.005, 0.03
_LARGE = 1 << 22


def interrupted(library: C10dLibrary, count: int) -> Result:
    """Press Ctrl-C a while after each call has begun; all calls run in a single process."""
    calls = len(waits(library))
    reports: list[Report] = []
    for part, size, expected in ((_meet, 1, 1), (_wait, 2, calls)) * count:
        played = ForkedRanks(size).play(partial(part, library, next(numbers)), expected, _PATIENCE)
        reports += played.reports
    kinds = [report["kind"] for report in reports]
    kinds += ["no answer"] * (count * (calls + 1) - len(reports))
    return Result(tuple(report["late"] for report in reports), counted(kinds))


def _meet(library: C10dLibrary, number: int, ranks: ForkedRanks, rank: int) -> Report:
    """Join a group whose second rank never joins."""
    join = partial(library.join, number, rank, 2, TIMEOUT)
    return _pressed(library, join, random.Random(number))


def _wait(library: C10dLibrary, number: int, ranks: ForkedRanks, rank: int) -> None:
    chance = random.Random(number)
    library.join(number, rank, ranks.size, LIMIT)
    calls = waits(library)
    groups = [library.dist.new_group(timeout=timedelta(seconds=TIMEOUT)) for _ in calls]
    library.call(0, 1)
    if rank == 1:
        signal.pause()
    for call, group in zip(calls.values(), groups, strict=True):
        ranks.report(rank, _pressed(library, partial(call, group), chance))


def _pressed(library: C10dLibrary, call: Callable[[], object], chance: random.Random) -> Report:
    """Return a call's outcome, and its delay after Ctrl-C."""
    sent = 0.0

    def press() -> None:
        nonlocal sent
        sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    def begun() -> object:
        timer.start()  # here, so that Ctrl-C finds the call even if this thread gets no core
        return call()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    timer = threading.Timer(chance.uniform(_SOON, _LATER), press)
    report = outcome_of(library, begun, 0.0)
    with contextlib.suppress(KeyboardInterrupt):  # where the call has ended otherwise
        timer.join()
    return {"kind": report["kind"], "late": report["late"] - sent}


def waits(library: C10dLibrary) -> dict[str, Call]:
    """Return calls that wait for the other rank; nc10d's additional calls come last."""
    dist, ones = library.dist, library.ones
    pair = [ones(4), ones(4)]
    calls: dict[str, Call] = {
        "all_reduce": lambda g: dist.all_reduce(ones(4), group=g),
        "all_reduce of much": lambda g: dist.all_reduce(ones(_LARGE), group=g),
        "broadcast": lambda g: dist.broadcast(ones(4), 1, group=g),
        "reduce": lambda g: dist.reduce(ones(4), 0, group=g),
        "all_gather": lambda g: dist.all_gather(pair, ones(4), group=g),
        "gather": lambda g: dist.gather(ones(4), pair, 0, group=g),
        "scatter": lambda g: dist.scatter(ones(4), None, 1, group=g),
        "reduce_scatter": lambda g: dist.reduce_scatter(ones(4), pair, group=g),
        "all_to_all_single": lambda g: dist.all_to_all_single(ones(4), ones(4), group=g),
        "barrier": lambda g: dist.barrier(group=g),
        "monitored_barrier": lambda g: dist.monitored_barrier(group=g),
        "send": lambda g: dist.send(ones(_LARGE), 1, group=g),
        "recv": lambda g: dist.recv(ones(4), 1, group=g),
        "wait": lambda g: library.begin(g).wait(),
        "wait for a message": lambda g: dist.irecv(ones(4), 1, group=g).wait(),
        "broadcast_object_list": lambda g: dist.broadcast_object_list([None], 1, group=g),
        "all_gather_object": lambda g: dist.all_gather_object([None, None], 1, group=g),
        "gather_object": lambda g: dist.gather_object(1, [None, None], 0, group=g),
        "scatter_object_list": lambda g: dist.scatter_object_list([None], None, 1, group=g),
        "recv_object_list": lambda g: dist.recv_object_list([None], 1, group=g),
        "a store's get": lambda g: _store(g).get("absent"),
        "a store's wait": lambda g: _store(g).wait(["absent"]),
        "new_group": lambda g: dist.new_group(),
    }
    return calls | (_own(dist, ones) if library.name == "nc10d" else {})


def _own(dist: Any, ones: Callable[[int], Any]) -> dict[str, Call]:
    return {
        "coalescing_manager": lambda g: _block(dist, ones, g),
        "a future's wait": lambda g: (
            dist.all_reduce(ones(4), group=g, async_op=True).get_future().wait()
        ),
        "send_object_list": lambda g: dist.send_object_list([bytes(_LARGE)], 1, group=g),
        "a store's multi_get": lambda g: g.store.multi_get(["absent"]),
        "a store's queue_pop": lambda g: g.store.queue_pop("absent"),
        "a store's barrier": lambda g: g.store.barrier("absent", 2),
        "split_group": lambda g: dist.split_group(g, [[0, 1]]),
        "shrink_group": lambda g: dist.shrink_group(group=g),
        "destroy": lambda g: _destroy(dist, ones),
    }


def _store(group: Any) -> Any:
    """Return a group's store: an attribute in nc10d, kept by the module in torch."""
    if hasattr(group, "store"):
        return group.store
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _block(dist: Any, ones: Callable[[int], Any], group: Any) -> None:
    with dist.coalescing_manager(group):
        dist.all_reduce(ones(4), group=group)
        dist.all_reduce(ones(5), group=group)


def _destroy(dist: Any, ones: Callable[[int], Any]) -> None:
    """Destroy all groups while a callback runs that never returns."""
    alone = dist.new_group([0], use_local_synchronization=True)
    entered, leave = threading.Event(), threading.Event()
    work = dist.all_reduce(ones(4), group=alone, async_op=True)

    def callback(_: Any) -> None:
        entered.set()
        leave.wait()

    work.add_done_callback(callback)
    entered.wait()
    try:
        dist.destroy_process_group()
    finally:
        leave.set()
