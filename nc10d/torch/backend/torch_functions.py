"""Functions of torch.distributed that a backend cannot override, and their wrappers.

Some refuse every backend but gloo and NCCL by name. A wrapper passes calls on nc10d's groups on,
and all others to torch's function. `install` is called when the first nc10d group is made.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup as Group
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from nc10d.base.torch_registration import GLOO, NAME
from nc10d.group.shrink import shrink_group
from nc10d.group.world import current_world
from nc10d.torch.backend import flight_traces, group_methods
from nc10d.torch.backend.groups import calls_of
from nc10d.torch.backend.launching import blocking
from nc10d.torch.backend.python_backend import PythonBackend
from nc10d.torch.backend.side_by_side import on_default, on_members
from nc10d.torch.backend.torch_errors import raising_torch_errors
from nc10d.torch.backend.torch_versions import NO_MEMBER, PYTHON_BACKENDS, SPLIT_KEEPS_ORDER
from nc10d.torch.uncompiled import in_python

Function = Callable[..., Any]


def install() -> None:
    """Put the wrappers into torch.distributed; again: no change."""
    if PYTHON_BACKENDS:
        group_methods.install(_marked)
        flight_traces.install(lambda own, theirs: _marked(_passing_on(own, theirs), theirs))
    wrappers: dict[str, Callable[[Function], Function]] = {}
    wrappers |= {name: functools.partial(_passing_on, own) for name, own in _FUNCTIONS.items()}
    wrappers |= dict.fromkeys(_MESSAGES, _blocking_message)
    wrappers["_coalescing_manager"] = _closing_blocks
    for name, change in _DDP_METHODS.items():
        theirs = getattr(DistributedDataParallel, name)
        if not hasattr(theirs, "nc10d"):
            setattr(DistributedDataParallel, name, _marked(change(theirs), theirs))
    for name, wrap in wrappers.items():
        theirs = getattr(c10d, name, None)
        if theirs is not None and not hasattr(theirs, "nc10d"):
            wrapper = _marked(wrap(theirs), theirs)
            for module in (c10d, dist):
                if getattr(module, name, None) is theirs:
                    setattr(module, name, wrapper)


def _marked(wrapper: Function, theirs: Function) -> Function:
    """Return a wrapper of torch's function, by whose name and mark `install` finds it again."""
    found: Any = in_python(functools.wraps(theirs)(wrapper))
    found.nc10d = True
    return cast(Function, found)


def _passing_on(own: Function, theirs: Function) -> Function:
    def wrapper(*arguments: object, **options: object) -> object:
        found = own(*arguments, **options)
        return theirs(*arguments, **options) if found is NotImplemented else found

    return wrapper


def _blocking_message(theirs: Function) -> Function:
    """Return torch's function `send` or `recv`, which lets the group know about the wait."""

    def wrapper(*arguments: object, **options: object) -> object:
        before, blocking.here = blocking.here, True
        try:
            return theirs(*arguments, **options)
        finally:
            blocking.here = before

    return wrapper


def _closing_blocks(theirs: Function) -> Function:
    """Return torch's block of collectives, which launches nothing and ends if the body raises."""

    @contextlib.contextmanager
    def wrapper(
        group: Group | None = None, *arguments: object, **options: object
    ) -> Iterator[object]:
        group = group or dist.group.WORLD
        calls = calls_of(group)
        outer, entered = calls.open_blocks() if calls is not None else 0, False
        try:
            with theirs(group, *arguments, **options) as manager:
                entered = True
                yield manager
        except BaseException as error:
            if calls is not None and entered:
                c10d._world.pg_coalesce_state.pop(group, None)
                calls.drop_blocks(outer, error)
            raise

    return wrapper


_MESSAGES = "send", "recv"
"""torch's functions that wait for their message."""


def _builtin_hook(theirs: Function) -> Function:
    """Return DDP's method for torch's hooks in C++, which refuses the hook that would fail."""

    def register(module: DistributedDataParallel, comm_hook_type: dist.BuiltinCommHookType) -> None:
        kind = dist.BuiltinCommHookType.FP16_COMPRESS
        if comm_hook_type == kind and calls_of(module.process_group) is not None:
            raise ValueError(
                "FP16_COMPRESS takes Futures that are made in C++ alone: register "
                "default_hooks.fp16_compress_hook, which does the same on nc10d"
            )
        theirs(module, comm_hook_type)

    return register


