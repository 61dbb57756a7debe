"""A program without torch has no current context in any thread: every driver call brings its own.

cuda.h lists CUDA_ERROR_INVALID_CONTEXT for the calls that these laws reach.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from emulated import emulated_ranks, needs_emulators

import nc10d as dist
from build import WANTED
from nc10d import cuda, nccl
from nc10d.base.signal_errors import Event
from nc10d.cuda.driver import call
from nc10d.cuda.memory import device_of
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import premul_sum
from nc10d.reducer.timing import DeviceTimer, Moment
from nc10d.testing import Ranks

HERE = importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings")
needs_bindings = pytest.mark.skipif(not (HERE or WANTED), reason="no cuda.bindings: see .ci/run")
pytestmark = [needs_emulators, needs_bindings]


class Foreign:
    """Another library's array, whose device only the driver knows."""

    def __init__(self, memory: cuda.DeviceArray, stream: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {**memory.__cuda_array_interface__, "stream": stream}


def the_watchdog_measures_durations(_group: ProcessGroup) -> None:
    options = nccl.NcclOptions(timing=True)
    timed = dist.new_group([0], backend="nccl", pg_options=options, device_id="cuda:1")
    assert isinstance(timed, ProcessGroup)
    x, ended = cuda.to_device(np.ones(8, np.float32), 1), Event()
    work = timed.all_reduce(x, premul_sum(2.0), async_op=True)
    assert work is not None
    work.add_done_callback(lambda _: ended.set())
    assert ended.wait(20)
    assert work.duration is not None
    timed.all_reduce(x)
    assert set(cuda.to_host(x).tolist()) == {2.0}


def streams_are_ordered_and_waited_for(_group: ProcessGroup) -> None:
    side = cuda.Stream(1)
    source = Foreign(cuda.to_device(np.full(8, 3.0, np.float32), 1), side.handle)
    target = cuda.empty(8, np.float32, 1)
    assert device_of(source) == 1
    cuda.copy_to(target, source)
    side.synchronize()
    assert set(cuda.to_host(target).tolist()) == {3.0}
    del side


def passes_are_timed(_group: ProcessGroup) -> None:
    timer = DeviceTimer(cuda.empty(8, np.float32, 1))
    for moment in Moment:
        timer.record(moment)
    assert timer.durations()["backward_comm_time"] >= 0


LAWS = [the_watchdog_measures_durations, streams_are_ordered_and_waited_for, passes_are_timed]


def without_a_context(group: ProcessGroup, law: Callable[[ProcessGroup], None]) -> None:
    assert not int(call("cuCtxGetCurrent"))
    law(group)
    assert not int(call("cuCtxGetCurrent"))


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    with emulated_ranks(1, NC10D_EMULATED_GPUS="2") as ranks:
        yield ranks


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_no_thread_needs_a_current_context(alone: Ranks, law: Callable[[Any], None]) -> None:
    alone.run(without_a_context, [law])
