"""The default group and the groups made from it: c10d's state per process.

A World is a rank's view: the default group and all groups of the rank, by name. A process has one
World. A thread can have a separate World (ranks as threads, in tests), which other threads don't
see. All ranks make groups in the same order, which call_agreement.py checks; that order gives
groups their names.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, overload

import nc10d.group.process_group
from nc10d.backend.backend_table import BackendTable
from nc10d.backend.config import BackendConfig
from nc10d.base import uncaught, variables
from nc10d.base.callable_values import CallableInt
from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.run_to_end import import_to_end
from nc10d.base.signal_errors import suppress_here
from nc10d.errors import DistError, GroupClosed
from nc10d.group.collectives import Collectives
from nc10d.group.ending import CLOSE_PATIENCE
from nc10d.group.point_to_point import PointToPoint
from nc10d.group.process_group import ProcessGroup, prefix_store
from nc10d.ops import Array, MessageInfo, Op, Recv, Send
from nc10d.ops.facts import FACTS, name_of

if TYPE_CHECKING:
    from nc10d.store.base import Store

DEFAULT_TIMEOUT = 30 * 60.0
"""Seconds that an operation may take by default; c10d's value."""
_PATIENCE_AMID_ERRORS = 1.0  # seconds that a rank waits for others then, instead of CLOSE_PATIENCE


class World:
    """A rank's groups: the default group, and all groups by name in the order of creation.

    A group that its program has dropped is not in `groups` any more. Its backends end with it, or
    stay in `dropped` until they can end: operations are in flight, or peers must take part.
    `of_ranks` are groups that calls have made for lists of ranks, and find again.
    """

    def __init__(self) -> None:
        self.default: ProcessGroup | None = None
        self.groups: weakref.WeakValueDictionary[str, ProcessGroup] = weakref.WeakValueDictionary()
        self.of_ranks: dict[tuple[Sequence[int], str], ProcessGroup] = {}
        self.dropped: list[BackendTable] = []
        self.closed: list[BackendTable] = []
        self.owned_store: Store | None = None

    def add(self, group: ProcessGroup, deadline: Deadline) -> ProcessGroup:
        """Make the backends that are not made on first use, and register `group`.

        Blocks until all members have come; after an error the group does not exist.
        """
        group.make_backends(deadline)
        return self.keep(group)

    def keep(self, group: ProcessGroup) -> ProcessGroup:
        """Register a group that is complete."""
        self.groups[group.name] = group
        self.dropped = [table for table in self.dropped if not table.droppable()]
        weakref.finalize(group, _drop, weakref.ref(self), group._backends).atexit = False
        _dump_if_asked(group, "cpu")
        return group

    def forget(self, group: ProcessGroup) -> None:
        """Close and remove `group`."""
        self.groups.pop(group.name, None)
        self.of_ranks = {key: one for key, one in self.of_ranks.items() if one is not group}
        group._close()
        self.closed = [table for table in self.closed if table.closing]
        self.closed.append(group._backends)

    def clear(self) -> None:
        """Close every group, the latest first, then the store if init_process_group made it."""
        groups, dropped, closed = [*self.groups.values()], self.dropped, self.closed
        store, self.owned_store = self.owned_store, None
        self.default = None
        self.groups.clear()
        self.of_ranks, self.dropped, self.closed = {}, [], []
        for group in reversed(groups):
            group._close()
        for table in reversed(dropped):
            table.close(GroupClosed("the group has been destroyed"))
        error = sys.exc_info()[1]
        ended = error is None or isinstance(error, SystemExit)
        # Amid an error: peers that wait for this rank learn the error, and do not come.
        deadline = Deadline.after(CLOSE_PATIENCE if ended else _PATIENCE_AMID_ERRORS)
        for table in (*closed, *dropped, *(group._backends for group in groups)):
            table.await_close(deadline)  # after all are closed: ranks need no common order then
        close_store = getattr(store, "close", None)
        if close_store is not None:
            close_store()


def _drop(world: weakref.ref[World], table: BackendTable) -> None:
    """Keep a dropped group's backends if they can't end yet."""
    found = world()
    if found is not None and not table.droppable():
        found.dropped.append(table)


process_world = World()
adapters_worlds: list[World] = []
"""The Worlds for other libraries' groups that run on nc10d; see `close_at_exit`."""
# Worlds by thread ident. Not a threading.local: every call checks this dict, mostly empty.
own_worlds: dict[int, World] = {}
on_own_world: list[Callable[[], object]] = []
"""Called when a thread gets a separate World."""
_inherited: list[object] = []


