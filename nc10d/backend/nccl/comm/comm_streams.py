"""Communicators with a stream each: for a group's collectives, and for each link.

A link is a direction between two ranks. A communicator executes in order; because links have their
own communicators, messages overtake collectives, and both ranks may send or receive first. With
NcclOptions(links="tag") each tag has a link of its own, with "group" messages go with the
collectives. A communicator is formed at its first use, on its own thread: other ranks may arrive
later, after operations that this rank has to do first. Launches meanwhile are deferred until the
communicator is formed.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nc10d.backend.abilities import OtherBackends
from nc10d.backend.nccl.bindings.library import Library
from nc10d.backend.nccl.comm.comm_meeting import OLD, Parent, wait_for_ranks
from nc10d.backend.nccl.comm.communicator import Communicator, abort_all
from nc10d.backend.nccl.comm.options import NcclOptions
from nc10d.base.deadline import Deadline
from nc10d.base.run_to_end import off_main
from nc10d.base.signal_errors import Event, Thread
from nc10d.base.text import ranks_text
from nc10d.cuda.driver import EventPool, on_device
from nc10d.cuda.streams import Stream
from nc10d.errors import DistError
from nc10d.ops import Op, Recv, Send
from nc10d.store.arrival import wait_for_keys
from nc10d.store.base import Store
from nc10d.store.prefix import PrefixStore

COLLECTIVES = "all"
"""The name of the communicator for a group's collectives."""
WINDOWS = "windows"
"""The name of the communicator for a group's one-sided operations, which wait for signals."""
_UNCOUNTED = 2**63  # calls of a rank that may have made any number
_ABORTED = " aborted"  # so a communicator has ended whose operations were under way
_SLICE = 0.2  # seconds between looks at the group while the ranks meet at their end


class NcclGroup(NamedTuple):
    """A group as the backend's parts know it."""

    # `fail` fails the group with an error, and `check` raises the failure. `parent` is what the
    # group's communicator grows from on this rank, or None; `split_off` is the communicator itself,
    # if it was split off another group's.

    name: str
    rank: int
    size: int
    store: Store
    library: Library
    options: NcclOptions
    fail: Callable[[DistError], None]
    check: Callable[[], None]
    others: OtherBackends
    parent: Parent | None = None
    split_off: Communicator | None = None


class CommStream:
    """A communicator with its stream; `queue` holds the launches deferred until it is formed."""

    def __init__(self, name: str, ranks: Sequence[int], stream: Stream, event: int) -> None:
        self.name = name
        self.ranks = ranks  # of the group
        self.event = event
        self.comm: Communicator | None = None
        self.queue: deque[Any] = deque()
        self.calls = 0  # of all collectives in a launch one, and each message
        self.captured = False  # whether calls are in CUDA graphs, which run uncounted
        self.settled = Event()  # the communicator has been formed, or never will be
        self._stream = stream
        self.stream = stream.handle

    @property
    def formed(self) -> Communicator:
        """The communicator, which has been formed."""
        assert self.comm is not None, "the communicator has not been formed"
        return self.comm

    def check(self) -> None:
        """Raise NCCLError if an operation has failed asynchronously."""
        comm = self.formed
        comm.library.check(comm.async_error(), f"nccl communicator {self.name!r}")


