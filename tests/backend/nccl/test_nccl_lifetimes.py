"""How long a launch keeps its arrays, over the emulators: memory is bounded by what flies."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from device_ranks import afresh, device, full, value
from emulated import emulated_ranks, needs_emulators
from lone_ranks import DOUBLE, held

from nc10d import cuda
from nc10d.backend.nccl.works import FEW
from nc10d.base.signal_errors import Event
from nc10d.cuda.driver import call
from nc10d.cuda.streams import LEGACY
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import Ranks

pytestmark = needs_emulators
TIMES = 200


def most_alive(group: ProcessGroup, reduce: Callable[[cuda.DeviceArray], object]) -> int:
    """Return how many temporary arrays are alive at most, after each has been reduced."""
    alive: weakref.WeakSet[cuda.DeviceArray] = weakref.WeakSet()
    most = 0
    for _ in range(TIMES):
        x = full(group, 1.0)
        alive.add(x)
        reduce(x)
        cuda.synchronize(device(group))
        del x
        most = max(most, len(alive))
    return most


def temporaries_go_at_once(group: ProcessGroup) -> None:
    group.all_reduce(full(group, 1.0))
    assert most_alive(group, group.all_reduce) == 0
    with group.coalescing_manager():
        group.all_reduce(full(group, 1.0))
        group.all_reduce(full(group, 1.0))


def temporaries_on_a_chosen_stream_go_soon(group: ProcessGroup) -> None:
    group.all_reduce(full(group, 1.0))
    with cuda.stream(cuda.Stream(device(group))):
        assert most_alive(group, group.all_reduce) <= FEW


def temporaries_of_works_go_soon(group: ProcessGroup) -> None:
    group.all_reduce(full(group, 1.0))

    def reduce(x: cuda.DeviceArray) -> None:
        work = group.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()

    assert most_alive(group, reduce) <= FEW


def a_dropped_array_is_freed_behind_its_reduction(group: ProcessGroup) -> None:
    x, after = full(group, 3.0), full(group, 0.0)
    group.all_reduce(after)
    alive = weakref.ref(x)
    with cuda.on_device(device(group)), held(LEGACY):
        group.all_reduce(x, DOUBLE)
        call("cuMemcpyDtoDAsync", after.address, x.address, x.nbytes, LEGACY)
        del x
        assert alive() is None
        others = [full_later(group) for _ in range(8)]
    assert value(after) == 6.0
    del others


def full_later(group: ProcessGroup) -> cuda.DeviceArray:
    """Return an array that is written to behind the work of the default stream."""
    made = cuda.empty(100, device=device(group))
    call("cuMemsetD8Async", made.address, 0x7F, made.nbytes, LEGACY)
    return made


def a_chosen_stream_keeps_its_arrays(group: ProcessGroup) -> None:
    """For nothing frees them in the order of that stream."""
    x = full(group, 3.0)
    group.all_reduce(x)
    cuda.synchronize(device(group))
    alive, mine = weakref.ref(x), cuda.Stream(device(group))
    with cuda.on_device(device(group)), held(mine.handle):
        with cuda.stream(mine):
            group.all_reduce(x, DOUBLE)
        del x
        assert alive() is not None
    mine.synchronize()


def a_work_keeps_what_it_returns(group: ProcessGroup) -> None:
    x = full(group, 3.0)
    group.all_reduce(x)
    work: Any = group.all_reduce(x, DOUBLE, async_op=True)
    work.wait()
    del x
    for _ in range(2 * FEW):
        group.all_reduce(full(group, 1.0), async_op=True)
        cuda.synchronize(device(group))
    (found,) = work.result()
    assert value(found) == 6.0


def callbacks_come_on_the_watchdog(group: ProcessGroup) -> None:
    """Whoever finds the end first: the thread that waits, a launch, or the watchdog."""
    threads, ended = list[str](), [Event() for _ in range(100)]
    group.all_reduce(full(group, 1.0))
    for event in ended:
        work: Any = group.all_reduce(full(group, 1.0), async_op=True)

        def note(_: object, event: Event = event) -> None:
            threads.append(threading.current_thread().name)
            event.set()

        work.add_done_callback(note)
        if work._state == 0:
            work.wait_blocking()
    for event in ended:
        assert event.wait(20)
    assert set(threads) <= {"nc10d-nccl", threading.current_thread().name}


LAWS = [
    temporaries_go_at_once,
    temporaries_on_a_chosen_stream_go_soon,
    temporaries_of_works_go_soon,
    a_dropped_array_is_freed_behind_its_reduction,
    a_chosen_stream_keeps_its_arrays,
    a_work_keeps_what_it_returns,
    callbacks_come_on_the_watchdog,
]


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with emulated_ranks(1, NC10D_EMULATED_GPUS="1") as ranks:
        yield ranks


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_arrays_live_as_long_as_their_launches(one: Ranks, law: Callable[[Any], None]) -> None:
    one.run(afresh, [law])
