"""ProcessGroup: some ranks, their order, and the backends that run their operations.

A group maps each kind of device to a backend, made at first need. Everything about a group is an
attribute of the group. Any thread may call; the order of launch is the order of execution. A group
that was aborted, closed or inherited through fork raises in every later call.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nc10d.arrays.arguments import integer, split_lists
from nc10d.backend.config import FAILURE_DETECTOR, BackendConfig
from nc10d.backend.protocol import Backend, BackendSetup
from nc10d.backend.registry import find_backend, load_factory
from nc10d.base import debug_level
from nc10d.base.callable_values import CallableInt, CallableStr
from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.promise import copy_to_raise
from nc10d.base.run_to_end import import_to_end
from nc10d.base.text import digest
from nc10d.errors import CollectiveMismatch, UnsupportedPlatform
from nc10d.group.call_agreement import GroupCalls
from nc10d.group.coalescing import CoalescingManager
from nc10d.group.dispatch import Observer
from nc10d.group.ending import EndableGroup, live_groups
from nc10d.group.point_to_point import BatchedMessage
from nc10d.ops import Recv, Send
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.group.typed_calls import TypedCalls
    from nc10d.store.base import Store

    class _Dispatcher(TypedCalls, EndableGroup):
        """A group whose calls are typed by their `async_op`."""
else:
    _Dispatcher = EndableGroup

__all__ = ["MADE_WITH_GROUP", "Observer", "ProcessGroup"]

MADE_WITH_GROUP = ("cpu", FAILURE_DETECTOR)
"""The places whose backends are made together with the group, while all ranks are in the call.

Groups made from it split these backends. Another device's backend is made when the first array on
that device comes.
"""
_MOST_NAMED = 8  # members in an error's text


class Members:
    """Global `ranks` in the group's order; `rank` is this process's rank in the group.

    `name`, `rank` and `size` can be called too, as c10d's methods: `group.rank()`. `numbers` maps a
    global rank to a rank in the group. `reducers` counts the Reducers made on the group so far, the
    same number on all members.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        self.name = CallableStr(name)
        self.ranks = tuple(integer("ProcessGroup", "ranks", member) for member in ranks)
        self.rank = CallableInt(integer("ProcessGroup", "rank", rank))
        self.size = CallableInt(len(self.ranks))
        self.reducers = 0
        self.numbers = {member: index for index, member in enumerate(self.ranks)}

    @property
    def group_name(self) -> str:
        """The name as a plain str."""
        return self.name()

    def group_rank(self, global_rank: int) -> int:
        """Return the rank in this group of a global rank; ValueError for a non-member."""
        if type(global_rank) is not int:  # the table would accept 1.0 as 1
            global_rank = integer("group_rank", "global_rank", global_rank)
        index = self.numbers.get(global_rank)
        if index is None:
            message = f"global rank {global_rank} is not in group {self.name!r} of ranks"
            ranks = str([*self.ranks])
            if self.size > _MOST_NAMED:
                ranks = f"{[*self.ranks[: _MOST_NAMED - 1]]}... ({self.size})"
            raise ValueError(f"{message} {ranks}")
        return index

    def global_rank(self, group_rank: int) -> int:
        """Return the global rank of a rank in this group; ValueError if there is none."""
        group_rank = integer("global_rank", "group_rank", group_rank)
        if not 0 <= group_rank < self.size:
            message = f"group {self.name!r} has ranks 0 to {self.size - 1}, got {group_rank}"
            raise ValueError(message)
        return self.ranks[group_rank]


