"""The NCCL backend behind arrays in host memory, for the suite that checks all backends.

A launch first copies its arrays to device memory; at its end, it copies written arrays back. Rank r
uses device r; ranks share devices where there are fewer.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from copied_back import CopiedBack

from nc10d import cuda
from nc10d.arrays.buffer import Buffer, as_buffer, register
from nc10d.arrays.dtypes import DType
from nc10d.arrays.validate import validate
from nc10d.backend.nccl.backend import NcclBackend
from nc10d.backend.nccl.backend import make as make_nccl
from nc10d.backend.nccl.comm.options import NcclOptions
from nc10d.backend.protocol import Backend, BackendSetup
from nc10d.base.deadline import Deadline
from nc10d.ops import Op
from nc10d.store.base import Store
from nc10d.work import Work

WRITTEN = ("x", "out")
TAGGED = NcclOptions(links="tag")
"""The suite receives messages in any order of their tags; NCCL knows no tags."""


def make(setup: BackendSetup) -> ThroughDevice:
    count = cuda.device_count()
    if setup.rank >= count or setup.size > count:
        # NCCL accepts ranks on the same device only from different hosts.
        os.environ.setdefault("NCCL_HOSTID", f"rank-{setup.rank}")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return ThroughDevice(make_nccl(dataclasses.replace(setup, options=TAGGED)), setup.rank % count)


class ThroughDevice(Backend):
    """Copies arrays to the device, launches, and copies results back."""

    device_type = "cpu"

    def __init__(self, inner: NcclBackend, device: int) -> None:
        self.name = "through-device"
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.device = device

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        for op in ops:
            validate(op, self.rank, self.size)
        copies = Copies(self.device)
        with cuda.on_device(self.device):
            given = [copies.of(op) for op in ops]
            work = self.inner.launch(given, timeout, True)
        assert work is not None
        both = CopiedBack(ops, work, copies.bring_back, self.device)
        if async_op:
            return both
        both.wait()
        return None

    def split(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline, options: Any = None
    ) -> ThroughDevice:
        inner = self.inner.split(ranks, name, store, deadline, TAGGED)
        return ThroughDevice(inner, self.device)

    def abort(self, reason: BaseException) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
        self.inner.close()


class Copies:
    """The device copies of a launch's arrays: a single copy of each array object."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._made: dict[int, Twin] = {}
        self._back: list[tuple[np.ndarray[Any, Any], Twin]] = []

    def of(self, op: Op) -> Op:
        """Return the operation on device copies."""
        fields = {field.name: getattr(op, field.name) for field in dataclasses.fields(op)}
        for name in ("x", "out", "inp"):
            if fields.get(name) is not None:
                fields[name] = self._copy(fields[name], name in WRITTEN)
        return type(op)(**fields)

    def _copy(self, x: Any, written: bool) -> Any:
        if isinstance(x, (list, tuple)):
            return [self._copy(array, written) for array in x]
        found = self._made.get(id(x))
        if found is None:
            found = self._made[id(x)] = Twin(x, self._device)
        if written and x.flags.writeable:
            self._back.append((x, found))
        return found

    def bring_back(self) -> None:
        for x, twin in self._back:
            twin.bring_back(x)


class Twin:
    """A device copy of an ndarray, in the same layout, with the bytes between its elements."""

    def __init__(self, x: np.ndarray[Any, Any], device: int) -> None:
        like = as_buffer(x)
        self.memory = cuda.to_device(memory_of(x), device)
        address = self.memory.address + like.address - like.span[0]
        self.buffer = dataclasses.replace(
            like, address=address, device="cuda", owner=self.memory, writable=True
        )

    def bring_back(self, x: np.ndarray[Any, Any]) -> None:
        """Copy all bytes back to the array, including those between its elements."""
        memory_of(x)[...] = cuda.to_host(self.memory)


def memory_of(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bytes from the first of an array's elements to its last."""
    low, high = as_buffer(x).span
    n = high - low
    return Buffer(low, n, DType.UINT8, "cpu", (x,), True, True, (n,), (1,)).as_numpy()


register(Twin, attrgetter("buffer"), "cuda")
