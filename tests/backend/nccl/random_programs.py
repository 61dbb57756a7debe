"""Random programs on devices: the ranks that run them, and the same steps in a sequential world.

A program is a list of steps that all ranks know; each rank takes its own part in each, in the
list's order. So all programs are legal, with any number of hardware queues, and with one kernel for
each communicator at a time. Arrays are used on random streams; a rank orders a use after the last
one by the Work's wait() on the stream of the new use, or by an event between the two streams.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import nc10d as dist
from nc10d import cuda
from nc10d.cuda.driver import call, driver
from nc10d.cuda.streams import LEGACY, PER_THREAD, StreamKey, order_after
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import MAX, SUM

LENGTHS = 6, 6, 3000, 3000
"""Elements of a rank's arrays; two of each length, of which a step may use either."""
STREAMS, CAPTURED = 5, 4
"""Two streams of one's own, a blocking one, both default streams; all but the last are captured."""
ALL_REDUCE, MAXIMUM, BROADCAST, ALL_TO_ALL = "all_reduce", "maximum", "broadcast", "all_to_all"
COLLECTIVES = ALL_REDUCE, MAXIMUM, BROADCAST, ALL_TO_ALL
MESSAGE, EXCHANGE, COPY, WAIT, BLOCK, GRAPH = (
    "message",
    "exchange",
    "copy",
    "wait",
    "block",
    "graph",
)
Array = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True)
class Way:
    """How a rank takes part in a step: with which of two arrays, on which stream, waiting when."""

    second: bool
    stream: int
    later: bool


@dataclass(frozen=True)
class Step:
    """A step of all ranks, or of the two ranks of `pair`, or of `inner` steps.

    `long` chooses the arrays' length; `root` is a rank of the group. A graph's `mode` is that of
    its capture, and `turns` is how often it runs.
    """

    kind: str
    ways: tuple[Way, ...]
    group: int = 0
    long: bool = False
    root: int = 0
    pair: tuple[int, int] = (0, 1)
    tag: int = 0
    inner: tuple[Step, ...] = ()
    mode: int = 1
    turns: int = 1


@dataclass(frozen=True)
class Program:
    """Steps of `size` ranks in groups, whose first is all ranks."""

    size: int
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Machine:
    """A device that hampers programs: see the emulators' variables of the same names."""

    queues: int
    bounded: bool
    init_sync: bool
    delays: int

    def variables(self, kernels: int) -> dict[str, str]:
        """Return the environment; `kernels` is how many communicators the program has."""
        return {
            "CUDA_DEVICE_MAX_CONNECTIONS": str(self.queues),
            "NC10D_EMULATED_KERNELS": str(kernels if self.bounded else 0),
            "NC10D_EMULATED_INIT_SYNC": str(int(self.init_sync)),
            "NC10D_EMULATED_DELAYS": str(self.delays),
        }


def number_of(way: Way, long: bool, other: bool = False) -> int:
    """Return the number of the array that a rank uses, or of the other one of that length."""
    return 2 * long + (way.second != other)


def communicators(program: Program) -> int:
    """Return how many communicators a program needs: one for each group, and each direction's."""
    links = {step.pair for step in program.steps if step.kind in (MESSAGE, EXCHANGE)}
    links |= {step.pair[::-1] for step in program.steps if step.kind == EXCHANGE}
    return len(program.groups) + len(links)


def initial(rank: int, number: int) -> Array:
    return np.arange(LENGTHS[number], dtype=np.uint32) * (number + 3) + 1000 * (rank + 1)


# The sequential world


def expected(program: Program) -> list[list[Array]]:
    """Return each rank's arrays after the program, by NumPy."""
    world = [[initial(rank, n) for n in range(len(LENGTHS))] for rank in range(program.size)]
    for step in program.steps:
        _imagine(program, step, world)
    return world