class ProcessGroup(_Dispatcher, Members):
    """Some ranks that communicate; `ranks` are global, `rank` is mine among them.

    `timeout` is in seconds. `config` maps devices to backends; `options` (as init_process_group's
    `pg_options`) go to the backends, after those of `parent`. Operations are methods, with ranks in
    the group; see nc10d.group.collectives.
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
        options: object = None,
        parent: ProcessGroup | None = None,
        survivors: Sequence[int] | None = None,
        description: str | None = None,
    ) -> None:
        Members.__init__(self, name, ranks, rank)
        EndableGroup.__init__(self, name, config, timeout)
        self.store = store
        inherited = {} if parent is None else parent.options
        self.options: dict[str, Any] = inherited | config.options(options)
        self.description = description or name
        self.device_id: object = None if parent is None else parent.device_id
        self.allow_pickle: bool | None = None
        """Whether the program allows pickles in object calls; None before the first such call."""
        self.calls = GroupCalls(name, self.rank(), store)
        self._parent = parent
        self._survivors = survivors
        self._split_off: dict[str, Any] = {}  # by device, until the backends are made

    def _new_backend(self, device: str, deadline: Deadline) -> Backend:
        name = self.config.backend_for(device)
        options = self.options.get(name)
        parent = self._parent
        # Every rank must decide alike, whichever backends are made already.
        there = None if parent is None or device not in MADE_WITH_GROUP else _place_of(name, parent)
        if parent is not None and there is not None:
            if self._survivors is not None:
                whole = parent.backend(there, deadline).shrinkable
                assert whole is not None, "shrink_group refuses other backends"
                return whole.shrink(self._survivors, self.name(), self.store, deadline)
            relative = [parent.group_rank(member) for member in self.ranks]
            return parent.backend(there, deadline).split(
                relative, self.name(), self.store, deadline, options
            )
        factory = load_factory(find_backend(name))
        bound = None if device in MADE_WITH_GROUP else self.device_id
        setup = BackendSetup(
            self.name(),
            self.rank(),
            self.size(),
            self.store,
            deadline,
            options,
            device=bound,
            others=self._backends.others(device),
            split_off=self._split_off.get(device),
        )
        made = factory(setup)
        if Backend not in type(made).__mro__:  # abilities are looked up by the base's names
            kind = type(made).__qualname__
            raise TypeError(f"backend {name!r}: {kind} does not derive from nc10d's Backend")
        return made

    def _backend_made(self, device: str) -> None:
        if device not in MADE_WITH_GROUP:
            on_late_backend(self, device)

    def make_backends(self, deadline: Deadline | None = None) -> None:
        """Make the backends of MADE_WITH_GROUP, or for all devices with a `device_id`."""
        # Blocks until all have come or `deadline` (by default, the group's timeout). On an error
        # the group is closed.
        try:
            # The backend that detects failures comes first: it reports deaths while others form.
            places = sorted(self.config.places, key=lambda place: place not in MADE_WITH_GROUP)
            for device in places:
                if device in MADE_WITH_GROUP or self.device_id is not None:
                    try:
                        self.backend(device, deadline)
                    except UnsupportedPlatform:
                        # Without a failure detector, ranks report failures in the store.
                        if device != FAILURE_DETECTOR:
                            raise
        except BaseException:
            self.close()
            for part in filter(None, self._split_off.values()):
                part.abort()
            raise
        finally:
            self._split_off = {}

    def _split_off_from(
        self, parent: ProcessGroup, lists: Sequence[Sequence[int]], deadline: Deadline
    ) -> None:
        """Let the parent's backends prepare this group, one of `lists` of global ranks."""
        # If the lists leave ranks out, nothing is prepared. These ranks would have to come, and
        # groups of other ranks, which form at the same time, would form one after another.
        if parent.device_id is None or sorted(itertools.chain(*lists)) != sorted(parent.ranks):
            return
        for device, name in parent.config.places.items():
            if device not in MADE_WITH_GROUP:
                place = self.config.places.get(device), self.device_id
                alike = place == (name, parent.device_id)
                ranks = [parent.group_rank(rank) for rank in self.ranks] if alike else []
                backend, options = parent.backend(device, deadline), self.options.get(name)
                with parent.failed_by_interrupt("making groups"):
                    self._split_off[device] = backend.split_off(ranks, deadline, options)

    @property
    def backend_name(self) -> str:
        """The backend's name as the user has given it; "gloo" if no backend was named."""
        return self.config.asked

    @property
    def group_desc(self) -> str:
        """The description given to the call that made the group, else the group's name."""
        return self.description

    def get_group_store(self) -> Store:
        """Return the group's store."""
        return self.store

    def coalescing_manager(
        self, device: object = None, async_ops: bool = False
    ) -> CoalescingManager:
        """Collect this thread's calls in a with-block, at whose end they are launched together.

        See nc10d.coalescing_manager. `device` is accepted for c10d's sake.
        """
        return CoalescingManager(self, async_ops)

    def batch_isend_irecv(self, p2p_op_list: Sequence[BatchedMessage]) -> list[Work]:
        """Launch this group's sends and receives together; return their Works in order.

        ValueError for an empty list, or another group's messages.
        """
        if not p2p_op_list or any(message.group is not self for message in p2p_op_list):
            raise ValueError("batch_isend_irecv: all operations must be of the same group")
        ops = [message.operation() for message in p2p_op_list]
        works = None if self.in_batch() else self.try_prepared_messages(ops)
        return self._start_messages(ops, None) if works is None else works

    def _start_messages(self, ops: Sequence[Send | Recv], timeout: Timeout) -> list[Work]:
        block = contextlib.nullcontext() if self.in_batch() else self.coalescing_manager(True)
        with block:
            started = [self._run(op, op.x, True, timeout) for op in ops]
        return [work for work in started if work is not None]

    def split_group(
        self,
        split_ranks: Sequence[Sequence[int]] | None,
        timeout: Timeout = None,
        pg_options: object = None,
        group_desc: str | None = None,
        backend: str | None = None,
    ) -> ProcessGroup | None:
        """Split the group by disjoint lists of ranks in it; all ranks call with the same lists.

        If the lists differ, CollectiveMismatch on all ranks, and the group has failed. Blocks until
        all have come, or for `timeout` (seconds or timedelta). Returns this rank's new group,
        None if no list has it. As nc10d.split_group, but the caller closes the group.
        """
        self.refuse_in_batch("split_group")
        lists = split_lists(split_ranks, self.size)
        limit, config = terms(self, timeout, backend, pg_options)
        deadline = Deadline.after(limit)
        # A split needs the parent's backends; to make them, all the parent's ranks are here.
        self.make_backends(deadline)
        number = self.agree_on_call(f"split_group({[[*ranks] for ranks in lists]})")
        own = next((ranks for ranks in lists if self.rank in ranks), None)
        if own is None:
            return None
        # The lists are disjoint, so the first member makes the names of a split's groups unique.
        name = f"{self.name}/split{number}-{own[0]}"
        members = [self.ranks[rank] for rank in own]
        group = self.child(name, members, limit, config, pg_options, group_desc)
        whole = [[self.ranks[rank] for rank in ranks] for ranks in lists]
        group._split_off_from(self, whole, deadline)
        group.make_backends(deadline)
        return group

    split = split_group

    def child(
        self,
        name: str,
        members: Sequence[int],
        timeout: float,
        config: BackendConfig,
        options: object = None,
        description: str | None = None,
    ) -> ProcessGroup:
        """Return a group of some of this group's `members` (global ranks). Never blocks."""
        return ProcessGroup(
            name,
            members,
            members.index(self.global_rank(self.rank)),
            # Ranks that mean other members must not meet under this name.
            prefix_store(f"{name}/{digest(repr([*members]))}", self.store),
            timeout,
            config,
            options=options,
            parent=self,
            description=description,
        )

    def successor(
        self, name: str, members: Sequence[int], store: Store, deadline: Deadline
    ) -> ProcessGroup:
        """Make a group from the surviving `members` (ranks here); see nc10d.shrink_group.

        Blocks until all of them have come or `deadline`.
        """
        group = ProcessGroup(
            name,
            range(len(members)) if self is default_group() else [self.ranks[r] for r in members],
            members.index(self.rank),
            store,
            self.timeout,
            self.config,
            parent=self,
            survivors=members,
            description=self.description,
        )
        group.make_backends(deadline)
        group._parent = None  # the parent is about to be closed
        return group

    def agree_on_call(self, call: str, count: int = 1) -> int:
        """Number a call, made by all ranks, that makes `count` groups from this group.

        CollectiveMismatch on all ranks, and the group has failed, if a rank makes another call.
        """
        try:
            with self.failed_by_interrupt(call):
                return self.calls.agree(call, count)
        except CollectiveMismatch as error:
            self.abort(error)
            raise copy_to_raise(self._backends.failure or error) from None

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            f"{self!r} can't be pickled or copied: it belongs to this process. Send its ranks, and "
            "make a group of them by new_group where they are received"
        )

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.name!r}: rank {self.rank} of {self.size}, {self.config}>"


