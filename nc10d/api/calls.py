"""c10d's calls on any array: names, argument names and positions are torch.distributed's.

Common to all calls:

- `group` is a ProcessGroup, None for the default group, or GroupMember.NON_GROUP_MEMBER, for which
  the call warns and does nothing. `src` and `dst` are global ranks, whatever the group;
  `group_src` and `group_dst`, ranks in the group, may replace them.
- A tensor is any array that `as_buffer` takes, of any shape and strides. Elements travel in C
  order, so shapes may differ between ranks. Dtypes and numbers of elements must agree unless the
  call's docstring allows otherwise. An output must be writable and share no memory with other
  arguments, except that an input may be this rank's own chunk of the output, or the output this
  rank's own chunk of the input.
- Calls block until this rank's part is done and return None. With `async_op` they return a Work
  at once; until it has ended, inputs must not be changed and outputs must not be read. Inside a
  coalescing block of the group, calls only join the block.
- A caller's mistake is a ValueError or TypeError, raised before anything is sent and with all
  arrays unchanged. A failure of a peer or the network is a DistError, raised by the call or by
  `Work.wait`: CollectiveTimeout after the group's timeout, PeerLost, CollectiveMismatch, Aborted,
  GroupClosed.

As methods of a group these calls take ranks in the group and a `timeout`: see
nc10d.group.collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from nc10d.base.deadline import Timeout
from nc10d.group.array_copies import fill_output
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import Group, NonMember, group_or_default, own_worlds, process_world
from nc10d.ops import SUM, Array, ReduceOp
from nc10d.work import Work

# The shortest calls look up the default group, and the rank in it, inline (`default`): a shared
# function for the lookup would cost as much time as it saves.


def rank_in(
    group: ProcessGroup | NonMember, name: str, rank: int | None, group_rank: int | None
) -> int:
    """Return the rank in `group` of the named rank; ValueError unless exactly one name is given."""
    if group_rank is None and type(rank) is int and type(group) is ProcessGroup:
        member = group.numbers.get(rank)  # the common case, in a single lookup
        if member is not None:
            return member
    if (rank is None) == (group_rank is None):
        raise ValueError(f"give either {name} or group_{name}, got {rank!r} and {group_rank!r}")
    if isinstance(group, NonMember):
        return -1
    try:
        if rank is not None:
            return group.group_rank(rank)
        assert group_rank is not None, "one of them is given"
        return group.group_rank(group.global_rank(group_rank))
    except (TypeError, ValueError) as error:
        given = f"{name}={rank!r}" if rank is not None else f"group_{name}={group_rank!r}"
        raise type(error)(f"{given}: {error}") from None


def rank_or_first(rank: int | None, group_rank: int | None) -> int | None:
    """Return `rank`, or 0 if neither rank is given: c10d's default root."""
    return 0 if rank is None and group_rank is None else rank


def source_in(
    group: ProcessGroup | NonMember, src: int | None, group_src: int | None
) -> int | None:
    """Return the rank in `group` of the named source; None, for any source, if none is named."""
    return None if src is None and group_src is None else rank_in(group, "src", src, group_src)


@overload
def all_reduce(tensor: Array, op: ReduceOp = ..., group: Group = ..., *, async_op: Literal[True], out: Array | None = ...) -> Work: ...  # fmt: skip
@overload
def all_reduce(tensor: Array, op: ReduceOp = ..., group: Group = ..., async_op: Literal[False] = ..., *, out: Array | None = ...) -> None: ...  # fmt: skip
@overload
def all_reduce(tensor: Array, op: ReduceOp = ..., group: Group = ..., async_op: bool = ..., *, out: Array | None = ...) -> Work | None: ...  # fmt: skip
def all_reduce(
    tensor: Array,
    op: ReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    out: Array | None = None,
) -> Work | None:
    """Reduce `tensor` over the group in place; every rank ends with the same bits.

    With `out`, an array of the same shape and dtype apart from `tensor`, the result is there, and
    `tensor` keeps its values; not in a coalescing block. TypeError if `op` means nothing for the
    dtype (AVG of bools, MAX of complex numbers).
    """
    found = process_world.default if group is None is out and not own_worlds else None
    if out is not None and not isinstance(group, NonMember):
        tensor = fill_output("all_reduce", group_or_default(group), out, tensor, op)
    return (found or group_or_default(group)).all_reduce(tensor, op, async_op)


