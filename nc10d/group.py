"""ProcessGroup: some ranks, their order, and what carries their operations.

A group maps each kind of device to a backend, made when it is first needed. Everything about a
group is an attribute of the group. Any thread may call; the order of launch is the order of
execution. A group that was aborted, closed or inherited through fork raises in every later call.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nc10d.arguments import integer, split_lists
from nc10d.backend.base import Backend, BackendSetup
from nc10d.backend.config import BackendConfig
from nc10d.backend.registry import find_backend, load_factory
from nc10d.batch import CoalescingManager
from nc10d.buffer import device_type
from nc10d.collectives import Collectives
from nc10d.deadline import Timeout, seconds
from nc10d.errors import Aborted, DistError, ForkedGroupError, GroupClosed
from nc10d.ops import Array, Barrier, Op
from nc10d.outcome import fresh
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.store.base import Store

Observer = Callable[["ProcessGroup", Sequence[Op], int], object]
"""Called as observer(group, ops, number of this launch) before each launch."""


AT_ONCE = ("cpu",)
"""The devices whose backends are made as soon as a group is: all its ranks are in the call at
that time, and the host mates map each other's memory then. Groups made from it split these; a
backend of another device waits until an array of that device comes, and is made afresh.
"""


class Message(Protocol):
    """What a group knows of a send or receive of a batch (nc10d.P2POp)."""

    @property
    def group(self) -> ProcessGroup:
        """The group that it belongs to."""
        ...

    def start(self) -> Work | None:
        """Join the group's open block."""
        ...


class OpenBatch(Protocol):
    """What a group knows of a coalescing block: it takes operations."""

    def add(self, op: Op, device: str, async_op: bool, timeout: Timeout) -> Work | None:
        """Take one operation; return its pending Work if `async_op`."""
        ...


