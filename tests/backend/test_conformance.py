"""The CPU backend meets the contract of every backend; and the suite finds faulty backends."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from nc10d import ops as O
from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu.backend import make
from nc10d.backend.protocol import BackendSetup
from nc10d.errors import GroupClosed
from nc10d.testing import check_backend, local_backend
from nc10d.testing.cases import CALLS, OPS, SHAPES, CollectiveCase, allowed, cover
from nc10d.testing.local_backend import LocalBackend, LocalHub
from nc10d.testing.modes import MODES
from nc10d.testing.strategies import outputs
from nc10d.work import Work

FEW = (DType.FLOAT32, DType.INT8, DType.BFLOAT16, DType.COMPLEX128, DType.BOOL)


@pytest.mark.slow
def test_the_cpu_backend_conforms_with_ranks_as_threads() -> None:
    assert check_backend("cpu") > 350


@pytest.mark.slow
def test_the_cpu_backend_conforms_with_ranks_as_processes() -> None:
    assert check_backend("cpu", (1, 2, 5), "processes", dtypes=FEW, seed=1) > 120


def test_a_factory_can_be_checked_in_processes() -> None:
    assert check_backend(make, (2,), "processes", dtypes=[DType.FLOAT32], seed=2) > 30


# The cover


def test_the_cover_has_every_pair_that_makes_sense() -> None:
    cases = cover()
    seen = {
        pair
        for case in cases
        for pair in itertools.combinations(
            (case.call, case.dtype, case.op, case.size, case.shape, case.mode), 2
        )
    }
    for dtype in DType:
        assert all((call, dtype) in seen for call in CALLS)
        assert all((dtype, shape) in seen for shape in SHAPES)
        assert all((dtype, mode) in seen for mode in MODES)
        assert all((dtype, op) in seen for op in OPS[:-1] if allowed(dtype, op))
    assert all((call, mode) in seen for call in CALLS for mode in MODES)
    for size in (1, 2, 3, 4, 5):
        assert all((call, size) in seen for call in CALLS)
        assert all((op, size) in seen for op in OPS)
        assert all((size, shape) in seen for shape in SHAPES)
    assert len(cases) < 290


def test_a_case_is_the_same_each_time_it_is_built() -> None:
    case = CollectiveCase("all_to_all", DType.FLOAT16, "-", 3, "ragged", "sync", 5)
    one, other = (np.concatenate([x for row in case.build().inputs for x in row]) for _ in "ab")
    assert one.tobytes() == other.tobytes()
    assert str(case) == "all_to_all of float16, ragged, sync, 3 ranks (seed 5)"


# A backend with a fault is found out


class Hubs:
    """Makes backends of threads and assignments whose `compute` step has a fault."""

    def __init__(self) -> None:
        self._hubs: defaultdict[int, LocalHub] = defaultdict(LocalHub)

    def __call__(self, setup: BackendSetup) -> LocalBackend:
        return LocalBackend(self._hubs[setup.size], setup.group_name, setup.rank, setup.size)


def check(make: Callable[[BackendSetup], Any] | None = None, timeout: float = 30.0) -> int:
    # The first timeout fails all other ranks, and a busy machine is not a fault.
    dtypes = [DType.FLOAT32, DType.INT32, DType.BOOL]
    return check_backend(make or Hubs(), (3,), dtypes=dtypes, timeout=timeout)


def test_the_backend_without_a_fault_conforms() -> None:
    assert check() > 50


def flips_a_bit(ops: Sequence[Any]) -> None:
    for x in outputs(ops[-1])[-1:]:
        x.reshape(-1)[-1:] = 77


def spoils_other_ranks(ops: Sequence[Any]) -> None:
    for op in ops:
        if isinstance(op, O.Reduce) and len(ops) - 1 == op.root:
            ops[0].x[...] = ops[op.root].x


def forgets_one_rank(ops: Sequence[Any]) -> None:
    if isinstance(ops[0], O.Broadcast):
        ops[(ops[0].root + 1) % len(ops)].x[...] = 0


def rounds_down(ops: Sequence[Any]) -> None:
    op = ops[0]
    if isinstance(op, O.AllReduce) and op.op == O.AVG and op.x.dtype == np.int32:
        for one in ops:
            one.x[one.x < 0] -= 1


def writes_behind_the_end(ops: Sequence[Any]) -> None:
    for x in outputs(ops[0])[:1]:
        if x.base is not None:
            x.base.reshape(-1).view(np.uint8)[-1] ^= 1


def uses_its_input_as_scratch(ops: Sequence[Any]) -> None:
    if isinstance(ops[0], O.ReduceScatter) and isinstance(ops[0].inp, np.ndarray):
        ops[0].inp[...] = 0


FAULTS = [
    (flips_a_bit, "must be"),
    (spoils_other_ranks, "reduce"),
    (forgets_one_rank, "broadcast"),
    (rounds_down, "AVG"),
    (writes_behind_the_end, "wrote beside the elements"),
    (uses_its_input_as_scratch, "changed its input"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "expected"), FAULTS, ids=lambda x: getattr(x, "__name__", None))
def test_a_fault_in_what_is_computed_is_named(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Sequence[Any]], None], expected: str
) -> None:
    right = local_backend.compute

    def wrong(ops: Sequence[Any]) -> None:
        right(ops)
        fault(ops)

    monkeypatch.setattr(local_backend, "compute", wrong)
    with pytest.raises(AssertionError, match="checks failed") as caught:
        check()
    assert expected in str(caught.value)


class Careless(LocalBackend):
    """Accepts reductions that have no meaning."""

    def launch(self, ops: Sequence[O.Op], timeout: float, async_op: bool) -> Work | None:
        for op in ops:
            if isinstance(op, O.AllReduce) and op.x.dtype == bool and op.op == O.AVG:
                op.op = O.SUM
        return super().launch(ops, timeout, async_op)


class Deaf(LocalBackend):
    """Notifies no rank of an abort."""

    def abort(self, reason: BaseException) -> None:
        self._closed = GroupClosed("I keep it to myself")


class Hasty(LocalBackend):
    """Leaves a barrier before the other ranks have come."""

    def launch(self, ops: Sequence[O.Op], timeout: float, async_op: bool) -> Work | None:
        early = len(ops) == 1 and isinstance(ops[0], O.Barrier) and not async_op
        work = super().launch(ops, timeout, async_op or early)
        return None if early else work


class Confused(LocalBackend):
    """Ignores the tags of messages."""

    def launch(self, ops: Sequence[O.Op], timeout: float, async_op: bool) -> Work | None:
        for op in ops:
            if isinstance(op, (O.Send, O.Recv)):
                op.tag = 0
        return super().launch(ops, timeout, async_op)


class Small(LocalBackend):
    """Has no prefix reductions."""

    def launch(self, ops: Sequence[O.Op], timeout: float, async_op: bool) -> Work | None:
        if self.lacks_scans and any(isinstance(op, (O.Scan, O.ExScan)) for op in ops):
            raise TypeError("no scans here")
        return super().launch(ops, timeout, async_op)

    @property
    def lacks_scans(self) -> bool:
        return True


class Uneven(Small):
    """Has prefix reductions on some ranks."""

    @property
    def lacks_scans(self) -> bool:
        return self.rank == 1


BACKENDS = [
    (Uneven, "exscan", 5.0),
    (Careless, "reductions of bool", 30.0),
    (Deaf, "an abort reaches everybody", 15.0),  # a rank waits for the abort until its timeout
    (Hasty, "nobody leaves a barrier early", 30.0),
    (Confused, "tags are matched in any order", 30.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "expected", "timeout"), BACKENDS)
def test_a_fault_in_how_it_is_done_is_named(
    kind: type[LocalBackend], expected: str, timeout: float
) -> None:
    with pytest.raises(AssertionError, match="checks failed") as caught:
        check(maker(kind), timeout)
    assert expected in str(caught.value)


@pytest.mark.slow
def test_a_backend_may_lack_scans_on_all_ranks() -> None:
    assert check(maker(Small)) > 50


def maker(kind: type[LocalBackend]) -> Callable[[BackendSetup], Any]:
    hubs: defaultdict[int, LocalHub] = defaultdict(LocalHub)

    class Split(kind):  # type: ignore[misc, valid-type]
        def split(self, ranks: Sequence[int], name: str, *_: Any) -> Any:
            return Split(self.hub, name, ranks.index(self.rank), len(ranks))

    def make(setup: BackendSetup) -> Any:
        return Split(hubs[setup.size], setup.group_name, setup.rank, setup.size)

    return make


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 30_000, 1000))
def test_other_covers_are_right_too(seed: int) -> None:
    check_backend("cpu", seed=seed)
    check_backend("cpu", (2, 4), "processes", dtypes=FEW, seed=seed)
