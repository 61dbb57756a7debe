"""c10d's calls on any array: names, argument names and positions are torch.distributed's.

`group` is a ProcessGroup, None for the default group, or GroupMember.NON_GROUP_MEMBER, where the
call warns and does nothing. `src` and `dst` are global ranks whatever the group; `group_src` and
`group_dst` go instead of them. Calls block until this rank's part is done and return None; with
`async_op` they return a Work at once. Mistakes are ValueError or TypeError before anything is
sent; what peers or the network do wrong is a DistError out of the call or of `Work.wait`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nc10d.deadline import Timeout
from nc10d.group import ProcessGroup
from nc10d.ops import SUM, Array, ReduceOp
from nc10d.work import Work
from nc10d.world import NonMember, get_default_group

Group = ProcessGroup | NonMember | None


def _resolve(group: Group) -> Any:
    """Return the group that is meant: None is the default one."""
    return get_default_group() if group is None else group


def _rank_in(group: Any, name: str, rank: int | None, group_rank: int | None) -> int:
    """Return the rank in `group` of whoever is named; ValueError unless it is named once."""
    if type(group) is ProcessGroup and rank is not None and group_rank is None:
        return group.group_rank(rank)  # the usual case, in one step
    if (rank is None) == (group_rank is None):
        raise ValueError(f"give either {name} or group_{name}, got {rank} and {group_rank}")
    if isinstance(group, NonMember):
        return -1
    if rank is not None:
        return int(group.group_rank(rank))
    return int(group.group_rank(group.global_rank(group_rank)))


def all_reduce(
    tensor: Array, op: ReduceOp = SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduce `tensor` over the group in place; every rank ends with the same result."""
    work: Work | None = _resolve(group).all_reduce(tensor, op, async_op)
    return work


def reduce(
    tensor: Array,
    dst: int | None = None,
    op: ReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce `tensor` over the group into that of rank `dst`; the others' keep their values."""
    found = _resolve(group)
    work: Work | None = found.reduce(tensor, _rank_in(found, "dst", dst, group_dst), op, async_op)
    return work


def broadcast(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy rank `src`'s `tensor` into everybody's; same dtype and number of elements."""
    found = _resolve(group)
    work: Work | None = found.broadcast(tensor, _rank_in(found, "src", src, group_src), async_op)
    return work


def all_gather(
    tensor_list: Sequence[Array], tensor: Array, group: Group = None, async_op: bool = False
) -> Work | None:
    """Copy rank r's `tensor` into everybody's `tensor_list[r]`; sizes may differ by rank."""
    work: Work | None = _resolve(group).all_gather(tensor_list, tensor, async_op)
    return work


def all_gather_into_tensor(
    output_tensor: Array, input_tensor: Array, group: Group = None, async_op: bool = False
) -> Work | None:
    """Copy everybody's `input_tensor`, rank after rank, into `output_tensor`.

    `output_tensor` has world size times as many elements, in any shape.
    """
    found = _resolve(group)
    work: Work | None = found.all_gather_into_tensor(output_tensor, input_tensor, async_op)
    return work


all_gather_single = all_gather_into_tensor


def reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: ReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce everybody's `input_list[r]` into rank r's `output`; sizes may differ by rank."""
    work: Work | None = _resolve(group).reduce_scatter(output, input_list, op, async_op)
    return work


def reduce_scatter_tensor(
    output: Array,
    input: Array,
    op: ReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce everybody's chunk r of `input` into rank r's `output`.

    `input` has world size times as many elements as `output`, in any shape.
    """
    work: Work | None = _resolve(group).reduce_scatter_tensor(output, input, op, async_op)
    return work


reduce_scatter_single = reduce_scatter_tensor


def all_to_all(
    output_tensor_list: Sequence[Array],
    input_tensor_list: Sequence[Array],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Copy my `input_tensor_list[r]` into rank r's `output_tensor_list[my rank]`."""
    found = _resolve(group)
    work: Work | None = found.all_to_all(output_tensor_list, input_tensor_list, async_op)
    return work


def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Exchange slices of dimension 0: `input`'s r-th goes to rank r, `output`'s comes from it.

    Split sizes count rows, one per rank; without them the rows are divided evenly.
    """
    found = _resolve(group)
    work: Work | None = found.all_to_all_single(
        output, input, output_split_sizes, input_split_sizes, async_op
    )
    return work


def gather(
    tensor: Array,
    gather_list: Sequence[Array] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copy rank r's `tensor` into `gather_list[r]` of rank `dst` (0 if neither is given).

    `gather_list` is None (or empty) on the other ranks.
    """
    found = _resolve(group)
    root = _rank_in(found, "dst", 0 if dst is None and group_dst is None else dst, group_dst)
    work: Work | None = found.gather(tensor, gather_list, root, async_op)
    return work


def scatter(
    tensor: Array,
    scatter_list: Sequence[Array] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy `scatter_list[r]` of rank `src` (0 if neither is given) into rank r's `tensor`.

    `scatter_list` is None (or empty) on the other ranks.
    """
    found = _resolve(group)
    root = _rank_in(found, "src", 0 if src is None and group_src is None else src, group_src)
    work: Work | None = found.scatter(tensor, scatter_list, root, async_op)
    return work


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Block until every rank of the group has called; `device_ids` is for c10d's callers."""
    work: Work | None = _resolve(group).barrier(async_op, timeout)
    return work


def send(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send `tensor` to rank `dst`; block until it may be changed again."""
    found = _resolve(group)
    found.send(tensor, _rank_in(found, "dst", dst, group_dst), tag)


def isend(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Send `tensor` to rank `dst`; it must not be changed before the Work has ended."""
    found = _resolve(group)
    work: Work | None = found.isend(tensor, _rank_in(found, "dst", dst, group_dst), tag)
    return work


def recv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive `tensor` from rank `src`, or from anyone; return the sender's global rank.

    Returns -1 for a non-member, and inside a coalescing block, where nothing has come yet.
    """
    found = _resolve(group)
    sender = found.recv(tensor, _source(found, src, group_src), tag)
    return -1 if sender is None else int(found.global_rank(sender))


def irecv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Receive `tensor` from rank `src`, or from anyone; `result()` is the sender's group rank."""
    found = _resolve(group)
    work: Work | None = found.irecv(tensor, _source(found, src, group_src), tag)
    return work


def _source(group: Any, src: int | None, group_src: int | None) -> int | None:
    return None if src is None and group_src is None else _rank_in(group, "src", src, group_src)