class ProcessGroup(Collectives):
    """Some ranks that communicate; `ranks` are global, `rank` is mine among them.

    `timeout` is in seconds. `backend_name` is what was asked for, `config` what it means.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        store: Store,
        timeout: float,
        config: BackendConfig,
        *,
        options: Any = None,
        parent: ProcessGroup | None = None,
        description: str | None = None,
    ) -> None:
        self.name = name
        self.ranks = tuple(integer("ProcessGroup", "ranks", member) for member in ranks)
        self.rank = integer("ProcessGroup", "rank", rank)
        self.size = len(self.ranks)
        self.store = store
        self.timeout = timeout
        self.config = config
        self.options = options
        self.description = description or name
        self.device_id: Any = None
        self.splits = 0
        self._parent = parent
        self._index = {member: index for index, member in enumerate(self.ranks)}
        self._lock = threading.RLock()
        self._backends: dict[str, Backend] = {}
        self._batches: dict[int, OpenBatch] = {}
        self._observers: tuple[Observer, ...] = ()
        self._launches = itertools.count()
        self._looks = 0
        self._failure: DistError | None = None
        # The CPU's backend while nothing stands between a call and it: the group is usable,
        # nobody observes, no block is open. None sends every call the long way.
        self._hot: Backend | None = None
        _live.add(self)

    def _run(self, op: Op, array: Array, async_op: bool, timeout: Timeout) -> Work | None:
        backend = self._hot
        if backend is None or type(array) is not np.ndarray or timeout is not None:
            return self._run_any(op, array, async_op, timeout)
        next(self._launches)
        return backend.launch((op,), self.timeout, async_op)

    def _run_any(self, op: Op, array: Array, async_op: bool, timeout: Timeout) -> Work | None:
        device = self.config.first if type(op) is Barrier else device_type(array)
        batch = self._batches.get(get_ident())
        if batch is not None:
            return batch.add(op, device, async_op, timeout)
        return self.launch((op,), device, async_op, timeout)

    def launch(
        self,
        ops: Sequence[Op],
        device: str = "cpu",
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Run `ops` in order, as one submission, on the backend of `device`.

        Blocks and returns None, or returns a Work with `async_op`. An open block is passed by.
        """
        backend = self.backend(device)
        number = next(self._launches)
        for observe in self._observers:
            observe(self, ops, number)
        limit = self.timeout if timeout is None else seconds(timeout)
        return backend.launch(ops, limit, async_op)

    def backend(self, device: str) -> Backend:
        """Return the backend for a kind of device ("cpu", "cuda"), made if need be.

        Making one may wait for the other ranks. ValueError if none is configured for the device.
        """
        if self._failure is not None:
            raise fresh(self._failure)
        found = self._backends.get(device)
        return self._make_backend(device) if found is None else found

    def _make_backend(self, device: str) -> Backend:
        with self._lock:
            backend = self._backends.get(device)
            if backend is None:
                backend = self._backends[device] = self._new_backend(device)
                self._refresh()
        # An abort does not wait for the lock: it may have come before there was a backend.
        if self._failure is not None:
            backend.abort(self._failure)
            raise fresh(self._failure)
        return backend

    def _new_backend(self, device: str) -> Backend:
        name = self.config.backend_for(device)
        parent = self._parent
        # Every rank must take the same way, so what this one has made already does not count.
        if parent is not None and device in AT_ONCE and parent.config.devices.get(device) == name:
            relative = [parent.group_rank(member) for member in self.ranks]
            return parent.backend(device).split(relative, self.name, self.store, self.timeout)
        factory = load_factory(find_backend(name))
        setup = BackendSetup(
            self.name, self.rank, self.size, self.store, self.timeout, self.options
        )
        return factory(setup)

    def make_backends(self) -> None:
        """Make the backends that are made at once; all ranks call, and may wait for each other."""
        for device in AT_ONCE:
            if device in self.config.devices:
                self.backend(device)

    def _refresh(self) -> None:
        free = not (self._failure or self._observers or self._batches)
        self._hot = self._backends.get("cpu") if free else None

    def _wait_here(self, work: Work) -> None:
        try:
            work.wait()
        except KeyboardInterrupt:
            name = work._describe()
            message = f"rank {self.rank} was interrupted in {name}"
            self.abort(Aborted(message, rank=self.rank, pid=os.getpid(), group=self.name, op=name))
            raise

    @property
    def seq(self) -> int:
        """The number of launches so far on this rank; a coalesced batch is one."""
        with self._lock:
            # Looking at the counter advances it; that is subtracted again.
            self._looks += 1
            return next(self._launches) - self._looks + 1

    @property
    def inherited(self) -> bool:
        """Say whether the group belongs to the process that forked this one."""
        return isinstance(self._failure, ForkedGroupError)

    @property
    def backend_name(self) -> str:
        """The backend by the name that it was asked for."""
        return self.config.asked

    def group_rank(self, global_rank: int) -> int:
        """Return the rank in this group of a global rank; ValueError if it is no member."""
        if type(global_rank) is not int:  # as a key of the table, 1.0 would pass for 1
            global_rank = integer("group_rank", "global_rank", global_rank)
        index = self._index.get(global_rank)
        if index is None:
            message = f"global rank {global_rank} is not in group {self.name!r} of ranks"
            raise ValueError(f"{message} {_short(self.ranks)}")
        return index

    def global_rank(self, group_rank: int) -> int:
        """Return the global rank of a rank in this group; ValueError if there is none."""
        group_rank = integer("global_rank", "group_rank", group_rank)
        if not 0 <= group_rank < self.size:
            message = f"group {self.name!r} has ranks 0 to {self.size - 1}, got {group_rank}"
            raise ValueError(message)
        return self.ranks[group_rank]

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call `observer(group, ops, number)` before each launch; returns what ends that."""
        with self._lock:
            self._observers = (*self._observers, observer)
            self._refresh()
        return lambda: self._unobserve(observer)

    def _unobserve(self, observer: Observer) -> None:
        with self._lock:
            self._observers = tuple(one for one in self._observers if one is not observer)
            self._refresh()

    def open_batch(self, batch: OpenBatch) -> None:
        """Let `batch` take this thread's calls; ValueError if a block is open already."""
        self.refuse_in_batch("a nested coalescing block")
        with self._lock:
            self._batches[get_ident()] = batch
            self._refresh()

    def close_batch(self) -> None:
        """Let this thread's calls go through again."""
        with self._lock:
            self._batches.pop(get_ident(), None)
            self._refresh()

    def refuse_in_batch(self, what: str) -> None:
        """Raise ValueError if a coalescing block of this thread is open on the group."""
        if self.in_batch():
            message = f"{what} is not possible inside a coalescing block of group {self.name!r}"
            raise ValueError(message)

    def in_batch(self) -> bool:
        """Say whether a coalescing block of this thread is open on the group."""
        return get_ident() in self._batches

    def coalescing_manager(self, device: Any = None, async_ops: bool = False) -> CoalescingManager:
        """Collect this thread's calls in a with-block; see nc10d.coalescing_manager."""
        return CoalescingManager(self, async_ops)

    def batch_isend_irecv(self, p2p_op_list: Sequence[Message]) -> list[Work]:
        """Launch sends and receives as one submission; see nc10d.batch_isend_irecv."""
        if not p2p_op_list or any(one.group is not self for one in p2p_op_list):
            raise ValueError("batch_isend_irecv: all operations must be of the same group")
        if self.in_batch():
            return _start(p2p_op_list)
        with self.coalescing_manager(async_ops=True):
            return _start(p2p_op_list)

    def split_group(
        self,
        split_ranks: Sequence[Sequence[int]] | None,
        timeout: Timeout = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: str | None = None,
    ) -> ProcessGroup | None:
        """Split into groups by lists of my ranks; return mine, None if I'm in no list.

        Every rank calls with the same lists, which must be disjoint and not empty. Unlike
        nc10d.split_group, no world keeps the new group: whoever has it closes it.
        """
        self.refuse_in_batch("split_group")
        lists = split_lists(split_ranks)
        for ranks in lists:
            for rank in ranks:
                self.global_rank(rank)
        limit = self.timeout if timeout is None else seconds(timeout)
        config = self.config if backend is None else BackendConfig(backend)
        # A split needs the parent's backends: here are all of its ranks, who may have to meet.
        self.make_backends()
        self.splits += 1
        mine = next((ranks for ranks in lists if self.rank in ranks), None)
        if mine is None:
            return None
        # Disjoint lists: the smallest member tells the new groups of one split apart.
        name = f"{self.name}/split{self.splits}-{mine[0]}"
        members = [self.global_rank(rank) for rank in mine]
        group = self.child(name, members, limit, config, pg_options, group_desc)
        try:
            group.make_backends()
        except BaseException:
            group.close()
            raise
        return group

    split = split_group

    def child(
        self,
        name: str,
        members: Sequence[int],
        timeout: float,
        config: BackendConfig,
        options: Any = None,
        description: str | None = None,
    ) -> ProcessGroup:
        """Make the group of some of my `members` (global ranks), me among them; meets nobody."""
        from nc10d.store import PrefixStore  # for those who make groups of groups alone

        group = ProcessGroup(
            name,
            members,
            members.index(self.global_rank(self.rank)),
            PrefixStore(name, self.store),
            timeout,
            config,
            options=self.options if options is None else options,
            parent=self,
            description=description,
        )
        group.device_id = self.device_id
        return group

    def abort(self, reason: BaseException | str | None = None) -> None:
        """Fail every pending and later operation here and on every peer; never blocks."""
        if not isinstance(reason, DistError):
            text = "no reason given" if reason is None else str(reason)
            message = f"group {self.name!r} was aborted by its rank {self.rank}: {text}"
            aborted = Aborted(message, rank=self.rank, pid=os.getpid(), group=self.name)
            aborted.__cause__ = reason if isinstance(reason, BaseException) else None
            reason = aborted
        else:
            reason = self._own(reason)
        self._fail(reason)
        for backend in tuple(self._backends.values()):
            backend.abort(reason)

    _abort = abort

    def _own(self, reason: DistError) -> DistError:
        """Copy what the caller gave: it may be the reason of other groups too."""
        own = fresh(reason)
        assert isinstance(own, DistError)
        if own is not reason:
            own.group = own.group or self.name
        return own

    def close(self) -> None:
        """Give the backends back; idempotent. Later calls raise GroupClosed."""
        inherited = self.inherited
        self._fail(GroupClosed(f"group {self.name!r} has been destroyed", group=self.name))
        with self._lock:
            backends, self._backends = self._backends, {}
        if not inherited:
            for backend in backends.values():
                backend.close()

    def _fail(self, reason: DistError) -> None:
        self._failure = self._failure or reason
        self._hot = None

    def _disown(self) -> None:
        """Become unusable in a forked child; what the group owns stays the parent's."""
        self._lock = threading.RLock()
        self._batches.clear()
        message = f"group {self.name!r} belongs to the process that forked this one"
        self._failure = ForkedGroupError(
            f"{message}: call init_process_group in the child instead",
            rank=self.rank,
            pid=os.getpid(),
            group=self.name,
        )
        self._hot = None

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name!r}: rank {self.rank} of {self.size}, {self.config}>"


def _start(messages: Sequence[Message]) -> list[Work]:
    works = [one.start() for one in messages]
    return [work for work in works if work is not None]


def _short(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"{list(ranks[:8])[:-1]}... ({len(ranks)})"


_live: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _disown_all() -> None:
    for group in tuple(_live):
        group._disown()


os.register_at_fork(after_in_child=_disown_all)

default_group: Callable[[], ProcessGroup | None] = lambda: None  # noqa: E731
"""What `nc10d.group.WORLD` answers with; the world sets it when it is imported."""


def __getattr__(name: str) -> Any:
    # c10d has a class `group` with a WORLD; here `nc10d.group` is this module.
    if name == "WORLD":
        return default_group()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
