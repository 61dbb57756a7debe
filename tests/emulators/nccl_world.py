"""A rank of the libnccl emulator's tests: a device, a communicator and a stream."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from driving import TYPES, Gpu, Nccl

from nc10d.group.process_group import ProcessGroup


class World:
    """A rank's communicator, stream and arrays."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.gpu = Gpu(group.rank)
        self.nccl = Nccl()
        self.comm = self.nccl.init(group)
        self.stream = self.gpu.stream()

    def call(self, name: str, *args: Any) -> None:
        self.nccl(name, *args, self.comm, self.stream)

    def wait(self) -> None:
        self.gpu("cuStreamSynchronize", self.stream)

    def add_up(self, comm: int | None = None, stream: int | None = None) -> int:
        """Launch a sum of four ones, on a communicator and stream of one's own if given."""
        at = self.gpu.put(np.ones(4))
        comm, stream = self.comm if comm is None else comm, stream or self.stream
        self.nccl("ncclAllReduce", at, at, 4, TYPES["float64"], 0, comm, stream)
        return at


_mine: list[World] = []


def world(group: ProcessGroup) -> World:
    """Return this process's World, which no test may break."""
    if not _mine:
        _mine.append(World(group))
    return _mine[0]


def fresh(group: ProcessGroup, hosts: bool = False) -> World:
    """Return a World with a communicator that the test may break; `hosts`: one for each rank."""
    if hosts:
        os.environ["NCCL_HOSTID"] = f"host {group.rank}"
    try:
        return World(group)
    finally:
        os.environ.pop("NCCL_HOSTID", None)
