"""The choice of an algorithm, by values that are equal on all of the group's ranks.

Every function here has the signature and the contract of the algorithm for a single host. A group
that spans hosts gets the algorithm with the same name from hosts_reduce.py or hosts_exchange.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from nc10d.backend.cpu.algorithms import all_reduce as reductions
from nc10d.backend.cpu.algorithms import broadcast as broadcasts
from nc10d.backend.cpu.algorithms import exchange, gather, hosts_exchange, hosts_reduce
from nc10d.backend.cpu.algorithms.group_shape import GroupShape

P = ParamSpec("P")
R = TypeVar("R")


def _by_hosts(
    single: Callable[Concatenate[GroupShape, P], R],
    several: Callable[Concatenate[GroupShape, P], R],
) -> Callable[Concatenate[GroupShape, P], R]:
    """Return the function that runs `single` in a group on a single host, else `several`."""

    def chosen(shape: GroupShape, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return (several if shape.hosts else single)(shape, *args, **kwargs)

    return chosen


one_shot_limit = _by_hosts(reductions.one_shot_limit, hosts_reduce.one_shot_limit)
all_reduce = _by_hosts(reductions.all_reduce, hosts_reduce.all_reduce)
fused = _by_hosts(reductions.fused, hosts_reduce.fused)
broadcast = _by_hosts(broadcasts.broadcast, hosts_reduce.broadcast)
barrier = _by_hosts(broadcasts.barrier, hosts_reduce.barrier)
all_gather = _by_hosts(gather.all_gather, hosts_exchange.all_gather)
reduce_scatter = _by_hosts(gather.reduce_scatter, hosts_exchange.reduce_scatter)
even_all_to_all = _by_hosts(exchange.even_all_to_all, hosts_exchange.even_all_to_all)
announced = _by_hosts(exchange.announced, hosts_exchange.announced)