def _disown_store() -> None:
    """Keep the parent's store and groups in a forked child, which must not end them."""
    own = current_world()
    for world in {process_world, own, *adapters_worlds}:
        _inherited.extend((world.owned_store, world.dropped, world.closed))
        world.owned_store, world.dropped, world.closed = None, [], []
    own_worlds.clear()  # the other threads do not exist here, and their idents may be reused
    if own is not process_world:
        own_worlds[get_ident()] = own


os.register_at_fork(after_in_child=_disown_store)


def current_world() -> World:
    """Return this thread's own World, or the process's World."""
    return own_worlds.get(get_ident(), process_world)


@contextlib.contextmanager
def own_world() -> Iterator[World]:
    """Give this thread a separate World, for ranks as threads."""
    thread, outer = get_ident(), current_world()
    own_worlds[thread] = World()
    for note in on_own_world:
        note()
    try:
        yield own_worlds[thread]
    finally:
        own_worlds[thread] = outer
        if outer is process_world:
            del own_worlds[thread]


def get_default_group() -> ProcessGroup:
    """Return the default group; ValueError before init_process_group."""
    group = current_world().default
    if group is None:
        raise ValueError("there is no default process group: call init_process_group() first")
    return group


nc10d.group.process_group.default_group = lambda: current_world().default


def _dump_if_asked(group: ProcessGroup, device: str) -> None:
    if os.environ.get("NC10D_DUMP_DIR") or os.environ.get("NC10D_DUMP_SIGNAL"):
        import_to_end("nc10d.group.flight_recorder").dump_automatically(group, device)


nc10d.group.process_group.on_late_backend = _dump_if_asked


class NonMember(Collectives, PointToPoint):
    """The result of `new_group` on ranks outside the group: all calls warn and do nothing."""

    rank = size = CallableInt(-1)
    allow_pickle = None  # no call on it is prepared: see nc10d.api.objects

    def _run(self, op: Op, array: Array, async_op: bool, timeout: Timeout) -> None:
        warn_non_member(name_of(op))

    def _call(
        self, kind: type[Op], extra: object, x: Array, y: object, async_op: bool, timeout: Timeout
    ) -> None:
        warn_non_member(FACTS[kind].name)

    def recv(
        self, tensor: Array, src: int | None = None, tag: int = 0, timeout: Timeout = None
    ) -> None:
        """Warn, and return None: no message has come."""
        self._call(Recv, src, tensor, tag, False, timeout)

    def _exchange_new(self, send: Send, recv: Recv, timeout: Timeout) -> None:
        warn_non_member("sendrecv", 4)

    def _probe(self, src: int | None, tag: int | None, deadline: Deadline) -> MessageInfo | None:
        warn_non_member("probe", 5)
        return None

    def probe(self, src: int | None = None, tag: int | None = None, timeout: Timeout = None) -> Any:
        """Warn, and return None: no message will come."""
        warn_non_member("probe", 3)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(ProcessGroup, name):
            raise AttributeError(name)
        return lambda *_, **__: warn_non_member(name)

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


def warn_non_member(call: str, level: int = 5) -> None:
    """Warn that a call does nothing; `level` counts the frames up to the user's, this included."""
    message = f"{call}: this rank is not in the group, so the call does nothing"
    warnings.warn(message, RuntimeWarning, stacklevel=level)


class _MemberMeta(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group, or None before init_process_group."""
        return current_world().default


class GroupMember(metaclass=_MemberMeta):
    """c10d's names for the default group and for not being in a group."""

    NON_GROUP_MEMBER = NonMember()


Group = ProcessGroup | NonMember | None
"""A public call's group argument; None stands for the default group."""


@overload
def group_or_default(group: ProcessGroup | None, name: str = ...) -> ProcessGroup: ...


@overload
def group_or_default(group: Group, name: str = ...) -> ProcessGroup | NonMember: ...


def group_or_default(group: Group, name: str = "group") -> ProcessGroup | NonMember:
    """Return `group`, or the default group for None; TypeError names the argument `name`."""
    if group is None:
        return (current_world() if own_worlds else process_world).default or get_default_group()
    if not isinstance(group, Collectives):
        raise TypeError(f"{name} must be a ProcessGroup or None, got {group!r}")
    return group


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: Timeout = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: object = None,
    device_id: object = None,
) -> None:
    """Meet the other ranks and make the default group; blocks until all have come.

    `init_method` is "env://" (the default), "tcp://host:port" or "file:///path". A `store` with
    `rank` and `world_size` replaces it. `backend` is a name or pairs like "cpu:cpu,cuda:nccl"; None
    and "nc10d" stand for these pairs. `timeout` (seconds or timedelta; 30 minutes) bounds this call
    as a whole and, by default, every operation. `pg_options` are the backend's own options (of
    several backends: a dict from name to options); `cpu` has none. With `device_id` this call makes
    the backends of all devices, for that device.

    Before anything is sent: ValueError for a second call and for arguments that don't fit
    together, TypeError for options that the backend does not know, UnsupportedPlatform for a
    backend that can't work on this machine ("nccl" without a GPU). RendezvousError or StoreError if
    the ranks don't find each other, PeerLost if a rank dies meanwhile.
    """
    uncaught.install()
    variables.warn_once()
    world = current_world()
    if world.default is not None and world.default.inherited:
        world.clear()  # groups of the process that forked this one
    if world.default is not None:
        message = "the default process group exists already"
        raise ValueError(f"{message}: call destroy_process_group() before another init")
    config = BackendConfig(backend)
    config.options(pg_options)
    config.require()
    limit = DEFAULT_TIMEOUT if timeout is None else seconds(timeout)
    deadline = Deadline.after(limit)
    _check_meeting(store, init_method, rank, world_size)
    name = group_name or "world"
    if store is None:
        store, rank, world_size = _meet(config, init_method, rank, world_size, deadline, limit)
        world.owned_store, keys = store, prefix_store(name, store)
    else:
        keys = meet_in(store, name, config, rank, world_size, deadline, limit)
    group = ProcessGroup(name, range(world_size), rank, keys, limit, config, options=pg_options)
    group.device_id = device_id
    try:
        world.default = world.add(group, deadline)
    except BaseException:
        world.clear()
        raise
    close_at_exit()