def _without_gloos_type(theirs: Function) -> Function:
    """Return DDP's method that makes its C++ logger, which takes a group named gloo for gloo's."""

    def build(module: DistributedDataParallel, *arguments: object, **options: object) -> None:
        group = module.process_group
        calls = calls_of(group)
        if calls is None or group.name() != GLOO:
            theirs(module, *arguments, **options)
            return
        calls.name_for_torch(group, NAME)
        try:
            theirs(module, *arguments, **options)
        finally:
            calls.name_for_torch(group, GLOO)

    return build


def _with_gloos_data(theirs: Function) -> Function:
    """Return DDP's method for its logging data, with torch's fields about gloo in gloo's place."""

    def data(module: DistributedDataParallel) -> dict[str, object]:
        group = module.process_group
        as_gloo = calls_of(group) is not None and group.name() == GLOO
        return theirs(module) | (gloos_fields() if as_gloo else {})

    return data


def gloos_fields() -> dict[str, object]:
    """Return what torch's DDP logs about gloo: the name, the variables, the default of threads."""
    threads = c10d.ProcessGroupGloo._Options()._threads
    variables = {
        name: os.environ.get(name.upper(), "N/A")
        for name in ("gloo_socket_ifname", "gloo_device_transport")
    }
    return {"backend_name": GLOO, "gloo_num_threads": threads, **variables}


_DDP_METHODS: dict[str, Callable[[Function], Function]] = {
    "_register_builtin_comm_hook": _builtin_hook,
    "_ddp_init_helper": _without_gloos_type,
    "_get_ddp_logging_data": _with_gloos_data,
}


def _monitored_barrier(
    group: Group | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> object:
    calls = calls_of(group or dist.group.WORLD)
    if calls is None:
        return NotImplemented
    limit = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
    calls.monitored_barrier(limit, wait_all_ranks)
    return None


def _without_wrapper(wrapped_pg: object, *_: object, **__: object) -> object:
    """Return an nc10d backend itself at debug level DETAIL: nc10d checks calls at every level."""
    return wrapped_pg if isinstance(wrapped_pg, PythonBackend) else NotImplemented


def _set_pg_timeout(timeout: timedelta, group: Group | None = None) -> object:
    calls = calls_of(group or dist.group.WORLD)
    if calls is None:
        return NotImplemented
    calls.set_timeout(timeout)
    return None


def _split_group(
    parent_pg: Group | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
    **others: object,
) -> object:
    parent = parent_pg or dist.group.WORLD
    calls = calls_of(parent)
    if calls is None or others.get("backend") is not None:
        return NotImplemented
    group = calls.nc10d_group
    lists = [[*ranks] for ranks in split_ranks or ()]
    if not lists or not all(lists):
        raise ValueError("split_ranks must be lists of ranks, none of them empty")
    group.agree_on_call(f"split_group({lists})")
    group_desc = group_desc or f"{parent.group_desc}:split:{calls.splits}"
    calls.splits += 1
    own = next((ranks for ranks in lists if group.rank() in ranks), None)
    if own is None:
        c10d._process_group_name(lists[0], use_hashed_name=True)  # torch counts the groups
        return NO_MEMBER
    return dist.new_group(
        [group.global_rank(rank) for rank in own],
        timeout=timeout or timedelta(seconds=min(group.timeout, timedelta.max.total_seconds())),
        pg_options=pg_options,
        use_local_synchronization=True,
        group_desc=group_desc,
        sort_ranks=not SPLIT_KEEPS_ORDER,
    )


def _shrink_group(
    ranks_to_exclude: Sequence[int] | None = None,
    group: Group | None = None,
    shrink_flags: int = 0,
    pg_options: object = None,
) -> object:
    calls = calls_of(group or dist.group.WORLD)
    if calls is None:
        return NotImplemented
    old, world = calls.nc10d_group, current_world()
    whole = group is None or group is dist.group.WORLD
    default = world.default
    # Ranks in a default group's successor are numbered anew, as torch numbers them.
    world.default = old if whole else default
    try:
        with raising_torch_errors():
            new = shrink_group([*(ranks_to_exclude or ())], old)
    finally:
        world.default = world.default if default is old else default
    dist.destroy_process_group(None if whole else group)
    return on_default(new) if whole else on_members(new)


_FUNCTIONS: dict[str, Function] = {
    "monitored_barrier": _monitored_barrier,
    "split_group": _split_group,
    "shrink_group": _shrink_group,
    "_set_pg_timeout": _set_pg_timeout,
    "_create_process_group_wrapper": _without_wrapper,
}