def _imagine(program: Program, step: Step, world: list[list[Array]]) -> None:
    def mine(rank: int, other: bool = False) -> Array:
        return world[rank][number_of(step.ways[rank], step.long, other)]

    members = program.groups[step.group]
    if step.kind in (BLOCK, GRAPH):
        for _ in range(step.turns):
            for inner in step.inner:
                _imagine(program, inner, world)
    elif step.kind in (ALL_REDUCE, MAXIMUM):
        fold = np.add if step.kind == ALL_REDUCE else np.maximum
        result = fold.reduce([mine(rank) for rank in members], dtype=np.uint32)
        for rank in members:
            mine(rank)[:] = result
    elif step.kind == BROADCAST:
        sent = mine(members[step.root]).copy()
        for rank in members:
            mine(rank)[:] = sent
    elif step.kind == ALL_TO_ALL:
        rows = {rank: np.split(mine(rank).copy(), len(members)) for rank in members}
        for place, rank in enumerate(members):
            mine(rank, other=True)[:] = np.concatenate([rows[r][place] for r in members])
    elif step.kind in (MESSAGE, EXCHANGE):
        src, dst = step.pair
        back = mine(dst).copy()
        mine(dst, other=step.kind == EXCHANGE)[:] = mine(src)
        if step.kind == EXCHANGE:
            mine(src, other=True)[:] = back
    elif step.kind == COPY:
        for rank in range(program.size):
            mine(rank, other=True)[:] = mine(rank)


# A rank