def _check_meeting(store: Store | None, init_method: str | None, rank: int, size: int) -> None:
    if store is None:
        return
    if init_method is not None:
        raise ValueError("init_process_group takes a store or an init_method, not both")
    if size < 1:
        raise ValueError(f"with a store, world_size must be given and positive, got {size}")
    if not 0 <= rank < size:
        raise ValueError(f"with a store, rank must be given, 0 to {size - 1}, got {rank}")


def _meet(
    config: BackendConfig,
    method: str | None,
    rank: int,
    size: int,
    deadline: Deadline,
    limit: float,
) -> tuple[Store, int, int]:
    """Return the store in which the ranks meet, this rank and the world size."""
    meet = config.meeting()
    if method is None and meet is not None:
        return meet(rank, size, deadline)
    # Imported late: a job with a given store needs no sockets.
    methods = import_to_end("nc10d.init_methods.methods")
    found: tuple[Store, int, int] = methods.meet_by(method or "env://", rank, size, deadline, limit)
    return found


def meet_in(
    store: Store,
    name: str,
    config: BackendConfig,
    rank: int,
    size: int,
    deadline: Deadline,
    limit: float,
) -> Store:
    """Meet the other ranks in a store that may serve several inits; return this init's keys."""
    meetings = prefix_store(f"meeting/{name}", store)
    if set(config.devices.values()) == {"fake"}:  # "fake" never waits for other ranks
        number = meetings.add(f"fake/{rank}", 1)
    else:
        meeting = import_to_end("nc10d.init_methods.meeting")
        number = meeting.meet(meetings, rank, size, deadline, limit)
    return prefix_store(f"{name}/{number}", store)


def close_at_exit(world: World | None = None) -> None:
    """Have the groups of the process's World, and those of `world`, closed at exit."""
    if world is not None and world not in adapters_worlds:
        adapters_worlds.append(world)
    atexit.unregister(_exit)  # registered anew, it runs before handlers registered meanwhile
    atexit.register(_exit)


def _exit() -> None:
    """Close all groups at exit, without errors: destroy_process_group reports them.

    The error that has ended the program is handled meanwhile, so that waiting peers learn it.
    """
    error = getattr(sys, "last_value", None) or SystemExit()
    for world in (*adapters_worlds, process_world):
        with suppress_here(DistError, OSError):
            try:
                raise error
            except BaseException:  # noqa: BLE001  (Python has printed it)
                world.clear()


def destroy_process_group(group: ProcessGroup | NonMember | None = None) -> None:
    """Close `group`; for None or the default group, close all groups and the store.

    Operations in flight fail with GroupClosed. ValueError if this rank does not have the group.
    """
    world = current_world()
    if isinstance(group, NonMember):
        return
    group = group_or_default(group)
    if group is world.default:
        world.clear()
    elif world.groups.get(group.name) is group:
        world.forget(group)
    else:
        raise ValueError(f"{group!r} is not a group of this rank, or has been destroyed already")


def abort_process_group(
    group: ProcessGroup | None = None, reason: BaseException | str | None = None
) -> None:
    """Fail all operations of `group` on all ranks, now; for None, of every group."""
    world = current_world()
    group = group_or_default(group)
    for aborted in [*world.groups.values()] if group is world.default else [group]:
        aborted.abort(reason)
