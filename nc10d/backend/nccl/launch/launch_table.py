"""A launch as a table of C calls: events, group, operations, events. Built once, run often.

    enter: number and log the call             and compare it with those of peers
    record `before` on the current stream      the work queued there comes first
    wait for it on each communicator's stream
    group start, the operations' calls, group end; kernels that fold, and a group of gathers
    record `ended` on that stream              the Work polls it
    wait for it on the current stream          only if the call is synchronous

The compiled loop sets the current stream and `ended`, which differ from launch to launch. NCCL
has no order inside a group, so a block's operations that share memory are in different groups.
"""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from nc10d.arrays.access import touched
from nc10d.arrays.buffer import Buffer, as_buffer, overlap
from nc10d.arrays.intervals import disjoint
from nc10d.backend.nccl.bindings.entering import nc10d_nccl_enter
from nc10d.backend.nccl.bindings.library import Library
from nc10d.backend.nccl.bindings.native import ENDS, GROUPED, NO_CONTEXT, PLAIN, SCALE, WORDS
from nc10d.backend.nccl.comm.comm_streams import CommStream
from nc10d.backend.nccl.launch.call_board import Caller
from nc10d.backend.nccl.launch.compared_call import CallText
from nc10d.backend.nccl.launch.nccl_calls import Call
from nc10d.cuda.driver import address, context
from nc10d.kernels.gpu.gpu_pack import THREADS
from nc10d.ops import Op

_PAD = (0,) * 8
AFTER_EVENT = 2
_LAUNCH = "cuLaunchKernelEx"
_CUDA_FUNCTIONS = ("cuEventRecord", "cuStreamWaitEvent", _LAUNCH)
Row = tuple[int, ...]


class Placed(NamedTuple):
    """A call, the communicator that runs it, and the operation's place in the launch."""

    comm_stream: CommStream
    call: Call
    place: int


class Events(NamedTuple):
    """A launch's events by handle; `begun` is 0 without timing, `joint` a stream or 0."""

    # A launch with several communicators ends on the stream `joint`, else on its own stream.

    before: int
    begun: int
    joint: int


class LaunchTable:
    """The rows of one launch, at `address`; run under the communicators' locks."""

    # Row `ended` records the event by which the launch ends. The last row then makes the current
    # stream wait for that event. A deferred launch has been entered by its `caller` and has the
    # event `before`: such a launch runs from row AFTER_EVENT.

    __slots__ = (
        *("_keep", "_rows", "address", "begun", "caller"),
        *("comm_streams", "ended", "lock", "places"),
    )

    def __init__(
        self,
        comm_streams: tuple[CommStream, ...],
        events: Events,
        body: Body,
        rows: TableRows,
        caller: Caller,
        keep: tuple[CallText, object],
    ) -> None:
        """Lay out `body`'s rows, and those around them, for formed `comm_streams`.

        `keep` is the memory that the calls use: the call's text, and more.
        """
        self._keep = keep, rows.kept
        self.caller = caller
        self.comm_streams = comm_streams
        locks = [comm_stream.formed.lock for comm_stream in comm_streams]
        self.lock = locks[0] if len(locks) == 1 else _Locks(locks)
        self.begun = events.begun
        record, wait = address("cuEventRecord"), address("cuStreamWaitEvent")
        rows.add(nc10d_nccl_enter.address, caller.address, keep[0].address)
        rows.add(record, events.before, 0)
        for comm_stream in comm_streams:
            rows.add(wait, comm_stream.stream, events.before, 0)
        if events.begun:
            rows.add(record, events.begun, comm_streams[0].stream)
        body(rows)
        last = comm_streams[0].stream
        if len(comm_streams) > 1:
            last = events.joint
            rows.extend((record, each.event, each.stream) for each in comm_streams)
            rows.extend((wait, last, comm_stream.event, 0) for comm_stream in comm_streams)
        self.ended = rows.count
        rows.add(record, 0, last)
        rows.add(wait, 0, 0, 0)
        self.places = rows.places
        self._rows = rows.words
        self.address = self._rows.buffer_info()[0]

    def entering(self, answer: int) -> int:
        """Return the answer from the row that enters the launch, 0 if a later row has failed."""
        number, code = divmod(answer, SCALE)
        return code if number == 1 else 0

    def culprit(self, answer: int) -> tuple[int, int | None, bool]:
        """Return a failed run's code, its operation's place or None, and whether CUDA failed."""
        number, code = divmod(answer, SCALE)
        row = number - 1
        if number == NO_CONTEXT:
            return code, None, True
        by_cuda = self._rows[row * WORDS] in map(address, _CUDA_FUNCTIONS)
        spans = (places[row - at : row - at + 1] for at, places in self.places if row >= at)
        return code, next((place for span in spans for place in span), None), by_cuda


class DeviceContext:
    """The rows that make a device's context current around a table, and their `address`."""

    def __init__(self, device: int) -> None:
        self._before = array("q", [0])  # the driver writes the popped context here
        put_back = self._before.buffer_info()[0]
        push, pop = address("cuCtxPushCurrent_v2"), address("cuCtxPopCurrent_v2")
        rows = (
            (push, 1, PLAIN, int(context(device)), *_PAD[1:]),
            (pop, 1, PLAIN, put_back, *_PAD[1:]),
        )
        self._rows = array("q", [*rows[0], *rows[1]])
        self.address = self._rows.buffer_info()[0]