def prefix_store(prefix: str, store: Store) -> Store:
    """Return `store` with `prefix` before every key."""
    found: Store = import_to_end("nc10d.store.prefix").PrefixStore(prefix, store)
    return found


def _place_of(name: str, group: ProcessGroup) -> str | None:
    """Return where a group has a backend with this name that was made at once, if any."""
    places = group.config.places
    return next((place for place in MADE_WITH_GROUP if places.get(place) == name), None)


def terms(
    parent: ProcessGroup, timeout: Timeout, backend: str | None, options: object
) -> tuple[float, BackendConfig]:
    """Return a new group's timeout (seconds) and configuration; by default, `parent`'s."""
    # ValueError or TypeError for wrong arguments, UnsupportedPlatform for a backend that can't work
    # here. Called before the new group gets its number, so that ranks with wrong arguments count
    # groups like the others.
    limit = parent.timeout if timeout is None else seconds(timeout)
    config = parent.config if backend is None else BackendConfig(backend)
    config.options(options)
    if backend is not None:
        config.require()
    return limit, config


def _refresh_all() -> None:
    for group in tuple(live_groups):
        group._refresh()


debug_level.listeners.append(_refresh_all)

on_late_backend: Callable[[ProcessGroup, str], None] = lambda group, device: None  # noqa: E731
"""Called when a formed group has made another backend; nc10d.group.world sets it."""
default_group: Callable[[], ProcessGroup | None] = lambda: None  # noqa: E731
"""Returns the job's default group, or None; nc10d.group.world sets this on import."""