@overload
def reduce(tensor: Array, dst: int | None = ..., op: ReduceOp = ..., group: Group = ..., *, async_op: Literal[True], group_dst: int | None = ..., out: Array | None = ...) -> Work: ...  # fmt: skip
@overload
def reduce(tensor: Array, dst: int | None = ..., op: ReduceOp = ..., group: Group = ..., async_op: Literal[False] = ..., group_dst: int | None = ..., *, out: Array | None = ...) -> None: ...  # fmt: skip
@overload
def reduce(tensor: Array, dst: int | None = ..., op: ReduceOp = ..., group: Group = ..., async_op: bool = ..., group_dst: int | None = ..., *, out: Array | None = ...) -> Work | None: ...  # fmt: skip
def reduce(
    tensor: Array,
    dst: int | None = None,
    op: ReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    out: Array | None = None,
) -> Work | None:
    """Reduce `tensor` over the group into rank `dst`'s; the other ranks' tensors keep their values.

    With `out` on rank `dst`, as in all_reduce, its `tensor` keeps its values, too; other ranks' is
    ignored. TypeError if `op` means nothing for the dtype.
    """
    found = group_or_default(group)
    root = rank_in(found, "dst", dst, group_dst)
    if out is not None and root == found.rank:
        tensor = fill_output("reduce", found, out, tensor, op)
    return found.reduce(tensor, root, op, async_op)


@overload
def scan(tensor: Array, op: ReduceOp = ..., group: Group = ..., *, async_op: Literal[True], out: Array | None = ...) -> Work: ...  # fmt: skip
@overload
def scan(tensor: Array, op: ReduceOp = ..., group: Group = ..., async_op: Literal[False] = ..., *, out: Array | None = ...) -> None: ...  # fmt: skip
@overload
def scan(tensor: Array, op: ReduceOp = ..., group: Group = ..., async_op: bool = ..., *, out: Array | None = ...) -> Work | None: ...  # fmt: skip
def scan(
    tensor: Array,
    op: ReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    out: Array | None = None,
) -> Work | None:
    """Replace `tensor` on rank r by the reduction of the tensors of the ranks 0 to r, as MPI_Scan.

    Ranks fold in rank order; an average divides by r + 1. `out` is as in all_reduce. Blocks until
    all earlier ranks have called. TypeError if `op` means nothing for the dtype, and from NCCL.

        x = np.array([float(dist.get_rank() + 1)])
        dist.scan(x)  # 1, 3, 6, 10 on the ranks 0 to 3
    """
    found = group_or_default(group)
    if out is not None and not isinstance(found, NonMember):
        tensor = fill_output("scan", found, out, tensor, op)
    return found.scan(tensor, op, async_op)


@overload
def exscan(tensor: Array, op: ReduceOp = ..., group: Group = ..., *, async_op: Literal[True], identity: bool = ..., out: Array | None = ...) -> Work: ...  # fmt: skip
@overload
def exscan(tensor: Array, op: ReduceOp = ..., group: Group = ..., async_op: Literal[False] = ..., *, identity: bool = ..., out: Array | None = ...) -> None: ...  # fmt: skip
@overload
def exscan(tensor: Array, op: ReduceOp = ..., group: Group = ..., async_op: bool = ..., *, identity: bool = ..., out: Array | None = ...) -> Work | None: ...  # fmt: skip
def exscan(
    tensor: Array,
    op: ReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    identity: bool = False,
    out: Array | None = None,
) -> Work | None:
    """Replace `tensor` on rank r by the reduction of the tensors of the ranks before r.

    As MPI_Exscan: rank 0's `tensor` keeps its values. With `identity`, rank 0's is filled with
    the identity of `op`: 0 for a sum, the least value for MAX. An average divides by r. `out`,
    order, errors and blocking are as in scan.

        first = np.array([rows])  # how many rows this rank has
        dist.exscan(first, identity=True)  # the number of this rank's first row
    """
    found = group_or_default(group)
    if out is not None and not isinstance(found, NonMember):
        tensor = fill_output("exscan", found, out, tensor, op)
    return found.exscan(tensor, op, async_op, identity=identity)


