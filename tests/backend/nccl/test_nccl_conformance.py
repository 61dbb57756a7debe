"""The NCCL backend, over the emulators, meets the contract of every backend.

`nc10d.backend.nccl` lists the exceptions: some reductions must raise a TypeError, and a receive
from any source must raise a ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import through_device
from emulated import emulators, needs_emulators

from nc10d.arrays.dtypes import DType
from nc10d.backend.nccl.launch.datatypes import reduction
from nc10d.backend.registry import register_backend, unregister_backend
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import conformance
from nc10d.testing.cases import NO_OP, OPS, cover
from nc10d.testing.cases import reduction as reduction_of
from nc10d.testing.ranks import Ranks
from nc10d.testing.requirements import (
    REQUIREMENTS,
    any_source_takes_each_message_once,
    receives_take_messages_in_the_order_of_posting,
)

pytestmark = needs_emulators
FEW = (DType.INT64, DType.UINT8, DType.INT16, DType.FLOAT32, DType.BFLOAT16, DType.BOOL)
ALL = tuple(DType)


def has(dtype: DType, op: str) -> bool:
    """Return whether NCCL can reduce `dtype` by `op`."""
    if op == NO_OP:
        return True
    try:
        reduction(dtype, reduction_of(op, dtype))
    except TypeError:
        return False
    return True


class Registered(str):
    """A backend's name that registers the backend in each process that unpickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        return arrive, ()


def arrive() -> str:
    register_backend("through-device", through_device.make)
    return "through-device"


@pytest.fixture(scope="module", params=["blocking", "nonblocking"])
def libraries(request: pytest.FixtureRequest) -> Iterator[None]:
    nonblocking = "1" if request.param == "nonblocking" else "0"
    with emulators(NC10D_NCCL_NONBLOCKING=nonblocking):
        register_backend("through-device", through_device.make)
        yield
        unregister_backend("through-device")


def complaints(size: int, dtypes: tuple[DType, ...], seed: int = 0) -> tuple[int, list[str]]:
    """Return the number of checks on `size` ranks, and the failures."""
    cases = [case for case in cover((size,), dtypes, seed) if has(case.dtype, case.op)]
    from_any = any_source_takes_each_message_once, receives_take_messages_in_the_order_of_posting
    demands = [requirement for requirement in REQUIREMENTS if requirement not in from_any]
    found = []
    with Ranks(size, "processes", Registered("through-device"), timeout=30.0) as ranks:
        for dtype in ALL:
            lacking = tuple(op for op in OPS[:-1] if not has(dtype, op))
            texts = conformance.reduction_complaints(ranks, dtype)
            found += [
                f"{dtype.label}: {text}"
                for text in texts
                if not (text.startswith(lacking) and text.endswith("raised a TypeError"))
            ]
        for case in cases:
            found += [f"{case}: {text}" for text in conformance.complaints(ranks, case)]
        for demand in demands:
            ranks.run(demand)
    return len(ALL) + len(cases) + len(demands), found


@pytest.mark.usefixtures("libraries")
def test_the_nccl_backend_conforms() -> None:
    count, found = complaints(3, FEW)
    assert found == []
    assert count > 80


@pytest.mark.long
@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1000])
def test_the_backend_conforms_with_all_types_and_sizes(size: int, seed: int) -> None:
    assert complaints(size, ALL, seed)[1] == []


def refuses(group: ProcessGroup) -> None:
    x = np.ones(3, np.int16)
    with pytest.raises(TypeError, match=r"NCCL has no SUM of int16: .* convert to int32"):
        group.all_reduce(x)
    group.broadcast(x, 0)  # the group still works


@pytest.mark.usefixtures("libraries")
def test_operations_that_nccl_lacks_are_refused_before_anything_is_sent() -> None:
    with Ranks(2, "processes", Registered("through-device"), timeout=30.0) as ranks:
        ranks.run(refuses)
