"""What goes wrong before a first launch has its communicator, over the emulators."""

from __future__ import annotations

from typing import Any

import pytest
from device_ranks import afresh, device, ones
from emulated import emulated_ranks, needs_emulators

from nc10d import cuda
from nc10d.backend.nccl.launch.planner import LaunchPlanner
from nc10d.errors import NCCLError
from nc10d.group.process_group import ProcessGroup

pytestmark = needs_emulators


def ranks_on_one_gpu_learn_what_to_do(group: ProcessGroup) -> None:
    hint = r'Duplicate GPU detected.*"cuda:staged".*NCCL_HOSTID'
    with pytest.raises(NCCLError, match=hint):
        group.all_reduce(ones(group))


def test_ranks_on_one_gpu_learn_what_to_do() -> None:
    with emulated_ranks(2, NC10D_EMULATED_GPUS="1") as ranks:
        ranks.run(ranks_on_one_gpu_learn_what_to_do)


def any_error_of_a_deferred_launch_ends_its_group(group: ProcessGroup) -> None:
    """The thread that forms the communicator meets the error, and the waiter gets it."""
    x = ones(group)

    def mistaken(*_: Any) -> None:
        raise ValueError("a mistake")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaunchPlanner, "again", mistaken)
        work: Any = group.all_reduce(x, async_op=True)
        with pytest.raises(NCCLError, match=r"all_reduce: ValueError.*a mistake"):
            work.wait()
    with pytest.raises(NCCLError, match="a mistake"):
        group.all_reduce(x)
    cuda.synchronize(device(group))


def test_any_error_of_a_deferred_launch_ends_its_group() -> None:
    given = {"NC10D_EMULATED_FAULTS": "ncclCommInitRankConfig@*=delay:100"}
    with emulated_ranks(1, **given) as ranks:
        ranks.run(afresh, [any_error_of_a_deferred_launch_ends_its_group])
