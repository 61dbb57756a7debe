"""Groups that are made by their backend's class, without a default group: c10d's constructors.

    group = nc10d.ProcessGroupCPU(store, rank, size, timeout=30)
    group.all_reduce(x)

The group is a ProcessGroup with all methods, and every function takes it as `group`. A default
group may exist beside it, and need not. Groups of the same class on the same store are made in the
same order by all ranks. `close()` or destroy_process_group(group) ends a group.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nc10d.backend.config import BackendConfig
from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.run_to_end import import_to_end
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import DEFAULT_TIMEOUT, _check_meeting, close_at_exit, current_world, meet_in

if TYPE_CHECKING:
    from nc10d.store.base import Store


class _OptionsType:
    """A backend's options class, as an attribute of its group's class."""

    def __init__(self, target: str) -> None:
        self._module, _, self._name = target.partition(":")

    def __get__(self, instance: object, owner: type) -> Any:
        return getattr(import_to_end(self._module), self._name)


class DirectGroup(ProcessGroup):
    """A group of all ranks that meet in a store; a subclass names the backend."""

    backend_config = "cpu"
    """The backends, as in init_process_group."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: Timeout | Any = None, options: Any = None
    ) -> None:
        """Meet the other ranks in `store` and make the group; blocks until all have come.

        `timeout` (seconds or timedelta; 30 minutes) bounds this call and, by default, every
        operation. `options` are the backend's `pg_options`; as in c10d they may stand in place of
        `timeout`. Raises as init_process_group with a store.
        """
        if timeout is not None and not isinstance(timeout, (int, float, timedelta)):
            if options is not None:
                raise TypeError(f"timeout must be seconds or a timedelta, got {timeout!r}")
            timeout, options = None, timeout
        kind = type(self).__name__
        config = BackendConfig(self.backend_config)
        config.options(options)
        config.require()
        limit = DEFAULT_TIMEOUT if timeout is None else seconds(timeout)
        deadline = Deadline.after(limit)
        _check_meeting(store, None, rank, size)
        keys = meet_in(store, kind, config, rank, size, deadline, limit)
        # The same name on all ranks, and another for each group of this process.
        name = keys.compare_set("name", "", f"{kind}-{secrets.token_hex(4)}").decode()
        super().__init__(name, range(size), rank, keys, limit, config, options=options)
        current_world().add(self, deadline)
        close_at_exit()


class ProcessGroupCPU(DirectGroup):
    """A group on the CPU backend alone: ProcessGroupCPU(store, rank, size, timeout)."""


class ProcessGroupGloo(DirectGroup):
    """A group for c10d's scripts: the CPU backend, and device arrays through host memory."""

    backend_config = "gloo"


class ProcessGroupNCCL(DirectGroup):
    """A group on NCCL: ProcessGroupNCCL(store, rank, size, options)."""

    backend_config = "nccl"
    Options = _OptionsType("nc10d.backend.nccl.comm.options:NcclOptions")


class ProcessGroupMPI(DirectGroup):
    """A group on MPI, for processes that mpirun has started (docs/backends.md)."""

    backend_config = "mpi"
    Options = _OptionsType("nc10d.backend.mpi.backend:MpiOptions")


class ProcessGroupUCC(DirectGroup):
    """A group on UCC: ProcessGroupUCC(store, rank, size, timeout) (docs/backends.md)."""

    backend_config = "ucc"
    Options = _OptionsType("nc10d.backend.ucc.backend:UccOptions")
