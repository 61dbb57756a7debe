"""A launch as a table of C calls: events, group, operations, events. Built once, run often.

    tell the peers what comes                  a record that they read if this rank dies
    record `before` on the current stream      what is queued there comes first
    wait for it on each lane's stream
    group start, the operations' calls, group end
    record `ended` on the lane's stream        the Work looks at this
    wait for it on the current stream          only if the call is synchronous

What differs from launch to launch, the current stream and `ended`, is set by the loop. Where a
block's operations touch the same memory they are in several groups, one behind the other: inside a
group NCCL has no order.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nc10d.arrays.access import touched
from nc10d.arrays.buffer import Buffer, as_buffer, overlap
from nc10d.arrays.intervals import disjoint
from nc10d.backend.nccl.bindings.native import ENDS, GROUPED, PLAIN, SCALE, WORDS, nc10d_nccl_note
from nc10d.backend.nccl.nccl_calls import Call
from nc10d.backend.nccl.peer_notes import Note, Text
from nc10d.cuda.driver import address, context
from nc10d.ops import Op

if TYPE_CHECKING:
    from nc10d.backend.nccl.bindings.library import Library
    from nc10d.backend.nccl.comm_streams import CommStream

_PAD = (0,) * 8
LATE = 2
_OF_CUDA = ("cuEventRecord", "cuStreamWaitEvent", "cuMemcpy2DAsync_v2")
Row = tuple[int, ...]


class Placed(NamedTuple):
    """A call, the lane that makes it, and the place of its operation in the launch."""

    lane: CommStream
    call: Call
    place: int


class Events(NamedTuple):
    """The events of a launch by handle; `begun` is 0 without timing, `joint` a stream or 0.

    `joint` is where a launch on several lanes ends; a single lane's ends on its own stream.
    """

    before: int
    begun: int
    joint: int


class LaunchTable:
    """The rows of one launch, at `address`; run under the lock of whoever owns its lanes.

    Row `ended` records the event by which the launch ends, the one behind it, the last, lets the
    current stream wait for it. A launch that waited for its lanes, told of and with its `before`
    recorded, runs from row LATE.
    """

    __slots__ = ("_keep", "_words", "address", "begun", "ended", "lanes", "lock", "places")

    def __init__(
        self,
        lanes: tuple[CommStream, ...],
        events: Events,
        body: Body,
        words: TableRows,
        note: Note,
        keep: tuple[Text, object],
    ) -> None:
        """Lay out what `body` adds, and what goes around it, as rows on formed `lanes`.

        It keeps the words that are told of it, and what else its calls need.
        """
        self._keep = keep
        self.lanes = lanes
        self.lock = lanes[0].lock if len(lanes) == 1 else _Locks(lanes)
        self.begun = events.begun
        record, wait = address("cuEventRecord"), address("cuStreamWaitEvent")
        words.add(nc10d_nccl_note.address, note.address, keep[0].address)
        words.add(record, events.before, 0)
        for lane in lanes:
            words.add(wait, lane.stream, events.before, 0)
        if events.begun:
            words.add(record, events.begun, lanes[0].stream)
        body(words)
        last = lanes[0].stream
        if len(lanes) > 1:
            last = events.joint
            words.extend((record, lane.event, lane.stream) for lane in lanes)
            words.extend((wait, last, lane.event, 0) for lane in lanes)
        self.ended = words.count
        words.add(record, 0, last)
        words.add(wait, 0, 0, 0)
        self.places = words.places
        self._words = words.words
        self.address = self._words.buffer_info()[0]

    def culprit(self, answer: int) -> tuple[int, int | None, bool]:
        """Return the code of a failed run, the place of the operation (None: none), if CUDA's."""
        number, code = divmod(answer, SCALE)
        row = number - 1
        by_cuda = self._words[row * WORDS] in map(address, _OF_CUDA)
        spans = (places[row - at : row - at + 1] for at, places in self.places if row >= at)
        return code, next((place for span in spans for place in span), None), by_cuda


class DeviceContext:
    """The rows that make a device's context current around a program, and their `address`."""

    def __init__(self, device: int) -> None:
        self._before = array("q", [0])  # where the driver tells what it has popped
        put_back = self._before.buffer_info()[0]
        push, pop = address("cuCtxPushCurrent_v2"), address("cuCtxPopCurrent_v2")
        rows = (
            (push, 1, PLAIN, int(context(device)), *_PAD[1:]),
            (pop, 1, PLAIN, put_back, *_PAD[1:]),
        )
        self._words = array("q", [*rows[0], *rows[1]])
        self.address = self._words.buffer_info()[0]


