"""Communicators with a stream each: for a group's collectives, and for each of its links.

A link is a direction between two ranks for a tag. A communicator executes in order; because links
have communicators of their own, messages overtake collectives and each other, and both ranks may
send first. A communicator is formed at its first use, on a thread of its own: other ranks may come
to it later, after operations that this rank has to do first. Launches meanwhile are deferred until
it is formed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from nc10d.backend.nccl.bindings.library import Library
from nc10d.backend.nccl.comm.comm_init import wait_for_ranks
from nc10d.backend.nccl.comm.communicator import Communicator
from nc10d.backend.nccl.comm.options import NcclOptions
from nc10d.base.deadline import Deadline
from nc10d.cuda.driver import on_device
from nc10d.cuda.events import EventPool
from nc10d.cuda.streams import Stream
from nc10d.errors import DistError
from nc10d.ops import Op, Recv, Send
from nc10d.store.prefix import PrefixStore

if TYPE_CHECKING:
    from nc10d.store.base import Store


COLLECTIVES = "all"
"""The name of the communicator of a group's collectives."""


class GroupIdentity(NamedTuple):
    """The name of a group, this rank in it, and its size."""

    group: str
    rank: int
    size: int


class CommStream:
    """A communicator with its stream; `queue` holds the launches deferred until it is formed."""

    def __init__(self, name: str, rank: int, size: int, stream: Stream, event: int) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.event = event
        self.comm: Communicator | None = None
        self.queue: deque[Any] = deque()
        self.launched = 0
        self._stream = stream
        self.stream = stream.handle

    @property
    def lock(self) -> threading.RLock:
        """The lock that a thread holds while it is in NCCL with the communicator."""
        assert self.comm is not None, "the communicator has not been formed"
        return self.comm.lock

    @property
    def handle(self) -> int:
        """The ncclComm_t; GroupClosed once it has ended."""
        assert self.comm is not None, "the communicator has not been formed"
        return self.comm.handle

    def settle(self, deadline: Deadline, call: str) -> None:
        """Wait until a nonblocking communicator takes calls again."""
        assert self.comm is not None, "the communicator has not been formed"
        self.comm.settle(deadline, call)

    def check(self) -> None:
        """Raise NCCLError if an operation has failed asynchronously."""
        comm = self.comm
        assert comm is not None, "the communicator has not been formed"
        comm.library.check(comm.async_error(), f"nccl communicator {self.name!r}")


class CommStreams:
    """The communicators of a group on its device.

    `formed` is called when a communicator is formed, `fail` with the error if it can't be, both on
    the thread that forms it. `check` raises the group's failure.
    """

    def __init__(
        self,
        identity: GroupIdentity,
        store: Store,
        library: Library,
        options: NcclOptions,
        pool: EventPool,
        *,
        formed: Callable[[], None],
        fail: Callable[[DistError], None],
        check: Callable[[], None],
    ) -> None:
        self._group, self._rank, self._size = identity
        self._store = store
        self._library = library
        self._options = options
        self._pool = pool
        self._formed = formed
        self._fail = fail
        self._check = check
        self._comm_streams: dict[str, CommStream] = {}
        self._ended = False

    def all(self) -> list[CommStream]:
        """Return all communicators, formed or not."""
        return list(self._comm_streams.values())

    def find(self, name: str) -> CommStream | None:
        """Return a communicator by name, None if it was not used yet."""
        return self._comm_streams.get(name)

    def of(self, op: Op, deadline: Deadline) -> CommStream:
        """Return an operation's communicator; begins to form a new one, until `deadline`."""
        if isinstance(op, Send):
            return self._link(self._rank, op.peer, op.tag, deadline)
        if isinstance(op, Recv):
            assert op.peer is not None, "a receive from any rank has been refused"
            return self._link(op.peer, self._rank, op.tag, deadline)
        return self.get(COLLECTIVES, self._rank, self._size, deadline)

    def _link(self, src: int, dst: int, tag: int, deadline: Deadline) -> CommStream:
        return self.get(f"{src}-{dst}-{tag}", int(dst == self._rank), 2, deadline)

    def get(self, name: str, rank: int, size: int, deadline: Deadline) -> CommStream:
        """Return a communicator by name; begins to form it if it is new."""
        comm_stream = self._comm_streams.get(name)
        if comm_stream is None:
            stream = Stream(self._pool.device, self._options.high_priority)
            comm_stream = self._comm_streams[name] = CommStream(
                name, rank, size, stream, self._pool.take()
            )
            thread = threading.Thread(
                target=self._form_communicator,
                args=(comm_stream, deadline),
                name=f"nc10d-nccl-form-{name}",
                daemon=True,
            )
            thread.start()
        return comm_stream

    def _form_communicator(self, comm_stream: CommStream, deadline: Deadline) -> None:
        """Form a communicator, on a thread of its own; an error fails the group."""
        try:
            comm = self._communicator(comm_stream, deadline)
        except DistError as error:
            self._fail(error)
            return
        comm_stream.comm = comm
        if self._ended:  # meanwhile, and `abort` has not seen this communicator
            comm.abort()
        else:
            self._formed()

    def _communicator(self, comm_stream: CommStream, deadline: Deadline) -> Communicator:
        store = self._store.clone()
        try:
            name = f"group {self._group!r}, nccl communicator {comm_stream.name!r}"
            keys = PrefixStore(comm_stream.name, store)
            unique = wait_for_ranks(
                keys, self._library, name, comm_stream.rank, comm_stream.size, deadline, self._check
            )
        finally:
            store.close()
        return Communicator.create(
            self._library,
            unique,
            comm_stream.rank,
            comm_stream.size,
            deadline,
            lambda: on_device(self._pool.device),
            self._options.config,
        )

    def abort(self) -> None:
        """Abort all communicators and the operations on them; blocks until NCCL has done so.

        A communicator that is being formed is aborted when it is formed. Deferred launches are
        dropped.
        """
        self._ended = True
        for comm in self._communicators():
            comm.abort()
        for comm_stream in self.all():
            comm_stream.queue.clear()

    def close(self) -> None:
        """Close all communicators; no operation is in flight."""
        self._ended = True
        for comm in self._communicators():
            comm.close()

    def _communicators(self) -> list[Communicator]:
        return [comm_stream.comm for comm_stream in self.all() if comm_stream.comm is not None]
