"""Making torch's group "nc10d", and the nc10d group below it.

The nc10d group below torch's default group meets in torch's store. Groups that torch makes later
are split from that group, so that all share memory and threads. Where torch's default group has
another backend, each group meets by itself. These groups do not belong to nc10d's own default
group: they live in a separate World, and end with torch's groups or at exit.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d

from nc10d.backend.config import BackendConfig
from nc10d.base import torch_registration, uncaught, variables
from nc10d.base.deadline import Deadline
from nc10d.base.text import digest
from nc10d.base.torch_registration import GLOO, NAME
from nc10d.errors import DistError
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import World, close_at_exit, current_world, meet_in
from nc10d.torch.backend import c10d_operators, flight_traces, torch_functions
from nc10d.torch.backend.groups import calls_of
from nc10d.torch.backend.python_backend import PythonBackend
from nc10d.torch.backend.python_group import PythonGroup
from nc10d.torch.backend.side_by_side import Adopted
from nc10d.torch.backend.torch_errors import torch_error
from nc10d.torch.backend.torch_versions import PYTHON_BACKENDS
from nc10d.torch.stores import as_own_store
from nc10d.torch.uncompiled import modules_in_python

torch_world = World()
"""The groups below torch's groups in this process."""
_LONGEST = 30
"""Characters of a name in which a group's ranks can be read."""
if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions as Setup

    Group: TypeAlias = PythonBackend | PythonGroup
_log = logging.getLogger("nc10d.torch")
_made: WeakKeyDictionary[ProcessGroup, Counter[str]] = WeakKeyDictionary()


@dataclass(slots=True)
class OwnSetup:
    """What a group is made from that torch does not make as a plugin's, by the names in `Setup`."""

    store: dist.Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: Sequence[int]
    backends: str
    """nc10d's backends by device, as nc10d.init_process_group takes them."""


def create(setup: Setup | OwnSetup, options: object, name: str = NAME) -> Group:
    """Make the group that torch asks for; blocks until all ranks have come.

    `setup` is torch's _DistributedBackendOptions, `options` the `pg_options` in the call that makes
    the group, which go to nc10d's backends; `name` is the backend's name for torch.
    """
    try:
        group = options.group if isinstance(options, Adopted) else _make(setup, options)
    except DistError as error:
        raise torch_error(error) from error
    torch_functions.install()
    world = current_world() if isinstance(options, Adopted) else torch_world
    if PYTHON_BACKENDS:
        backend = PythonBackend(group, world, name)
        flight_traces.dump_on_failure(backend)
        return backend
    c10d_operators.install_gather()
    return PythonGroup(group, world, name)


def replace_gloo() -> None:
    """Make torch.distributed give an nc10d group wherever it is asked for "gloo"; again: no change.

    Call it on every rank before the first group is made. NC10D_AS_GLOO=1 in the environment, as
    `nc10d.run --as-gloo` sets it, does the same when torch is imported. Groups that exist stay
    gloo's. A warning is logged if torch has no gloo. Blocks nobody.

        nc10d.torch.replace_gloo()
        torch.distributed.init_process_group("gloo")  # get_backend() says "gloo"
        nc10d.torch.group_of()                        # nc10d's group below
    """
    torch_registration.replace_gloo(create_as_gloo)


def create_as_gloo(
    theirs: type,
    asked: Mapping[str, Any] | None,
    store: dist.Store,
    rank: int,
    size: int,
    options: object = None,
    timeout: timedelta | None = None,
    **_: object,
) -> Any:
    """Make the group for a call of ProcessGroupGloo; blocks until all ranks have come.

    `theirs` is torch's class. `asked` has torch's arguments of the group being made, by name; None
    for a program's own call. There torch 2.13 takes no backend in Python: the group is gloo's.
    TypeError if `store` is no store of torch's; ValueError for a rank outside the group.
    """
    limit: timedelta | None = timeout or getattr(options, "_timeout", cast(Any, options))
    limit = limit or _c10d.default_pg_timeout
    if asked is None and not PYTHON_BACKENDS:
        _log.debug("torch 2.13: a ProcessGroupGloo that the program makes stays gloo's")
        own = {"options": options} if hasattr(options, "_timeout") else {"timeout": limit}
        return theirs(store, rank, size, **own)
    if not isinstance(store, dist.Store):
        raise TypeError(f"ProcessGroupGloo: store must be a torch.distributed.Store, got {store!r}")
    if not 0 <= rank < size:
        raise ValueError(f"ProcessGroupGloo: rank {rank} is not one of {size} ranks")
    name, ranks = (asked["group_name"], asked["global_ranks_in_group"]) if asked else (GLOO, [])
    # Without NCCL's name, GPU arrays go through the CPU's memory: gloo's ranks may share a GPU.
    backends = NAME if asked and "nccl" in str(asked["backend"]) else GLOO
    group = create(OwnSetup(store, rank, size, limit, name, ranks, backends), None, GLOO)
    _log.debug("group %r, rank %d of %d: nc10d in gloo's place", name, rank, size)
    return group


def _make(setup: Setup | OwnSetup, options: object) -> ProcessGroup:
    uncaught.install()
    variables.warn_once()
    config = BackendConfig(setup.backends if isinstance(setup, OwnSetup) else NAME)
    config.options(options)
    config.require()
    limit = setup.timeout.total_seconds()
    deadline = Deadline.after(limit)
    members = [*setup.global_ranks_in_group]
    parent = _parent() if members else None
    if parent is None:
        group = _meet(setup, config, options, members, limit, deadline)
    else:
        name = _unused_name(parent, members)
        group = parent.child(name, members, limit, config, options)
    torch_world.add(group, deadline)
    close_at_exit(torch_world)
    return group


def _parent() -> ProcessGroup | None:
    """Return the nc10d group below torch's default group, if there is one."""
    calls = calls_of(dist.group.WORLD)
    return None if calls is None else calls.nc10d_group


def _unused_name(parent: ProcessGroup, members: Sequence[int]) -> str:
    """Return a name for a group of `members` on which all members agree.

    torch's own name holds the number of groups that a rank has made, which differs between ranks
    after a call that only members of a group make. All members have made equally many groups with
    these ranks, so this count distinguishes the groups.
    """
    name = "ranks-" + "-".join(map(str, members))
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}-{digest(name)}"
    made = _made.setdefault(parent, Counter())
    made[name] += 1
    return name if made[name] == 1 else f"{name}#{made[name]}"


def _meet(
    setup: Setup | OwnSetup,
    config: BackendConfig,
    options: object,
    members: Sequence[int],
    limit: float,
    deadline: Deadline,
) -> ProcessGroup:
    """Return a group whose ranks meet in the store that torch has for the group."""
    rank, size, name = setup.group_rank, setup.group_size, setup.group_id
    keys = meet_in(as_own_store(setup.store), name, config, rank, size, deadline, limit)
    ranks = members or range(size)
    return ProcessGroup(name, ranks, rank, keys, limit, config, options=options)


# torch calls this package, and stores, also below compiled frames.
modules_in_python(
    "nc10d.torch.backend",
    "nc10d.torch.stores",
    "nc10d.torch_entry",
    "nc10d.base.torch_registration",
)
