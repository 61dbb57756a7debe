"""A launch as a table of C calls: events, group, operations, events. Built once, run often.

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

from nc10d.access import touched
from nc10d.backend.nccl.calls import Call
from nc10d.backend.nccl.native import ENDS, GROUPED, PLAIN, SCALE, WORDS
from nc10d.buffer import as_buffer
from nc10d.cuda.driver import address, context
from nc10d.ops import Op
from nc10d.spans import Use, apart, clash

if TYPE_CHECKING:
    from nc10d.backend.nccl.lanes import Lane
    from nc10d.backend.nccl.library import Library

_PAD = (0,) * 8
Row = tuple[int, ...]


class Placed(NamedTuple):
    """A call, the lane that makes it, and the place of its operation in the launch."""

    lane: Lane
    call: Call
    place: int


class Events(NamedTuple):
    """The events of a launch by handle; `begun` is 0 without timing, `joint` a stream or 0.

    `joint` is where a launch on several lanes ends; a single lane's ends on its own stream.
    """

    before: int
    begun: int
    joint: int


class Program:
    """The rows of one launch, at `address`; run under the lock of whoever owns its lanes.

    Row `ended` records the event by which the launch ends, the one behind it, the last, lets the
    current stream wait for it. A launch whose `before` was recorded already runs from row 1.
    """

    __slots__ = ("_words", "address", "begun", "ended", "lanes", "lock", "places")

    def __init__(self, lanes: tuple[Lane, ...], events: Events, body: Body, words: Rows) -> None:
        """Lay out what `body` adds, and what goes around it, as rows on formed `lanes`."""
        self.lanes = lanes
        self.lock = lanes[0].lock if len(lanes) == 1 else _Locks(lanes)
        self.begun = events.begun
        record, wait = address("cuEventRecord"), address("cuStreamWaitEvent")
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
        by_cuda = self._words[row * WORDS] in (
            address("cuEventRecord"),
            address("cuStreamWaitEvent"),
        )
        spans = (places[row - at : row - at + 1] for at, places in self.places if row >= at)
        return code, next((place for span in spans for place in span), None), by_cuda


class Context:
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

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        for lane in self._lanes:
            self._stack.enter_context(lane.lock)

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class Rows:
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


Body = Callable[[Rows], None]
"""What adds the calls of a launch's operations."""


def grouped(groups: Sequence[Sequence[Placed]], lanes: tuple[Lane, ...]) -> Body:
    """Return what adds groups of calls, which are made one after the other."""

    def add(rows: Rows) -> None:
        for number, group in enumerate(groups):
            if number:
                rows.extend(_in_step(lanes, address("cuEventRecord"), address("cuStreamWaitEvent")))
            rows.group(group)

    return add


def _in_step(lanes: Sequence[Lane], record: int, wait: int) -> Iterable[Row]:
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
    if apart(span for several in uses for span, _ in several):
        return together
    groups: list[list[int]] = [[]]
    for place, mine in enumerate(uses):
        if any(clash(mine, uses[other]) for other in groups[-1]):
            groups.append([])
        groups[-1].append(place)
    return groups


def _uses(op: Op) -> list[Use]:
    """Return what an operation uses; what it only reads counts as read."""
    found = ((as_buffer(x), written) for x, written in touched(op))
    return [((x.address, x.address + x.nbytes), written) for x, written in found]
