"""Group names in graphs: an operator gets a group as a string and a size.

Contract: `label` turns any form of a group into its label, and needs no communication. `resolve`
returns the calling rank's group for a label. Labels are the same on every rank, so ranks can share
a graph. The label for listed ranks is the list itself, "[[0, 1], [2, 3]]", with all its groups;
the label's first use makes my group, which blocks until the other members use it too.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from nc10d.api import functional
from nc10d.api.functional import GroupLike, Ranks
from nc10d.api.mesh import DeviceMesh
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import adapters_worlds, current_world
from nc10d.ops import ReduceOp, premul_sum
from nc10d.torch.backend.groups import calls_of, own_group

_PREMUL_SUM = "premul_sum("


def label(group: GroupLike, tag: str = "") -> tuple[str, int]:
    """Return a group's name in a graph, and the size; ValueError as `find_group`."""
    # torch.compile traces this function: a group or a mesh is guarded by its attributes.
    if group is None:
        return default_label()
    group = _of_mesh(group)
    if isinstance(group, ProcessGroup):
        return group.group_name, int(group.size)
    if isinstance(group, (list, tuple)):
        return list_label(group, tag)
    return other_label(group)


def member(group: GroupLike, rank: int) -> int:
    """Return a global rank's number in a group; ValueError for a non-member."""
    if group is None:
        return default_member(rank)
    group = _of_mesh(group)
    if isinstance(group, ProcessGroup):
        number = group.numbers.get(rank)
        return group.group_rank(rank) if number is None else number  # the call raises
    if isinstance(group, (list, tuple)):
        return list_member(group, rank)
    return other_member(group, rank)


def _of_mesh(group: GroupLike) -> Any:
    """Return the group for a mesh or (mesh, dimension); anything else unchanged."""
    if isinstance(group, DeviceMesh):
        return _line(group, None)
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        return _line(group[0], group[1])
    return group


def _line(mesh: DeviceMesh, dim: int | str | None) -> ProcessGroup | None:
    """Return my group along a dimension, in code that a compiler can trace."""
    names, groups = mesh.mesh_dim_names, mesh._groups
    if dim is None and len(groups) == 1:
        return groups[0]
    if isinstance(dim, str) and names is not None and dim in names:
        return groups[names.index(dim)]
    if isinstance(dim, int) and -len(groups) <= dim < len(groups):
        return groups[dim]
    return mesh.get_group(dim)  # raises


def default_label() -> tuple[str, int]:
    """Return the default group's label: nc10d's group, or the group below torch's."""
    return label(own_group(None))


def list_label(ranks: Ranks, tag: str) -> tuple[str, int]:
    """Return the label for listed ranks; ValueError if this rank is in no list."""
    return json.dumps(ranks) + tag, len(functional.own_list(ranks))


def other_label(group: object) -> tuple[str, int]:
    """Return the label for a torch.distributed group on nc10d; ValueError for anything else."""
    return label(found_group(group))


def default_member(rank: int) -> int:
    """Return a global rank's number in the default group."""
    return member(own_group(None), rank)


def list_member(ranks: Ranks, rank: int) -> int:
    """Return a global rank's number among the listed ranks with this rank."""
    own = functional.own_list(ranks)
    if rank not in own:
        raise ValueError(f"global rank {rank} is not in my group of ranks {own}")
    return own.index(rank)


def other_member(group: object, rank: int) -> int:
    """Return a global rank's number in a torch.distributed group on nc10d."""
    return member(found_group(group), rank)


def found_group(group: Any, tag: str = "") -> ProcessGroup:
    """Return the group for any form, also torch.distributed's on nc10d; see `find_group`."""
    if group is None:
        return own_group(None)
    inner = getattr(calls_of(group), "nc10d_group", None)
    return functional.find_group(group if inner is None else inner, tag)


def resolve(name: str, size: int | None = None) -> ProcessGroup:
    """Return a label's group; RuntimeError if there is none, or for another size."""
    found = current_world().groups.get(name)
    if found is None:
        found = _listed(name) if name.startswith("[") else _of_adapters(name)
    if size is not None and size != found.size:
        raise RuntimeError(
            f"a graph was made for {size} ranks of group {name!r}, which has {found.size} now: "
            "compile again (torch._dynamo.reset())"
        )
    if found._batches and found.in_batch():
        raise RuntimeError(
            f"an operator of group {name!r} is in a coalescing block, which would delay its "
            "result: take a _coalesced call, or leave the block to the ordinary calls"
        )
    return found


def _listed(name: str) -> ProcessGroup:
    ranks, tag = _parsed(name)
    return functional.find_group(ranks, tag)


@cache
def _parsed(name: str) -> tuple[Ranks, str]:
    ranks, end = json.JSONDecoder().raw_decode(name)
    return ranks, name[end:]


def _of_adapters(name: str) -> ProcessGroup:
    for world in adapters_worlds:
        found = world.groups.get(name)
        if found is not None:
            return found
    raise RuntimeError(
        f"there is no group {name!r}: it was destroyed, or dropped; keep it as long as its graphs"
    )


def spelled(reduce_op: str | ReduceOp) -> str:
    """Return a reduction's name in a graph: "sum", "premul_sum(0.5)", "sum.ordered"."""
    return reduce_op.spelled if isinstance(reduce_op, ReduceOp) else checked_name(reduce_op)


def checked_name(name: str) -> str:
    """Return a reduction's name as `spelled` has it; ValueError for an unknown name."""
    return spelled(reduction(name))


def reduction(name: str) -> ReduceOp:
    """Return the reduction with this name."""
    if isinstance(name, str) and name.startswith(_PREMUL_SUM):
        found = premul_sum(float(name[len(_PREMUL_SUM) : name.index(")")]))
        return found.ordered if name.endswith(".ordered") else found
    return functional.reduction(name)


_CONSTANT = (default_label, list_label, other_label, checked_name)
for _function in (*_CONSTANT, default_member, list_member, other_member):
    # torch.compile calls these while tracing, and puts their result into the graph.
    vars(_function)["_dynamo_marked_constant"] = True