class CommStreams:
    """A group's communicators on its device."""

    # `formed` is called when a communicator is formed, the group's `fail` with the error if it
    # can't be formed, both on the thread that forms it.

    def __init__(self, group: NcclGroup, pool: EventPool, formed: Callable[[], None]) -> None:
        self._group = group
        self._pool = pool
        self._formed = formed
        self._comm_streams: dict[str, CommStream] = {}
        self._ended = False

    def all(self) -> list[CommStream]:
        """Return all communicators, formed or not."""
        return list(self._comm_streams.values())

    def settled(self) -> list[CommStream]:
        """Return the formed communicators by name, once no communicator is forming any more.

        No operation is in flight, so a communicator's ranks have all formed it, or are about to.
        """
        for comm_stream in self.all():
            comm_stream.settled.wait()
        return self._formed_streams()

    def find(self, name: str) -> CommStream | None:
        """Return a communicator by name, None if not used yet."""
        return self._comm_streams.get(name)

    def of(self, op: Op, deadline: Deadline) -> CommStream:
        """Return an operation's communicator; begins to form a new one, until `deadline`."""
        if isinstance(op, (Send, Recv)) and self._group.options.links != "group":
            assert op.peer is not None, "a receive from any rank has been refused"
            here, there = self._group.rank, op.peer
            src, dst = (here, there) if isinstance(op, Send) else (there, here)
            tag = f"-{op.tag}" if self._group.options.links == "tag" else ""
            return self.get(f"{src}-{dst}{tag}", (src, dst), deadline)
        return self.get(COLLECTIVES, range(self._group.size), deadline)

    def get(self, name: str, ranks: Sequence[int], deadline: Deadline) -> CommStream:
        """Return a communicator by name; begins to form a new one."""
        comm_stream = self._comm_streams.get(name)
        if comm_stream is None:
            stream = Stream(self._pool.device, self._group.options.high_priority)
            comm_stream = CommStream(name, ranks, stream, self._pool.take())
            self._comm_streams[name] = comm_stream
            arguments, thread_name = (comm_stream, deadline), f"nc10d-nccl-form-{name}"
            Thread(
                target=self._form_communicator, args=arguments, name=thread_name, daemon=True
            ).start()
        return comm_stream

    def _form_communicator(self, comm_stream: CommStream, deadline: Deadline) -> None:
        """Form a communicator, on its own thread; an error fails the group."""
        try:
            comm = self._communicator(comm_stream, deadline)
        except DistError as error:
            self._group.fail(error)
            comm_stream.settled.set()
            return
        comm_stream.comm = comm
        comm_stream.settled.set()
        if self._ended:  # meanwhile, and `abort` has not seen this communicator
            comm.abort()
        else:
            self._formed()

    def _communicator(self, comm_stream: CommStream, deadline: Deadline) -> Communicator:
        if comm_stream.name == COLLECTIVES and self._group.split_off is not None:
            return self._group.split_off
        store = self._group.store.clone()
        try:
            name = f"the communicator for {_use(comm_stream.name)} of group {self._group.name!r}"
            keys = PrefixStore(comm_stream.name, store)
            ranks, library = comm_stream.ranks, self._group.library
            rank, size = ranks.index(self._group.rank), len(ranks)
            parent = self._group.parent if comm_stream.name == COLLECTIVES else None
            check = self._group.check
            if parent is not None:
                keys.set(f"{OLD}/{rank}", f"{parent.rank} of {parent.size}")
                keys.set(OLD, "")
            meeting = keys, library, name, rank, size, deadline, check, self._group.others
            unique = wait_for_ranks(*meeting, parent, ranks)
            grows = comm_stream.name == COLLECTIVES and keys.check([OLD])
        finally:
            store.close()
        config, device = self._group.options.config, self._pool.device
        enter = functools.partial(on_device, device)
        place = library, unique, rank, size, deadline, enter, config
        if not grows:
            return Communicator.create(*place)
        return Communicator.grown(*place, parent.communicator if parent is not None else None)

    def abort(self) -> None:
        """Abort all communicators and the operations on them; blocks until NCCL has done so."""
        # A communicator that is being formed is aborted once formed. Deferred launches are dropped.
        self._ended = True
        for comm_stream in self.all():
            comm_stream.queue.clear()
        abort_all([comm_stream.formed for comm_stream in self._formed_streams()])

    def leave(self, store: Store, cut_off: Mapping[CommStream, int] | None = None) -> None:
        """Publish that this rank's communicators end, and after how many calls each.

        `cut_off` is the first call on a communicator that an abort ends; None without an abort.
        """
        self._ended = True
        for each in self._formed_streams():
            calls = each.calls if cut_off is None else cut_off.get(each, each.calls + 1) - 1
            end = f"{_UNCOUNTED if each.captured else calls}{'' if cut_off is None else _ABORTED}"
            store.set(end_key(each.name, self._group.rank), end)

    def close(self, store: Store, check: Callable[[], None]) -> None:
        """Close all communicators, after all their ranks have left; no operation is in flight.

        NCCL's destroy waits for the other ranks of a node (its guide, ncclCommDestroy), so the
        ranks meet in the store first. `check` is called meanwhile; an error that it raises, and one
        of the store, leaves the communicators open.
        """
        self.leave(store)
        formed = self._formed_streams()
        keys = [end_key(each.name, rank) for each in formed for rank in each.ranks]
        with contextlib.closing(store.clone()) as mine:  # `store` is not for long waits
            while not wait_for_keys(mine, keys, _SLICE):
                check()
            ends = [mine.get(key).decode() for key in keys]
        if any(end.endswith(_ABORTED) for end in ends):
            self.abort()
            return
        for comm_stream in formed:
            comm_stream.formed.close()

    @off_main
    def missing(self, store: Store) -> str:
        """Return which ranks `close` waits for, "" for none, or if the store is gone."""
        formed = self._formed_streams()
        ends = [(rank, end_key(each.name, rank)) for each in formed for rank in each.ranks]
        with contextlib.suppress(DistError, OSError):
            absent = sorted({rank for rank, key in ends if not store.check([key])})
            if absent:
                return f"{ranks_text(absent)} did not destroy group {self._group.name!r}"
        return ""

    def _formed_streams(self) -> list[CommStream]:
        """Return the formed communicators by name, which is the same order on all ranks."""
        each = sorted(self.all(), key=lambda comm_stream: comm_stream.name)
        return [comm_stream for comm_stream in each if comm_stream.comm is not None]


def _use(name: str) -> str:
    """Return what a communicator is for, in words."""
    if name == COLLECTIVES:
        return "collectives"
    src, *link = name.split("-", 2)
    if not link:
        return name
    tag = f" with tag {link[1]}" if len(link) > 1 else ""
    return f"messages from rank {src} to rank {link[0]}{tag}"


def end_key(name: str, rank: int) -> str:
    """Return the store's key under which a rank that leaves a communicator counts its calls."""
    return f"{name}/end/{rank}"


def calls_of(end: bytes) -> int:
    """Return the calls that a rank has counted under `end_key`."""
    return int(end.decode().removesuffix(_ABORTED))