class _Locks:
    """Several communicators' locks, held together."""

    def __init__(self, locks: Sequence[threading.RLock]) -> None:
        self._locks = locks
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        for lock in self._locks:
            self._stack.enter_context(lock)

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class TableRows:
    """The rows in a table that is being built."""

    def __init__(self, library: Library) -> None:
        self.words = array("q")
        self.count = 0
        self.places: list[tuple[int, Sequence[int]]] = []
        self.kept: list[object] = []
        self._address = library.address

    def add(self, function: int, *arguments: int, mark: int = PLAIN) -> None:
        """Add a call."""
        count = len(arguments)
        self.words.extend((function, count, mark, *arguments, *_PAD[count:]))
        self.count += 1

    def of_operation(self, place: int, row: Row) -> None:
        """Add a call that belongs to an operation, if there is one."""
        if row:
            self.places.append((self.count, [place]))
            self.add(*row)

    def extend(self, rows: Iterable[Row]) -> None:
        """Add calls that belong to no operation."""
        for row in rows:
            self.add(*row)

    def kernels(self, placed: Sequence[Placed]) -> None:
        """Add launches of kernels; the rows refer to their arguments, which are kept."""
        for comm_stream, (kernel, blocks, *arguments), place in placed:
            # A CUlaunchConfig (cuda.h), arguments, and their addresses.
            config = blocks | 1 << 32, 1 | THREADS << 32, 1 | 1 << 32, 0, comm_stream.stream, 0, 0
            words = array("q", [*config, *arguments, *arguments])
            at, first, last = words.buffer_info()[0], len(config), len(config) + len(arguments)
            words[last:] = array("q", range(at + 8 * first, at + 8 * last, 8))
            self.kept.append(words)
            self.places.append((self.count, [place]))
            self.add(address(_LAUNCH), at, kernel, at + 8 * last, 0)

    def group(self, placed: Sequence[Placed]) -> None:
        """Add calls as a group; a single call needs no group."""
        several = len(placed) > 1
        mark = GROUPED if several else PLAIN
        if several:
            self.add(self._address("ncclGroupStart"))
        ends = {
            comm_stream: (comm_stream.formed.handle, comm_stream.stream)
            for comm_stream, _, _ in placed
        }
        self.places.append((self.count, [place for _, _, place in placed]))
        for comm_stream, call, _ in placed:
            self.add(self._address(call[0]), *call[1:], *ends[comm_stream], mark=mark)
        if several:
            self.add(self._address("ncclGroupEnd"), mark=ENDS)

    def block(self, rows: array[int]) -> None:
        """Add a group of finished rows, a row for each operation in order."""
        count = len(rows) // WORDS
        self.add(self._address("ncclGroupStart"))
        self.places.append((self.count, range(count)))
        self.words += rows
        self.count += count
        self.add(self._address("ncclGroupEnd"), mark=ENDS)


Body = Callable[[TableRows], None]
"""A function that adds the calls for a launch's operations."""


class Grouped(NamedTuple):
    """A group's calls, in the steps of `OperationCalls`, and kernels before and behind them."""

    placed: Sequence[Sequence[Placed]]
    before: Sequence[Placed]
    behind: Sequence[Placed]


def grouped(groups: Sequence[Grouped], comm_streams: tuple[CommStream, ...]) -> Body:
    """Return the function that adds groups of calls, in order."""

    def add(rows: TableRows) -> None:
        for number, group in enumerate(groups):
            if number:
                rows.extend(_in_step(comm_streams))
            calls, kernels, gathers = group.placed
            rows.kernels(group.before)
            rows.group(calls)
            rows.kernels(kernels)
            rows.group(gathers)
            rows.kernels(group.behind)

    return add


def _in_step(comm_streams: Sequence[CommStream]) -> Iterable[Row]:
    """Make the streams wait for each other."""
    record, wait = address("cuEventRecord"), address("cuStreamWaitEvent")
    if len(comm_streams) > 1:
        yield from ((record, comm_stream.event, comm_stream.stream) for comm_stream in comm_streams)
        for comm_stream in comm_streams:
            others = (other for other in comm_streams if other is not comm_stream)
            yield from ((wait, comm_stream.stream, other.event, 0) for other in others)


def in_groups(ops: Sequence[Op]) -> list[list[int]]:
    """Return the places of a block's operations, in groups without shared memory."""
    # An operation begins a new group if it shares memory with an operation in the present group,
    # and either writes there. All ranks must compute the same groups: a program whose arrays
    # overlap on some ranks only is wrong.
    together = [list(range(len(ops)))]
    if len(ops) < 2:
        return together
    uses = [_uses(op) for op in ops]
    if disjoint(x.span for several in uses for x, _ in several):
        return together
    groups: list[list[int]] = [[]]
    for place, own_uses in enumerate(uses):
        if any(_clash(own_uses, uses[other]) for other in groups[-1]):
            groups.append([])
        groups[-1].append(place)
    return groups


def _uses(op: Op) -> list[tuple[Buffer, bool]]:
    """Return the memory that an operation uses, and whether some rank writes there."""
    return [(as_buffer(x), written) for x, written in touched(op)]


def _clash(some: Sequence[tuple[Buffer, bool]], others: Sequence[tuple[Buffer, bool]]) -> bool:
    """Return whether an array in `some` overlaps an array in `others`, and either is written."""
    # Only elements count, not the gaps between them, which may differ between ranks.
    return any((a[1] or b[1]) and overlap(a[0], b[0]) for a in some for b in others)
