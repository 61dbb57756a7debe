"""A function on any kind of ranks: threads, processes, hosts, or tasks in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nc10d.testing.ranks import Kind, Ranks

T = TypeVar("T")


def run_ranks(
    function: Callable[..., T],
    world_size: int,
    kind: Kind = "threads",
    *columns: Sequence[Any],
    timeout: float = 30.0,
    seed: int = 0,
    faults: Sequence[Any] = (),
    hosts: int = 1,
) -> list[T]:
    """Form a group of `world_size` ranks, call function(group, *row) on each, return the results.

    `Ranks` keeps the ranks for several calls. `group` is each rank's default group as well, so that
    `nc10d.all_reduce(x)` works in the function. `run_local` needs no engine.

    With kind="simulated" ranks are tasks in virtual time: `seed` decides their order and messages'
    delays, and `faults` are nc10d.testing's Kill, Pause, Partition and ClockJump. A killed rank's
    result is None.

    With kind="processes", ranks can be on `hosts` hosts, which are network namespaces on this
    machine: UnsupportedPlatform if this user may not make them.
    """
    if hosts > 1 and kind != "processes":
        raise ValueError(f"{hosts} hosts are for kind='processes', not {kind!r}")
    if kind == "simulated":
        from nc10d.testing.simulated.simulated_ranks import SimulatedRanks

        return SimulatedRanks(world_size, seed, timeout, faults).run(function, *columns)
    if faults:
        raise ValueError("faults are for kind='simulated'")
    ranks = Ranks(world_size, kind, timeout=timeout)
    if hosts > 1:
        from nc10d.testing.hosts.host_ranks import HostRanks

        ranks = HostRanks(world_size, hosts, timeout)
    with ranks:
        return ranks.run(function, *columns)
