"""The protocol of a backend: a method that runs operations, and the ways to end it.

A backend serves a group on one kind of device. The registry maps names to factories, so
that a user's own backend is as good as a built-in backend. Every backend derives from `Backend`,
and inherits the defaults of the abilities that it does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple, Protocol

import numpy as np

from nc10d import ops
from nc10d.backend.shared_board import GroupMessages, SharedBoard
from nc10d.base.deadline import Deadline
from nc10d.errors import DistError, GroupClosed
from nc10d.ops import MessageInfo, Op
from nc10d.store.base import Store
from nc10d.work import Work


class FailureDetector(Protocol):
    """The ability to detect dead ranks and to agree with all ranks on a cause."""

    record_address: int
    """The address of the record where this rank publishes its launches on other devices."""

    @property
    def messages(self) -> GroupMessages:
        """Small texts between the ranks of the group."""

    def share_board(self, nbytes: int) -> SharedBoard:
        """Allocate memory of zeros for this rank that its local peers can read; called once."""

    def failure(self) -> BaseException | None:
        """Return the error of the group, the same on all its ranks; None if it has not failed."""

    def abort(self, reason: BaseException) -> None:
        """Fail the group with `reason` on every rank; the first reason wins."""

    def whereabouts(self) -> tuple[str, dict[int, int]]:
        """Return the latest calls on this host: as the end of an error, and numbers by rank."""


class CallRecords(Protocol):
    """The ability to report which calls and messages a rank has begun; for flight recorders."""

    rank: int
    size: int

    def logged(self) -> Sequence[tuple[Any, str, bool]]:
        """Return the latest entries, oldest first: entry, text, and whether it is a message."""

    def waits_for(self) -> int | None:
        """Return the rank that the latest collective waits for now, None if it does not wait."""

    def traffic(self) -> Sequence[tuple[str, int, int, bool]]:
        """Return direction, peer, messages ended, and whether this rank waits, for each link."""

    def progress(self) -> dict[int, int]:
        """Return the number of the latest collective of each rank of this host."""

    def observe_failure(self, observer: Callable[[DistError], None]) -> None:
        """Have `observer` called with the error when the group fails."""


class Shrinkable(Protocol):
    """The ability to make a backend of the ranks that survive; `control` connects them."""

    control: Any
    """The group control through which survivors agree."""

    def gone(self) -> set[int]:
        """Return the ranks that have died, have left, or can't be reached any more."""

    def shrink(self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline) -> Backend:
        """Make the backend of the surviving `ranks`; all of them call."""


NOTHING = np.empty(0, np.uint8)
"""Stands for the array of a barrier, which has none."""


LISTS = "lists"
"""The `extra` of a call on lists, beside its other arguments."""


def settled(arrays: Any) -> Any:
    """Return an argument as prepared calls take it: a list as a tuple, which cannot change."""
    return tuple(arrays) if type(arrays) is list else arrays


def _gathered(op: ops.AllGather) -> tuple[Any, Any, Any]:
    out = settled(op.out)
    return LISTS if type(out) is tuple else None, op.inp, out


def _reduced(op: ops.ReduceScatter) -> tuple[Any, Any, Any]:
    inp = settled(op.inp)
    return (op.op, LISTS) if type(inp) is tuple else op.op, op.out, inp


def _exchanged(op: ops.AllToAll) -> tuple[Any, Any, Any]:
    inp, out = settled(op.inp), settled(op.out)
    if op.in_splits is None and op.out_splits is None:
        return LISTS if type(inp) is tuple else None, inp, out
    if type(inp) is tuple:  # the checks refuse it
        return None, None, None
    try:
        return (_splits(op.in_splits), _splits(op.out_splits)), inp, out
    except TypeError:  # no ints: the checks say what is wrong
        return None, None, None


def _exchange(extra: Any, x: Any, y: Any) -> ops.AllToAll:
    in_splits, out_splits = extra if type(extra) is tuple else (None, None)
    return ops.AllToAll(y, x, out_splits, in_splits)


