"""Registered device memory: which ranks allocate it, and when it is freed; over the emulators."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from device_ranks import LONG, device, value
from emulated import emulated_ranks, needs_emulators
from lone_ranks import free_bytes, held
from reducing_ranks import full_of

import nc10d as dist
from nc10d import cuda
from nc10d.backend.nccl.registered_memory import registered_zeros
from nc10d.errors import NCCLError
from nc10d.group.process_group import ProcessGroup

pytestmark = needs_emulators
COUNT = 4096
SHAPES = ((4,), (2, 3), (5,))


def ranks_that_run_out_of_batches_meet_nobody_anew(group: ProcessGroup) -> None:
    """Rank 1 has fewer batches and allocates buckets of zeros; the other ranks allocate nothing."""
    mine = device(group)
    with cuda.on_device(mine):
        parameters = [cuda.zeros(shape, device=mine) for shape in SHAPES]
        reducer = dist.Reducer(parameters, group, cap_bytes=16, allocate=registered_zeros(group))
        for turn in range(3):
            if group.rank == 1 and turn:
                reducer.shadow_pass()
                continue
            reducer.begin()
            for k, x in enumerate(parameters):
                reducer.grad_ready(k, full_of(x, 2.0 + turn))
            reducer.finish()
            mean = 2.0 if turn == 0 else (2.0 + turn) / group.size
            for gradient in reducer.gradients:
                assert value(gradient.reshape((gradient.buffer.count,))) == mean


def memory_stays_until_what_was_queued_is_done(group: ProcessGroup) -> None:
    """A queued copy still has to read the memory when the last array is dropped."""
    target, side = cuda.zeros(COUNT, device=0), cuda.Stream(0)
    make = registered_zeros(group)
    before = free_bytes()
    source = make(COUNT, np.float32)
    source.fill_from(np.full(COUNT, 3.0, np.float32))
    assert free_bytes() < before
    with cuda.on_device(0), held(side.handle):
        with cuda.stream(side):
            cuda.copy_to(target, source)
        del source
        gc.collect()
        registered = make(1, np.float32)
        assert free_bytes() < before
    assert value(target) == 3.0
    del registered
    comes_back_to(before)


class Foreign:
    """An array as CuPy's, whose current stream is `current`."""

    __module__ = "cupy.fake"

    def __init__(self, x: cuda.DeviceArray) -> None:
        self.__cuda_array_interface__ = {**x.__cuda_array_interface__, "stream": None}
        self.owner = x


def memory_stays_until_operations_of_another_group_have_ended(group: ProcessGroup) -> None:
    other = dist.new_group()
    assert isinstance(other, ProcessGroup)
    memory_stays_until_operations_have_ended(group, other)


def memory_stays_until_operations_have_ended(
    group: ProcessGroup, other: ProcessGroup | None = None
) -> None:
    """A synchronous operation keeps no array: CuPy's stream waits, but not the default stream."""
    other = other or group
    side, make = cuda.Stream(0), registered_zeros(group)
    current = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=side.handle))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=current))
        other.all_reduce(cuda.zeros(1, device=0))
        before = free_bytes()
        x = Foreign(make(COUNT, np.float32))
        with cuda.on_device(0), held(side.handle):
            other.all_reduce(x)
            del x
            gc.collect()
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                assert free_bytes() < before
        comes_back_to(before)


def memory_that_cant_be_registered_goes_back(group: ProcessGroup) -> None:
    """The emulator refuses to register the first allocation and to deregister the second."""
    make = registered_zeros(group)
    before = free_bytes()
    with pytest.raises(NCCLError, match="ncclCommRegister"):
        make(COUNT, np.float32)
    assert free_bytes() == before
    make(COUNT, np.float32)
    comes_back_to(before)


def comes_back_to(wanted: int) -> None:
    gc.collect()
    deadline = time.monotonic() + LONG
    while free_bytes() < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.001)


CASES = [
    (ranks_that_run_out_of_batches_meet_nobody_anew, 2, ""),
    (memory_stays_until_what_was_queued_is_done, 1, ""),
    (memory_stays_until_operations_have_ended, 1, ""),
    (memory_stays_until_operations_of_another_group_have_ended, 1, ""),
    (
        memory_that_cant_be_registered_goes_back,
        1,
        "ncclCommRegister@1=fail:3,ncclCommDeregister@1=fail:3",
    ),
]


@pytest.mark.parametrize(
    ("law", "size", "faults"), CASES, ids=lambda x: getattr(x, "__name__", str(x))
)
@pytest.mark.parametrize("nonblocking", ["0", "1"], ids=["blocking", "nonblocking"])
def test_registered_memory_keeps_its_laws(
    law: Callable[..., None], size: int, faults: str, nonblocking: str
) -> None:
    given = {"NC10D_EMULATED_FAULTS": faults, "NC10D_NCCL_NONBLOCKING": nonblocking}
    with emulated_ranks(size, **given) as ranks:
        ranks.run(law)