@overload
def broadcast(tensor: Array, src: int | None = ..., group: Group = ..., *, async_op: Literal[True], group_src: int | None = ...) -> Work: ...  # fmt: skip
@overload
def broadcast(tensor: Array, src: int | None = ..., group: Group = ..., async_op: Literal[False] = ..., group_src: int | None = ...) -> None: ...  # fmt: skip
@overload
def broadcast(tensor: Array, src: int | None = ..., group: Group = ..., async_op: bool = ..., group_src: int | None = ...) -> Work | None: ...  # fmt: skip
def broadcast(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy rank `src`'s `tensor` into every rank's. No rank returns before all have called."""
    default = process_world.default if group is None is group_src and not own_worlds else None
    if default is not None and type(src) is int and src in default.numbers:
        return default.broadcast(tensor, default.numbers[src], async_op)
    found = group_or_default(group)
    return found.broadcast(tensor, rank_in(found, "src", src, group_src), async_op)


@overload
def all_gather(tensor_list: Sequence[Array], tensor: Array, group: Group = ..., *, async_op: Literal[True]) -> Work: ...  # fmt: skip
@overload
def all_gather(tensor_list: Sequence[Array], tensor: Array, group: Group = ..., async_op: Literal[False] = ...) -> None: ...  # fmt: skip
@overload
def all_gather(tensor_list: Sequence[Array], tensor: Array, group: Group = ..., async_op: bool = ...) -> Work | None: ...  # fmt: skip
def all_gather(
    tensor_list: Sequence[Array], tensor: Array, group: Group = None, async_op: bool = False
) -> Work | None:
    """Copy rank r's `tensor` into every rank's `tensor_list[r]`.

    The list has an array for each rank. Sizes may differ by rank and may be 0: `tensor_list[r]` has
    as many elements as rank r's `tensor`, on every rank.
    """
    return group_or_default(group).all_gather(tensor_list, tensor, async_op)


@overload
def all_gather_into_tensor(output_tensor: Array, input_tensor: Array, group: Group = ..., *, async_op: Literal[True]) -> Work: ...  # fmt: skip
@overload
def all_gather_into_tensor(output_tensor: Array, input_tensor: Array, group: Group = ..., async_op: Literal[False] = ...) -> None: ...  # fmt: skip
@overload
def all_gather_into_tensor(output_tensor: Array, input_tensor: Array, group: Group = ..., async_op: bool = ...) -> Work | None: ...  # fmt: skip
def all_gather_into_tensor(
    output_tensor: Array, input_tensor: Array, group: Group = None, async_op: bool = False
) -> Work | None:
    """Copy every rank's `input_tensor`, rank after rank, into `output_tensor`.

    `output_tensor` has world size times as many elements as `input_tensor`, in any shape.
    """
    found = group_or_default(group)
    return found.all_gather_into_tensor(output_tensor, input_tensor, async_op)


all_gather_single = all_gather_into_tensor


@overload
def reduce_scatter(output: Array, input_list: Sequence[Array], op: ReduceOp = ..., group: Group = ..., *, async_op: Literal[True]) -> Work: ...  # fmt: skip
@overload
def reduce_scatter(output: Array, input_list: Sequence[Array], op: ReduceOp = ..., group: Group = ..., async_op: Literal[False] = ...) -> None: ...  # fmt: skip
@overload
def reduce_scatter(output: Array, input_list: Sequence[Array], op: ReduceOp = ..., group: Group = ..., async_op: bool = ...) -> Work | None: ...  # fmt: skip
def reduce_scatter(
    output: Array,
    input_list: Sequence[Array],
    op: ReduceOp = SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the `input_list[r]` of every rank into rank r's `output`.

    The list has an array for each rank. Sizes may differ by rank and may be 0: every rank's
    `input_list[r]` has as many elements as rank r's `output`.
    """
    return group_or_default(group).reduce_scatter(output, input_list, op, async_op)


@overload
def reduce_scatter_tensor(output: Array, input: Array, op: ReduceOp = ..., group: Group = ..., *, async_op: Literal[True]) -> Work: ...  # fmt: skip
@overload
def reduce_scatter_tensor(output: Array, input: Array, op: ReduceOp = ..., group: Group = ..., async_op: Literal[False] = ...) -> None: ...  # fmt: skip
@overload
def reduce_scatter_tensor(output: Array, input: Array, op: ReduceOp = ..., group: Group = ..., async_op: bool = ...) -> Work | None: ...  # fmt: skip
def reduce_scatter_tensor(
    output: Array, input: Array, op: ReduceOp = SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduce chunk r of every rank's `input` into rank r's `output`.

    `input` has world size times as many elements as `output`, in any shape; its chunks follow
    each other, rank after rank.
    """
    return group_or_default(group).reduce_scatter_tensor(output, input, op, async_op)


reduce_scatter_single = reduce_scatter_tensor


@overload
def all_to_all(output_tensor_list: Sequence[Array], input_tensor_list: Sequence[Array], group: Group = ..., *, async_op: Literal[True]) -> Work: ...  # fmt: skip
@overload
def all_to_all(output_tensor_list: Sequence[Array], input_tensor_list: Sequence[Array], group: Group = ..., async_op: Literal[False] = ...) -> None: ...  # fmt: skip
@overload
def all_to_all(output_tensor_list: Sequence[Array], input_tensor_list: Sequence[Array], group: Group = ..., async_op: bool = ...) -> Work | None: ...  # fmt: skip
def all_to_all(
    output_tensor_list: Sequence[Array],
    input_tensor_list: Sequence[Array],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Copy my `input_tensor_list[r]` into rank r's `output_tensor_list[my rank]`.

    Both lists have an array for each rank. Sizes may all differ, and be 0, as long as sender and
    receiver agree; else CollectiveMismatch.
    """
    found = group_or_default(group)
    return found.all_to_all(output_tensor_list, input_tensor_list, async_op)


@overload
def all_to_all_single(output: Array, input: Array, output_split_sizes: Sequence[int] | None = ..., input_split_sizes: Sequence[int] | None = ..., group: Group = ..., *, async_op: Literal[True]) -> Work: ...  # fmt: skip
@overload
def all_to_all_single(output: Array, input: Array, output_split_sizes: Sequence[int] | None = ..., input_split_sizes: Sequence[int] | None = ..., group: Group = ..., async_op: Literal[False] = ...) -> None: ...  # fmt: skip
@overload
def all_to_all_single(output: Array, input: Array, output_split_sizes: Sequence[int] | None = ..., input_split_sizes: Sequence[int] | None = ..., group: Group = ..., async_op: bool = ...) -> Work | None: ...  # fmt: skip
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Exchange slices of dimension 0: `input`'s r-th goes to rank r, `output`'s comes from rank r.

    Split sizes are numbers of rows, a number for each rank, and their sum is the length of
    dimension 0. Without them, the rows are divided evenly. CollectiveMismatch if a slice that I
    send to rank r differs in size from the slice that rank r expects from me.
    """
    found = group_or_default(group)
    return found.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)


@overload
def gather(tensor: Array, gather_list: Sequence[Array] | None = ..., dst: int | None = ..., group: Group = ..., *, async_op: Literal[True], group_dst: int | None = ...) -> Work: ...  # fmt: skip
@overload
def gather(tensor: Array, gather_list: Sequence[Array] | None = ..., dst: int | None = ..., group: Group = ..., async_op: Literal[False] = ..., group_dst: int | None = ...) -> None: ...  # fmt: skip
@overload
def gather(tensor: Array, gather_list: Sequence[Array] | None = ..., dst: int | None = ..., group: Group = ..., async_op: bool = ..., group_dst: int | None = ...) -> Work | None: ...  # fmt: skip
def gather(
    tensor: Array,
    gather_list: Sequence[Array] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copy rank r's `tensor` into `gather_list[r]` of rank `dst` (0 if neither is given).

    `gather_list` has an array for each rank on `dst`, and is None (or empty) on the other ranks.
    Sizes may differ by rank: `gather_list[r]` has as many elements as rank r's `tensor`.
    """
    found = group_or_default(group)
    root = rank_in(found, "dst", rank_or_first(dst, group_dst), group_dst)
    return found.gather(tensor, gather_list, root, async_op)


@overload
def scatter(tensor: Array, scatter_list: Sequence[Array] | None = ..., src: int | None = ..., group: Group = ..., *, async_op: Literal[True], group_src: int | None = ...) -> Work: ...  # fmt: skip
@overload
def scatter(tensor: Array, scatter_list: Sequence[Array] | None = ..., src: int | None = ..., group: Group = ..., async_op: Literal[False] = ..., group_src: int | None = ...) -> None: ...  # fmt: skip
@overload
def scatter(tensor: Array, scatter_list: Sequence[Array] | None = ..., src: int | None = ..., group: Group = ..., async_op: bool = ..., group_src: int | None = ...) -> Work | None: ...  # fmt: skip
def scatter(
    tensor: Array,
    scatter_list: Sequence[Array] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy `scatter_list[r]` of rank `src` (0 if neither is given) into rank r's `tensor`.

    `scatter_list` has an array for each rank on `src`, and is None (or empty) on the other ranks.
    Sizes may differ by rank: `scatter_list[r]` has as many elements as rank r's `tensor`.
    """
    found = group_or_default(group)
    root = rank_in(found, "src", rank_or_first(src, group_src), group_src)
    return found.scatter(tensor, scatter_list, root, async_op)


@overload
def gather_single(tensor: Array, gather_tensor: Array | None = ..., dst: int | None = ..., group: Group = ..., *, async_op: Literal[True], group_dst: int | None = ...) -> Work: ...  # fmt: skip
@overload
def gather_single(tensor: Array, gather_tensor: Array | None = ..., dst: int | None = ..., group: Group = ..., async_op: Literal[False] = ..., group_dst: int | None = ...) -> None: ...  # fmt: skip
@overload
def gather_single(tensor: Array, gather_tensor: Array | None = ..., dst: int | None = ..., group: Group = ..., async_op: bool = ..., group_dst: int | None = ...) -> Work | None: ...  # fmt: skip
def gather_single(
    tensor: Array,
    gather_tensor: Array | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Copy rank r's `tensor` into chunk r of rank `dst`'s `gather_tensor` (0 if neither is given).

    All tensors have the same number of elements. `gather_tensor` has world size times as many, in
    any shape; it is None on other ranks.
    """
    found = group_or_default(group)
    root = rank_in(found, "dst", rank_or_first(dst, group_dst), group_dst)
    return found.gather_single(tensor, gather_tensor, root, async_op)


@overload
def scatter_single(output: Array, input: Array | None, src: int | None = ..., group: Group = ..., *, async_op: Literal[True], group_src: int | None = ...) -> Work: ...  # fmt: skip
@overload
def scatter_single(output: Array, input: Array | None, src: int | None = ..., group: Group = ..., async_op: Literal[False] = ..., group_src: int | None = ...) -> None: ...  # fmt: skip
@overload
def scatter_single(output: Array, input: Array | None, src: int | None = ..., group: Group = ..., async_op: bool = ..., group_src: int | None = ...) -> Work | None: ...  # fmt: skip
def scatter_single(
    output: Array,
    input: Array | None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy chunk r of rank `src`'s `input` into rank r's `output` (0 if neither is given).

    All outputs have the same number of elements. `input` has world size times as many, in any
    shape; it is None on other ranks. c10d has no such call: its scatter takes a list.
    """
    found = group_or_default(group)
    root = rank_in(found, "src", rank_or_first(src, group_src), group_src)
    return found.scatter_single(output, input, root, async_op)


@overload
def barrier(group: Group = ..., *, async_op: Literal[True], device_ids: Sequence[int] | None = ..., timeout: Timeout = ...) -> Work: ...  # fmt: skip
@overload
def barrier(group: Group = ..., async_op: Literal[False] = ..., device_ids: Sequence[int] | None = ..., timeout: Timeout = ...) -> None: ...  # fmt: skip
@overload
def barrier(group: Group = ..., async_op: bool = ..., device_ids: Sequence[int] | None = ..., timeout: Timeout = ...) -> Work | None: ...  # fmt: skip
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Block until every rank of the group has called.

    `timeout` (seconds or timedelta) replaces the group's; `device_ids` is accepted as in c10d.
    """
    default = process_world.default if group is None and not own_worlds else None
    return (default or group_or_default(group)).barrier(async_op, timeout)