class Runner:
    """A rank that runs a program. A place is an array's number, or a group's, as "group 0"."""

    def __init__(self, program: Program, groups: Sequence[ProcessGroup | None], rank: int) -> None:
        self.program = program
        self.rank = rank
        self.groups = groups
        self.device = rank % cuda.device_count()
        self._own = [cuda.Stream(self.device) for _ in range(2)]
        with cuda.on_device(self.device):
            self._blocking = call("cuStreamCreate", 0)
        self.streams = [*(stream.handle for stream in self._own), int(self._blocking)]
        self.streams += [PER_THREAD, LEGACY]
        self.arrays = [cuda.to_device(initial(rank, n), self.device) for n in range(len(LENGTHS))]
        self._last: dict[object, Any] = {}  # the Work, or a stream's handle, that used a place last
        self._works: list[Any] = []
        self._graphs: list[Any] = []

    def run(self) -> list[Array]:
        """Run the program; return the arrays."""
        for group in self.groups:  # a graph needs a communicator that has been formed
            if group is not None:
                group.all_reduce(cuda.to_device(np.zeros(1, np.uint32), self.device))
        cuda.synchronize(self.device)
        with cuda.on_device(self.device):
            for step in self.program.steps:
                self._take_part(step)
            for place in list(self._last):
                self._order(place, self.streams[0])
            call("cuStreamSynchronize", self.streams[0])
            call("cuStreamDestroy", self._blocking)
        for work in self._works:  # a failed one has let the stream go on, too
            work.wait_blocking()
        found = [cuda.to_host(x) for x in self.arrays]
        for destroy, handle in self._graphs:
            call(destroy, handle)
        return found

    def _take_part(self, step: Step) -> None:
        way = step.ways[self.rank]
        stream = self.streams[way.stream % CAPTURED if step.kind == GRAPH else way.stream]
        members = self.program.groups[step.group]
        if step.kind in (MESSAGE, EXCHANGE) and self.rank not in step.pair:
            return
        if step.kind == WAIT:
            for place in list(self._last):
                self._order(place, stream)
        elif step.kind == COPY:
            x, y = (self.arrays[number_of(way, step.long, other)] for other in (False, True))
            with self._using(step, stream):
                call("cuMemcpyDtoDAsync", y.address, x.address, x.nbytes, stream)
        elif step.kind in (MESSAGE, EXCHANGE):
            self._send(step, way, stream)
        elif self.rank in members:
            run = {BLOCK: self._block, GRAPH: self._graph}.get(step.kind, self._collective)
            run(step, way, stream)

    def _order(self, place: object, stream: int) -> None:
        """Let later work on a stream come after a place's last use."""
        last = self._last.get(place)
        if isinstance(last, int):
            order_after(StreamKey(stream, self.device), StreamKey(last, self.device))
        elif last is not None:
            with cuda.stream(stream):
                last.wait()
        self._last[place] = stream

    def _places(self, step: Step) -> set[object]:
        """Return the places that this rank uses in a step."""
        if step.inner:
            return {place for inner in step.inner for place in self._places(inner)}
        way, members = step.ways[self.rank], self.program.groups[step.group]
        numbers = {number_of(way, step.long)}
        if step.kind in (ALL_TO_ALL, EXCHANGE, COPY):
            numbers.add(number_of(way, step.long, other=True))
        in_group = step.kind in COLLECTIVES and self.rank in members
        return {*numbers, f"group {step.group}"} if in_group else {*numbers}

    @contextmanager
    def _using(self, step: Step, stream: int) -> Iterator[None]:
        for place in self._places(step):
            self._order(place, stream)
        with cuda.stream(stream):
            yield

    def _done(self, step: Step, work: Any, way: Way, stream: int) -> None:
        """Wait on the stream, or leave that to the next use."""
        self._works.append(work)
        if not way.later:
            with cuda.stream(stream):
                work.wait()
        for place in self._places(step):
            self._last[place] = work if way.later else stream

    def _started(self, step: Step, async_op: bool) -> Any:
        group, way = self.groups[step.group], step.ways[self.rank]
        assert group is not None
        x, y = (self.arrays[number_of(way, step.long, other)] for other in (False, True))
        calls: dict[str, Callable[[], Any]] = {
            ALL_REDUCE: lambda: group.all_reduce(x, SUM, async_op=async_op),
            MAXIMUM: lambda: group.all_reduce(x, MAX, async_op=async_op),
            BROADCAST: lambda: group.broadcast(x, step.root, async_op=async_op),
            ALL_TO_ALL: lambda: group.all_to_all_single(y, x, async_op=async_op),
        }
        return calls[step.kind]()

    def _collective(self, step: Step, way: Way, stream: int) -> None:
        with self._using(step, stream):
            work = self._started(step, True)
        self._done(step, work, way, stream)

    def _block(self, step: Step, way: Way, stream: int) -> None:
        group = self.groups[step.group]
        assert group is not None
        with self._using(step, stream):
            with group.coalescing_manager(async_ops=True) as block:
                for inner in step.inner:
                    self._started(inner, False)
            for work in block.works:
                self._works.append(work)
                work.wait()
        for place in self._places(step):
            self._last[place] = stream

    def _send(self, step: Step, way: Way, stream: int) -> None:
        group = self.groups[0]
        assert group is not None
        (peer,) = set(step.pair) - {self.rank}
        x, y = (self.arrays[number_of(way, step.long, other)] for other in (False, True))
        with self._using(step, stream):
            if step.kind == MESSAGE:
                start = group.isend if self.rank == step.pair[0] else group.irecv
                work = start(x, peer, step.tag)
            else:
                with group.coalescing_manager(async_ops=True) as block:
                    group.irecv(y, peer, step.tag)
                    group.isend(x, peer, step.tag)
                (work,) = block.works
        self._done(step, work, way, stream)

    def _graph(self, step: Step, way: Way, stream: int) -> None:
        modes = driver().CUstreamCaptureMode
        with self._using(step, stream):
            call("cuStreamBeginCapture", stream, modes(step.mode))
            for inner in step.inner:
                self._started(inner, False)
            graph = call("cuStreamEndCapture", stream)
            runs = call("cuGraphInstantiate", graph, 0)
            self._graphs += [("cuGraphExecDestroy", runs), ("cuGraphDestroy", graph)]
            for _ in range(step.turns):
                call("cuGraphLaunch", runs, stream)
        for place in self._places(step):
            self._last[place] = stream


def run_program(world: ProcessGroup, program: Program, machine: Machine) -> list[Array] | None:
    """Run this rank's part in new groups; return its arrays, None for a rank too many."""
    os.environ.update(machine.variables(communicators(program)))
    made = [dist.new_group(members) for members in program.groups]
    groups = [group if isinstance(group, ProcessGroup) else None for group in made]
    if world.rank >= program.size:
        return None
    found = Runner(program, groups, world.rank).run()
    for group in groups:
        if group is not None:
            dist.destroy_process_group(group)
    return found