class _Locks:
    """The locks of several lanes, held together."""

    def __init__(self, lanes: Sequence[CommStream]) -> None:
        self._lanes = lanes
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        for lane in self._lanes:
            self._stack.enter_context(lane.lock)

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class TableRows:
    """Rows on their way into a table."""

    def __init__(self, library: Library) -> None:
        self.words = array("q")
        self.count = 0
        self.places: list[tuple[int, Sequence[int]]] = []
        self._address = library.address

    def add(self, function: int, *arguments: int, mark: int = PLAIN) -> None:
        """Add a call."""
        count = len(arguments)
        self.words.extend((function, count, mark, *arguments, *_PAD[count:]))
        self.count += 1

    def on(self, lane: CommStream, rows: Iterable[Row]) -> None:
        """Add calls that are given without their last argument, the stream of a lane."""
        self.extend((*row, lane.stream) for row in rows)

    def extend(self, rows: Iterable[Row]) -> None:
        """Add calls that are no operations."""
        for row in rows:
            self.add(*row)

    def group(self, placed: Sequence[Placed]) -> None:
        """Add calls as one group; a single one needs none."""
        several = len(placed) > 1
        mark = GROUPED if several else PLAIN
        if several:
            self.add(self._address("ncclGroupStart"))
        ends = {lane: (lane.handle, lane.stream) for lane, _, _ in placed}
        self.places.append((self.count, [place for _, _, place in placed]))
        for lane, call, _ in placed:
            self.add(self._address(call[0]), *call[1:], *ends[lane], mark=mark)
        if several:
            self.add(self._address("ncclGroupEnd"), mark=ENDS)

    def block(self, rows: array[int]) -> None:
        """Add a group of calls that are rows already, one for each operation in order."""
        count = len(rows) // WORDS
        self.add(self._address("ncclGroupStart"))
        self.places.append((self.count, range(count)))
        self.words += rows
        self.count += count
        self.add(self._address("ncclGroupEnd"), mark=ENDS)


Body = Callable[[TableRows], None]
"""What adds the calls of a launch's operations."""


class Grouped(NamedTuple):
    """Calls of one group; for each lane, in order, what is queued there before and behind them."""

    placed: Sequence[Placed]
    before: Sequence[Sequence[Row]]
    behind: Sequence[Sequence[Row]]


def grouped(groups: Sequence[Grouped], lanes: tuple[CommStream, ...]) -> Body:
    """Return what adds groups of calls, which are made one after the other."""

    def add(rows: TableRows) -> None:
        for number, group in enumerate(groups):
            if number:
                rows.extend(_in_step(lanes, address("cuEventRecord"), address("cuStreamWaitEvent")))
            for lane, copies in zip(lanes, group.before, strict=True):
                rows.on(lane, copies)
            rows.group(group.placed)
            for lane, copies in zip(lanes, group.behind, strict=True):
                rows.on(lane, copies)

    return add


def _in_step(lanes: Sequence[CommStream], record: int, wait: int) -> Iterable[Row]:
    """Let no lane go on before all have come here."""
    if len(lanes) > 1:
        yield from ((record, lane.event, lane.stream) for lane in lanes)
        for lane in lanes:
            yield from ((wait, lane.stream, o.event, 0) for o in lanes if o is not lane)


def in_groups(ops: Sequence[Op]) -> list[list[int]]:
    """Return the places of a block's operations in groups inside which none touches another's.

    An operation begins a new group where it writes what one of the present group uses, or uses what
    one of them writes. All ranks must come to the same groups: where a block's arrays overlap
    on one rank only, the program is wrong.
    """
    together = [list(range(len(ops)))]
    if len(ops) < 2:
        return together
    uses = [_uses(op) for op in ops]
    if disjoint(x.span for several in uses for x, _ in several):
        return together
    groups: list[list[int]] = [[]]
    for place, mine in enumerate(uses):
        if any(_clash(mine, uses[other]) for other in groups[-1]):
            groups.append([])
        groups[-1].append(place)
    return groups


def _uses(op: Op) -> list[tuple[Buffer, bool]]:
    """Return the memory that an operation uses, and whether it writes it on some rank."""
    return [(as_buffer(x), written) for x, written in touched(op)]


def _clash(some: Sequence[tuple[Buffer, bool]], others: Sequence[tuple[Buffer, bool]]) -> bool:
    """Say whether some use of the ones writes what one of the others uses, or the reverse.

    Elements count, and not what lies between them: that only this rank may know of.
    """
    return any((a[1] or b[1]) and overlap(a[0], b[0]) for a in some for b in others)
