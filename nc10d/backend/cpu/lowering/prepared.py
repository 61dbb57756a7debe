"""Prepared calls: operations that have passed all checks, ready to run again.

The same call on arrays with the same dtype and sizes needs no check in Python. Compiled code checks
the arrays themselves (plain ndarrays with this dtype and size, no overlap), writes their addresses
into words that are laid out once, and runs the program.

| class | prepared for | `x`, `y` |
|---|---|---|
| PreparedCollective | a collective on plain arrays | as in Parts: an array, tuple or None each |
| PreparedMessage | a send to, or a receive from, a given peer | array, tag |
| PreparedProgram | any collectives, on arrays whose addresses stand in a table | the ops, None |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from nc10d.arrays.interop import owners
from nc10d.backend.cpu.engine import call_sites
from nc10d.backend.cpu.engine.channel import Channel, Submission, Words, deadline_ns
from nc10d.backend.cpu.lowering.lower import LoweredOp
from nc10d.backend.cpu.native import entry_points, hooked_calls, prepared_calls, prepared_messages
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.offsets import BUSY, FINISHED, NEW_SITE
from nc10d.backend.cpu.native.submitting import LOOKS
from nc10d.backend.cpu.program.linker import Linked
from nc10d.backend.cpu.transport.links import Inbox
from nc10d.backend.cpu.works import CpuWork, PreparedWork, WorkWaiter, completed_call
from nc10d.backend.prepared_protocol import Arguments
from nc10d.base.deadline import Deadline, monotonic
from nc10d.kernels.cache import EntryPoint
from nc10d.ops import AllToAll, Array, Op, Recv, Send
from nc10d.ops.facts import FACTS, Parts
from nc10d.work import Work

AT_ONCE, SOON = prepared_messages.AT_ONCE, prepared_messages.SOON
"""How long a short message's start may wait for the peer: not at all, or for a spin."""
_NOT_IN_FLIGHT = FINISHED, BUSY
_WORD = 8


class Prepared:
    """The base of prepared calls; see nc10d.backend.prepared_protocol.PreparedCall."""

    __slots__ = (
        "__weakref__",
        "_idle",
        "_submit",
        "bulky",
        "channel",
        "in_flight",
        "run",
        "run_hooked",
        "words",
    )

    run: Callable[[Words, Arguments, Arguments], int]
    run_hooked: Callable[..., int]
    address: int
    """The address of the words from which the engine fills in a descriptor."""
    sender: int | None = None
    """The rank from which a receive receives."""
    arrays = 1
    """How many array addresses follow the call's descriptor."""

    def __init__(
        self, channel: Channel, words: Any, entry: Callable[[], EntryPoint] | None = None
    ) -> None:
        """`entry` returns the compiled function that runs the call; it may block to compile it."""
        self.channel, self.in_flight, self.words = channel, channel.in_flight, words
        self.bulky = False
        self._idle: list[Submission] = []
        self._submit: EntryPoint | None = None
        if entry is not None:
            # Not a bound method: that would be a cycle, which keeps arrays until a collection.
            self.run = partial(_first_run, weakref.ref(self), entry)

    def ops(self, x: Arguments, y: Arguments) -> Sequence[Op]:
        """Return the call as operations, for errors and Works."""
        raise NotImplementedError

    def end(self) -> None:
        """Clean up after a call that blocked in `run`, once it has ended or failed."""

    def submit_entry(self) -> EntryPoint:
        """Return the compiled function that submits the call; may block to compile."""
        raise NotImplementedError

    def make_hooked(self) -> None:
        """Set `run_hooked`; may block to compile."""
        raise NotImplementedError

    def submit(
        self,
        waiter: WorkWaiter,
        x: Arguments,
        y: Arguments,
        timeout: float,
        waits: bool = False,
        originals: tuple[Arguments, Arguments] | None = None,
    ) -> Work | None:
        """Submit the call and return its Work; None, with nothing done, if the engine answers BUSY.

        That means that the arguments do not fit the call, or that the channel takes no call now.
        With `waits`, this thread waits for the Work next, so it may advance even a long call. x and
        y may be lent views of `originals`, the caller's arrays.
        """
        submit = self._submit or self._compile_submit()  # before the deadline starts to run
        in_flight, idle = self.in_flight, self._idle
        try:
            submission = idle.pop() if idle else self.channel.blank(self.arrays)
        except IndexError:  # another thread has taken the address
            submission = self.channel.blank(self.arrays)
        words, address = submission.words, submission.address
        # In flight before the engine has the address: the worker may begin at once.
        submission.keep, in_flight[address] = (self, x, y, originals), submission
        while (answer := submit(words, self.address, timeout, x, y, waits)) == NEW_SITE:
            self.channel.learn(submission)
        if originals is not None:
            x, y = originals
        if answer in _NOT_IN_FLIGHT:
            # No other thread has the address any more: the next call may use it.
            in_flight.pop(address, None)
            submission.keep = None
            if not idle:
                idle.append(submission)
            if in_flight:
                self.channel.reap()
            return completed_call(self, x, y, self.sender) if answer == FINISHED else None
        channel = self.channel
        if originals is not None:
            # A lent view does not keep its memory, which an array may leave during the call.
            submission.keep = submission.keep, owners(x, y)
        if not waits:
            waiter.need_worker()
        if answer < 0 and answer != at.ABORTED:
            waiter.health.engine_failed(channel, answer)
        channel.reap()
        return PreparedWork(
            waiter, self, x, y, channel, submission, monotonic(), timeout, self.sender
        )

    start = submit
    """Start the call, and return its Work, as `submit`."""

    def _compile_submit(self) -> EntryPoint:
        self._submit = found = self.submit_entry()
        return found