def _splits(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    # Plain ints, since 1.0 equals 1 as a key.
    return None if sizes is None else tuple(map(index, sizes))


class CallParts(NamedTuple):
    """How an operation is split into (extra, x, y), and made of them again."""

    split: Callable[[Any], tuple[Any, Any, Any]]
    make: Callable[[Any, Any, Any], Op]


PARTS: dict[type[Any], CallParts] = {
    ops.AllReduce: CallParts(lambda o: (o.op, o.x, o.x), lambda e, x, y: ops.AllReduce(x, e)),
    ops.Broadcast: CallParts(lambda o: (o.root, o.x, o.x), lambda e, x, y: ops.Broadcast(x, e)),
    ops.Reduce: CallParts(lambda o: ((o.root, o.op), o.x, o.x), lambda e, x, y: ops.Reduce(x, *e)),
    ops.AllGather: CallParts(_gathered, lambda e, x, y: ops.AllGather(y, x)),
    ops.ReduceScatter: CallParts(
        _reduced, lambda e, x, y: ops.ReduceScatter(x, y, e[0] if type(e) is tuple else e)
    ),
    ops.AllToAll: CallParts(_exchanged, _exchange),
    ops.Gather: CallParts(
        lambda o: ((o.root, o.even), o.inp, settled(o.out)), lambda e, x, y: ops.Gather(y, x, *e)
    ),
    ops.Scatter: CallParts(
        lambda o: ((o.root, o.even), o.out, settled(o.inp)), lambda e, x, y: ops.Scatter(x, y, *e)
    ),
    ops.Barrier: CallParts(lambda o: (None, NOTHING, NOTHING), lambda e, x, y: ops.Barrier()),
    ops.Send: CallParts(lambda o: (o.peer, o.x, o.tag), lambda e, x, tag: ops.Send(x, e, tag)),
    ops.Recv: CallParts(lambda o: (o.peer, o.x, o.tag), lambda e, x, tag: ops.Recv(x, e, tag)),
}
"""By kind of operation.

`extra` has its arguments besides arrays: reduction, root, (root, reduction), (root, even), peer,
split sizes; and LISTS where the same call also has a form without lists. x and y are its arrays in
the order in which cpu/lowering/lower.py numbers them. Each is an array, a tuple of arrays, or None;
y is the tag of a message.
"""


class PreparedCall(Protocol):
    """An operation that has passed all checks, ready to run again.

    run(words, x, y) returns 0 once the call has ended. Any other answer goes to
    PreparingBackend.finish, and so does 0 while operations are `in_flight` on the same channel.
    x and y are as in PARTS. `run` itself checks the arrays, which may be any objects; the caller
    has checked that a tag is an int in its range.
    """

    run: Callable[[Any, Any, Any], int]
    run_hooked: Callable[[Any, Any, Any, Any, int, Any, Any], int]
    """Does as `run`, between two hooks: run_hooked(words, x, y, block, task, value, places).

    The hooks, their arguments and answers are those of nc10d.kernels.hooks. For messages, x is a
    tuple of arrays."""
    words: Any
    in_flight: Any

    def start(
        self,
        waiter: Any,
        x: Any,
        y: Any,
        timeout: float,
        waits: bool = False,
        originals: tuple[Any, Any] | None = None,
    ) -> Work | None:
        """Start the call and return its Work; None if it does not fit now: nothing has happened.

        `waiter` is the PreparingBackend's. This thread `waits` for the Work next, or does not. x
        and y may be lent views of `originals`, the caller's arrays.
        """


class PreparingBackend(Protocol):
    """The ability to prepare calls, so that the next such call skips all checks."""

    waiter: Any
    """What the calls' Works wait through."""

    @property
    def latest(self) -> Mapping[type[Any], Mapping[Any, PreparedCall]]:
        """The call prepared or found last, by kind of operation and `extra`, as in PARTS."""

    @property
    def hooked(self) -> Mapping[tuple[type[Any], Any], PreparedCall]:
        """The calls that `find_hooked` has found, by kind of operation and `extra`."""

    def find_hooked(self, kind: type[Any], extra: Any, x: Any, y: Any) -> PreparedCall | None:
        """Return the prepared call of operations between hooks, and add it to `hooked`.

        None if there is none yet. For messages, x is a tuple of all arrays, of the same size. May
        block to compile.
        """

    def finish(self, prepared: Any, answer: int, x: Any, y: Any, timeout: float) -> bool:
        """Complete a call after `prepared.run` has returned `answer`; may block.

        False: nothing has happened, and the operation has to be launched.
        """

    def abandon(self, prepared: Any, x: Any, y: Any) -> None:
        """Leave a call in the middle: an exception (Ctrl-C) came out of `run` or `finish`."""

    def start_messages(self, ops: Sequence[Op], timeout: float) -> list[Work] | None:
        """Submit messages, sends first, if all are prepared; None: nothing has happened."""

    def exchange(
        self, dst: int, x: Any, tag: int, src: int, y: Any, take: int, timeout: float
    ) -> bool:
        """Send x to `dst` with `tag` while receiving y from `src` with the tag `take`; blocks.

        False: they are not prepared, and nothing has happened.
        """


class Backend(Protocol):
    """Runs operations for a group on one kind of device.

    The properties from `failure_detector` on are abilities; by default a backend has none.
    """

    name: str
    device_type: str
    rank: int
    size: int

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Run `ops` in order, as a single submission; several are fused or grouped.

        The backend checks them first (`nc10d.arrays.validate`): the group does not.

        `timeout` (seconds, math.inf for none) runs from this call. Without `async_op` the call
        blocks until all operations have ended, and returns None or raises the error of the failed
        operation. With `async_op` it returns a Work that completes when all have ended.

        The result of a receive is its sender. The result of several operations with receives among
        them is a list with an entry for each operation, the sender or None. Any thread may call.
        Operations execute in the order of launch. Point-to-point operations have links of their
        own: they may overtake, also each other where no rank can observe the difference.
        """

    def split(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline, options: Any = None
    ) -> Backend:
        """Make the backend of a group of `ranks` of this group; all of them call, and no other.

        It may wait for them until `deadline`. If a rank does not come, it releases everything that
        it has taken, and raises an error that names the rank. `options` are as in BackendSetup.
        """

    def abort(self, reason: BaseException) -> None:
        """Fail every pending and later operation with `reason`, here and on every peer.

        Any thread may call at any time. The first reason in the group wins. In a group across
        hosts it blocks until the ranks have agreed on a cause.
        """

    def close(self) -> None:
        """Release everything; idempotent. Operations still in flight fail with GroupClosed."""

    def droppable(self) -> bool:
        """Return whether the backend, if dropped now, ends by itself and cuts no operation off.

        False keeps the backend of a dropped group until the default group is destroyed.
        """
        return False

    @property
    def failure_detector(self) -> FailureDetector | None:
        """This backend as a failure detector, None if it can't detect dead ranks."""
        return None

    @property
    def call_records(self) -> CallRecords | None:
        """This backend as the source of a flight recorder, None if it keeps no records."""
        return None

    @property
    def shrinkable(self) -> Shrinkable | None:
        """This backend as the maker of a smaller group, None if it can't make any."""
        return None

    @property
    def preparing(self) -> PreparingBackend | None:
        """This backend as the source of prepared calls, None if it prepares none."""
        return None

    def probe(self, peer: int | None, tag: int | None, deadline: Deadline) -> MessageInfo | None:
        """Return the next message from a rank (None: any) with a tag (None: any); see `recv`.

        Blocks until it has come, or returns None at `deadline`. A message that a receive waits for
        already is not counted. ValueError if the backend can't look at messages.
        """
        message = f"probe: backend {self.name!r} can't see messages before they are received"
        raise ValueError(f"{message}; send their sizes first")

    def allocate(self, nbytes: int) -> Any:
        """Return registered memory as an array of bytes, None if the backend registers none."""
        return None


class OtherBackends:
    """A group's other failure detectors, as one of its backends sees them; more may come later."""

    def __init__(self, detectors: Callable[[], Iterator[FailureDetector]] = lambda: iter(())):
        self._detectors = detectors

    @property
    def agree(self) -> bool:
        """Whether another backend detects dead ranks, and agrees with all ranks on a cause."""
        return any(True for _ in self._detectors())

    def record_address(self) -> int:
        """Return the address of the record where a rank publishes its latest launch; 0: none."""
        # `backend.cpu.native.offsets` has its layout. It exists until the group is closed.
        return next((detector.record_address for detector in self._detectors()), 0)

    def share_board(self, nbytes: int) -> SharedBoard | None:
        """Allocate this rank's board, None without a failure detector; called once in a group."""
        return next((each.share_board(nbytes) for each in self._detectors()), None)

    def messages(self) -> GroupMessages | None:
        """Return the way of small texts between the group's ranks, None without a detector."""
        return next((detector.messages for detector in self._detectors()), None)

    def whereabouts(self) -> tuple[str, dict[int, int]]:
        """Return the latest calls on this host: as the end of an error, and numbers by rank."""
        detector = next(self._detectors(), None)
        return ("", {}) if detector is None else detector.whereabouts()

    def cause(self) -> DistError | None:
        """Return the error of another backend, None if none has failed; blocks only shortly."""
        return next(filter(None, map(cause_of, self._detectors())), None)

    def notify(self, error: DistError) -> DistError | None:
        """Fail with `error` on every rank; return the agreed cause, None if none `agree`."""
        for detector in self._detectors():
            detector.abort(error)
        return self.cause()


def cause_of(detector: FailureDetector) -> DistError | None:
    """Return why a backend has failed; that it was closed is no cause for others."""
    found = detector.failure()
    return None if isinstance(found, GroupClosed) or not isinstance(found, DistError) else found


@dataclass(frozen=True, slots=True)
class BackendSetup:
    """The arguments of a factory: a rank's place in the group, and how to meet the other ranks.

    `options` are the caller's `pg_options` for this backend, of a type that it was registered
    with, or None. `device` is init_process_group's `device_id`, or None. `others` are the group's
    backends of other devices: a failure that ends the group for any of them ends it for all.
    """

    group_name: str
    rank: int
    size: int
    store: Store
    deadline: Deadline
    options: Any = None
    device: Any = None
    others: OtherBackends = field(default_factory=OtherBackends)


Factory = Callable[[BackendSetup], Backend]
Meeting = Callable[[int, int, Deadline], "tuple[Store, int, int]"]
"""From rank and size, as far as they are known, to a store that all ranks share, rank and size."""