def _first_run(
    reference: weakref.ref[Prepared],
    entry: Callable[[], EntryPoint],
    words: object,
    x: object,
    y: object,
) -> int:
    """Run a call for the first time; later calls go to the compiled function directly."""
    prepared = reference()
    assert prepared is not None, "the caller holds it"
    prepared.run = run = entry()
    # The engine answers NEW_SITE to each call through an unknown frame, so it must learn that this
    # frame is nc10d's own. The caller could not teach that, because this frame is gone by then.
    while (answer := run(words, x, y)) == at.NEW_SITE:
        call_sites.learn()
    return int(answer)


class PreparedCollective(Prepared):
    """A collective on plain arrays: program, and the arguments' form, dtype and sizes."""

    __slots__ = ("_extra", "_keep", "_kind", "address", "arrays")

    def __init__(
        self,
        channel: Channel,
        linked: Linked,
        kind: type[Op],
        parts: Parts,
        lowered: LoweredOp,
        rank: int,
    ) -> None:
        """Prepare `rank`'s call whose `parts` are as in Parts: plain arrays, tuples or None."""
        self._kind, (self._extra, x, y) = kind, parts
        given = arrays_in(x) if y is x else arrays_in(x, y)
        address = prepared_calls.address
        own = [address(each) for each in lowered.arrays if isinstance(each, np.ndarray)]
        written = lowered.outs or (0, -1)
        by_rows = kind is AllToAll and type(x) is np.ndarray
        table: Words = np.array([*own, *(0 for _ in given)], np.int64)
        rows: Words = np.array(
            [(a.size, a.nbytes, a.shape[0] if by_rows and a.shape else -1) for a in given], np.int64
        )
        fields = {
            at.K_CHANNEL: channel.address,
            at.K_PROGRAM: linked.address,
            at.K_SHORT: linked.short,
            at.K_DTYPE: id(given[0].dtype),
            at.K_X: _form(x),
            at.K_Y: at.SAME if y is x else _form(y),
            at.K_OWN: len(own),
            at.K_COUNT: len(given),
            at.K_WRITTEN: written[0] - len(own),
            at.K_WRITTEN_END: written[-1] + 1 - len(own),
            at.K_NONE: id(None),
            at.K_TUPLE: id(tuple),
            at.K_ARRAYS: address(table),
            at.K_ROWS: address(rows),
        }
        if FACTS[kind].in_place_piece and y is not None:
            one = type(y) is not tuple
            fields |= {at.K_WHOLE: 1 if one else 1 + rank, at.K_PLACE: rank * x.nbytes * one}
        words: Words = np.zeros(at.K_BYTES // _WORD, np.int64)
        for offset, value in fields.items():
            words[offset // _WORD] = value
        super().__init__(channel, words, lambda: prepared_calls.run_prepared)
        self._keep = (linked, given[0].dtype, lowered.arrays[: len(own)], table, rows)
        self.arrays = len(table)
        self.address: int = address(words)

    def ops(self, x: Arguments, y: Arguments) -> Sequence[Op]:
        """Return the collective on these arrays."""
        return (FACTS[self._kind].make(self._extra, x, y),)

    def submit_entry(self) -> EntryPoint:
        """Return submit_prepared."""
        return prepared_calls.submit_prepared

    def make_hooked(self) -> None:
        """Set `run_hooked`."""
        self.run_hooked = hooked_calls.run_hooked_collective


def arrays_in(*arguments: Arguments) -> list[Array]:
    """Return all arrays in arguments, each of which is an array, a tuple of arrays, or None."""
    found: list[Array] = []
    for given in arguments:
        found += given if type(given) is tuple else () if given is None else (given,)
    return found


def _form(argument: Arguments) -> int:
    """Return an argument's form, as K_X has it."""
    if argument is None:
        return at.ABSENT
    return len(argument) if type(argument) is tuple else at.ONE


class PreparedMessage(Prepared):
    """One message; `words` is the descriptor, and `inbox` is None for a send."""

    # A `small` message fits into a slot of the link's staging buffer; a `near` message has a peer
    # on this host. A message that is both is `short`: once begun, such a message never waits. A
    # message that is neither is `bulky`.

    __slots__ = ("_model", "address", "dtype", "inbox", "peer", "sender", "short")

    def __init__(
        self,
        channel: Channel,
        model: Submission,
        inbox: Inbox | None,
        peer: int,
        small: bool,
        near: bool,
        x: Array,
    ) -> None:
        super().__init__(channel, model.words, lambda: prepared_messages.run_message)
        model.words[at.D_CHANNEL // _WORD] = channel.address
        model.words[at.D_ARRAY_DTYPE // _WORD] = id(x.dtype)
        model.words[at.D_ARRAY_COUNT // _WORD] = x.size
        # How often this thread looks for the peer while submitting. A bulky message is left to the
        # worker, which moves several at once.
        looks = LOOKS if small else -1
        if near and not small and inbox is None:
            looks = 0  # the peer reads the array in place, which takes longer than a spin
        model.words[at.D_LOOKS // _WORD] = looks
        model.words[at.D_LOOKS_WAITING // _WORD] = LOOKS if small or near else looks
        self._model, self.address = model, model.address
        self.inbox, self.peer, self.dtype = inbox, peer, x.dtype
        self.sender = None if inbox is None else peer
        self.short = small and near
        self.bulky = not (small or near)

    def ops(self, x: Arguments, y: Arguments) -> Sequence[Op]:
        """Return the message with this array and tag."""
        return (Send(x, self.peer, y) if self.inbox is None else Recv(x, self.peer, y),)

    def end(self) -> None:
        """Let other threads receive again, after a receive that run_message had begun."""
        self.channel.words[at.C_RECEIVING // _WORD] = 0

    def submit_entry(self) -> EntryPoint:
        """Return submit_message."""
        return prepared_messages.submit_message

    def make_hooked(self) -> None:
        """Set `run_hooked`."""
        self.run_hooked = hooked_calls.run_hooked_messages

    def start(
        self,
        waiter: WorkWaiter,
        x: Arguments,
        y: Arguments,
        timeout: float,
        waits: bool = False,
        originals: tuple[Arguments, Arguments] | None = None,
    ) -> Work | None:
        """Send or receive; a short message that ends at once is not submitted."""
        return self.finish_soon(x, y, AT_ONCE, originals) or self.submit(
            waiter, x, y, timeout, waits, originals
        )

    def finish_soon(
        self,
        x: Arguments,
        tag: int,
        how_soon: int,
        originals: tuple[Arguments, Arguments] | None = None,
    ) -> Work | None:
        """Run a short message here, waiting as `how_soon` allows; None: nothing has happened."""
        if not self.short:
            return None
        try_message = prepared_messages.try_message
        while (answer := try_message(self.address, x, tag, how_soon)) == at.NEW_SITE:
            call_sites.learn()
        if answer != at.DONE:
            return None
        if self.in_flight:
            self.channel.reap()
        return completed_call(self, x if originals is None else originals[0], tag, self.sender)


class PreparedProgram(Prepared):
    """A program on the addresses at `table`, kept valid by `keep`; `x` are the operations."""

    __slots__ = ("_addresses", "_keep", "linked", "table")

    def __init__(self, channel: Channel, linked: Linked, addresses: Words, keep: object) -> None:
        super().__init__(channel, None)
        self.linked = linked
        self._addresses, self._keep = addresses, keep
        self.table: int = prepared_calls.address(addresses)
        self.run = partial(_run_program, channel.address, linked.address, self.table)

    def ops(self, x: Arguments, y: Arguments) -> Sequence[Op]:
        """Return the operations."""
        return x  # type: ignore[no-any-return]

    def start(
        self,
        waiter: WorkWaiter,
        x: Arguments,
        y: Arguments,
        timeout: float,
        waits: bool = False,
        originals: tuple[Arguments, Arguments] | None = None,
    ) -> Work | None:
        """Submit the program; raises the group's failure, if it has failed."""
        waiter.health.check()
        if not waits:
            waiter.need_worker()
        deadline = Deadline.after(timeout)
        keep = (x, self._keep)
        submission = Submission(self.linked, self._addresses, keep, deadline_ns(deadline))
        self.channel.submit(submission)
        return CpuWork(waiter, x, self.channel, submission, deadline)


def _run_program(
    channel: int, program: int, table: int, _words: object, _x: object, _y: object
) -> int:
    run = entry_points.run
    while (answer := run(channel, program, table)) == at.NEW_SITE:
        call_sites.learn()  # of this frame, too, which is gone when the caller learns
    return int(answer)
