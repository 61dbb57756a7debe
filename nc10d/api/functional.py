"""Functional collectives: results are new arrays, inputs are never written.

    total = functional.all_reduce(x, "sum", mesh)       # returns at once
    y = other_work(x)
    return total + y                                    # waits here, on first use

Common to all calls; names and meanings are those of torch.distributed's functional collectives:

- Results are AsyncCollectiveArrays: a call does not block, and its result waits when it is first
  used. Until then the input must not be changed; all_reduce and broadcast copy their input, so
  theirs may be.
- `reduce_op` is a name in upper or lower case ("sum", "avg", "sum.ordered", ...), or a ReduceOp.
- `group` is a ProcessGroup, None for the default group, a one-dimensional DeviceMesh, (mesh,
  dimension), a list of global ranks, or a list of such lists: then it is the list with my rank. A
  group for listed ranks is made by its members alone, and used again in later calls. A `tag`
  distinguishes groups with the same ranks. Rank arguments are ranks in the group; a group made from
  a list numbers its ranks in ascending order.
- Results belong to their input's library: NumPy, torch, CuPy, Numba, `nc10d.cuda`. A device array
  of any other library gives an array of `nc10d.cuda`. Device arrays are contiguous (else
  ValueError), but for torch's and CuPy's.
- A caller's mistake is a ValueError or TypeError, raised before anything is sent: unknown names,
  ranks that are listed twice, groups of different sizes, dimensions that can't be divided evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from nc10d import ops
from nc10d.api.async_array import AsyncCollectiveArray, unwrapped
from nc10d.api.mesh import DeviceMesh
from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.op_advice import advice_for
from nc10d.group.array_copies import assign, equal_parts, new_array
from nc10d.group.new_group import new_group
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import current_world, group_or_default
from nc10d.ops import Array, ReduceOp
from nc10d.ops.reductions import own_kind
from nc10d.work import Work

Ranks = Sequence[int] | Sequence[Sequence[int]]
GroupLike = ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | Ranks | None

Reduced = Any
"""An AsyncCollectiveArray, or a tuple of them: one for each field of the reduction's records."""

_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def all_reduce(
    tensor: Array, reduce_op: str | ReduceOp, group: GroupLike = None, tag: str = ""
) -> Reduced:
    """Return the reduction of every rank's `tensor`, in its shape and dtype.

    A tuple has an array for each field of the reduction's records.
    """
    out = _each(tensor, lambda x: _copy(_array(x)))
    work = find_group(group, tag).all_reduce(out, reduction(reduce_op), async_op=True)
    return _each(out, lambda x: _async_array(x, work))


def broadcast(
    tensor: Array, src: int, group: GroupLike = None, tag: str = ""
) -> AsyncCollectiveArray:
    """Return rank `src`'s `tensor`; every rank's has the same shape and dtype."""
    out = _copy(_array(tensor))
    return _async_array(out, find_group(group, tag).broadcast(out, src, async_op=True))


def all_gather_tensor(
    tensor: Array, gather_dim: int, group: GroupLike = None, tag: str = ""
) -> AsyncCollectiveArray:
    """Return every rank's `tensor`, rank after rank along `gather_dim`. All have the same shape."""
    found, x = find_group(group, tag), _array(tensor)
    dim = _dim(x, gather_dim)
    out = new_array(x, [n * found.size if d == dim else n for d, n in enumerate(x.shape)])
    if dim == 0:
        return _async_array(out, found.all_gather_into_tensor(out, x, async_op=True))
    return _async_array(out, found.all_gather(equal_parts(out, dim, found.size), x, async_op=True))


def reduce_scatter_tensor(
    tensor: Array,
    reduce_op: str | ReduceOp,
    scatter_dim: int,
    group: GroupLike = None,
    tag: str = "",
) -> Reduced:
    """Return my chunk of the reduction of every rank's `tensor`, cut along `scatter_dim`.

    A tuple is as in `all_reduce`, and cut along dimension 0.
    """
    found, x, op = find_group(group, tag), _each(tensor, _array), reduction(reduce_op)
    if isinstance(x, tuple) and scatter_dim:
        raise ValueError(
            f"reduce_scatter_tensor: fields are cut along dimension 0, not {scatter_dim}"
        )
    out = _each(x, lambda each: new_array(each, _chunk_shape(each, scatter_dim, found.size)))
    if isinstance(x, tuple) or _dim(x, scatter_dim) == 0:
        work = found.reduce_scatter_tensor(out, x, op, async_op=True)
    else:
        parts = equal_parts(x, _dim(x, scatter_dim), found.size)
        work = found.reduce_scatter(out, parts, op, async_op=True)
    return _each(out, lambda each: _async_array(each, work))


def _chunk_shape(x: Array, scatter_dim: int, size: int) -> list[int]:
    dim = _dim(x, scatter_dim)
    if x.shape[dim] % size:
        raise ValueError(
            f"reduce_scatter_tensor: dimension {dim} has {x.shape[dim]} places, which can't be "
            f"divided by {size} ranks"
        )
    return [n // size if d == dim else n for d, n in enumerate(x.shape)]


def all_to_all_single(
    tensor: Array,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: GroupLike = None,
    tag: str = "",
) -> AsyncCollectiveArray:
    """Send rows of `tensor` to each rank, and return the received rows, rank after rank.

    Split sizes are numbers of rows, a number for each rank; without both, rows are divided evenly.
    """
    found, x = find_group(group, tag), _array(tensor)
    if (output_split_sizes is None) != (input_split_sizes is None):
        raise ValueError("all_to_all_single: give both split sizes or none")
    rows = x.shape[0] if output_split_sizes is None else sum(output_split_sizes)
    out = new_array(x, [rows, *x.shape[1:]])
    work = found.all_to_all_single(out, x, output_split_sizes, input_split_sizes, async_op=True)
    return _async_array(out, work)


def permute_tensor(
    tensor: Array, src_dst: Sequence[int], group: GroupLike = None, tag: str = ""
) -> AsyncCollectiveArray:
    """Send `tensor` to rank `src_dst[my rank]`; return the received tensor, in the same shape.

    `src_dst` has each rank in the group once.
    """
    found, x = find_group(group, tag), _array(tensor)
    if sorted(src_dst) != list(range(found.size)):
        raise ValueError(f"permute_tensor: src_dst must have each of {found.size} ranks once")
    count, out = prod(x.shape), new_array(x, x.shape)
    dst, src = src_dst[found.rank], list(src_dst).index(found.rank)
    sent, got = ([count * (rank == peer) for rank in range(found.size)] for peer in (dst, src))
    flat = out.reshape((count,)), x.reshape((count,))
    work = found.all_to_all_single(*flat, got, sent, async_op=True)
    return _async_array(out, work)


def all_reduce_coalesced(
    tensors: Sequence[Array], reduce_op: str | ReduceOp, group: GroupLike = None, tag: str = ""
) -> list[AsyncCollectiveArray]:
    """Return the all_reduce of each of `tensors`, launched together."""
    found = find_group(group, tag)
    with found.coalescing_manager(async_ops=True):
        return [all_reduce(x, reduce_op, found) for x in tensors]


def all_gather_into_tensor_coalesced(
    tensors: Sequence[Array], group: GroupLike = None, tag: str = ""
) -> list[AsyncCollectiveArray]:
    """Return the all_gather_tensor of each of `tensors` along dimension 0, launched together."""
    found = find_group(group, tag)
    with found.coalescing_manager(async_ops=True):
        return [all_gather_tensor(x, 0, found) for x in tensors]


def reduce_scatter_tensor_coalesced(
    tensors: Sequence[Array],
    reduce_op: str | ReduceOp,
    scatter_dim: Sequence[int],
    group: GroupLike = None,
    tag: str = "",
) -> list[AsyncCollectiveArray]:
    """Return the reduce_scatter_tensor of each of `tensors`, launched together.

    `scatter_dim` has a dimension for each.
    """
    found = find_group(group, tag)
    with found.coalescing_manager(async_ops=True):
        pairs = zip(tensors, scatter_dim, strict=True)
        return [reduce_scatter_tensor(x, reduce_op, dim, found) for x, dim in pairs]


def wait_tensor(tensor: Array) -> Array:
    """Block until a result is complete; return its plain array. Other arrays return unchanged."""
    return unwrapped(tensor)


def find_group(group: GroupLike, tag: str = "") -> ProcessGroup:
    """Return the group that an argument names; make a new group for listed ranks without a group.

    Making a group blocks until all its members call.
    """
    if isinstance(group, DeviceMesh):
        return group.get_group()
    if isinstance(group, tuple) and group and isinstance(group[0], DeviceMesh):
        found: ProcessGroup = group[0].get_group(*group[1:])
        return found
    if isinstance(group, (list, tuple)):
        return _group_of_ranks(own_list(group), tag)
    if group is None or isinstance(group, ProcessGroup):
        return group_or_default(group)
    raise ValueError(
        f"group must be a ProcessGroup, a mesh, (mesh, dim), or lists of ranks, got {group!r}"
    )


def own_list(ranks: Sequence[Any]) -> list[int]:
    """Return the list with this rank, in ascending order; ValueError for wrong lists."""
    nested = bool(len(ranks)) and isinstance(ranks[0], (list, tuple))
    lists = [list(group) for group in ranks] if nested else [list(ranks)]
    sizes = {len(group) for group in lists}
    if len(sizes) > 1:
        raise ValueError(f"groups must have one size, got sizes {sorted(sizes)}")
    everyone = [rank for group in lists for rank in group]
    if len(set(everyone)) != len(everyone):
        raise ValueError(f"ranks are listed twice: {ranks}")
    me = group_or_default(None).rank
    own = next((group for group in lists if me in group), None)
    if own is None:
        raise ValueError(f"rank {me} is in no group of {ranks}")
    return sorted(own)


def _group_of_ranks(ranks: list[int], tag: str) -> ProcessGroup:
    default, made, key = group_or_default(None), current_world().of_ranks, (tuple(ranks), tag)
    if key == (default.ranks, ""):
        return default
    # Kept: whether a rank still has a group that it has made must not depend on the program.
    if key not in made:
        description = f"functional {tag}" if tag else None
        found = new_group(ranks, use_local_synchronization=True, group_desc=description)
        assert isinstance(found, ProcessGroup), "this rank is one of them"
        made[key] = found
    return made[key]


def reduction(reduce_op: str | ReduceOp) -> ReduceOp:
    """Return the reduction for a name in upper or lower case; ValueError for an unknown one.

    The name may end with ".ordered". One's own reduction has the name that ranks compare.
    """
    if isinstance(reduce_op, ReduceOp):
        return reduce_op
    name = reduce_op.removesuffix(".ordered") if isinstance(reduce_op, str) else ""
    kind = own_kind(name)
    if kind is None and name.upper() not in _NAMES:
        known = ", ".join(name.lower() for name in _NAMES)
        advice = advice_for(reduce_op)
        raise ValueError(f"unknown reduction {reduce_op!r}{advice or f'; known: {known}'}")
    found: ReduceOp = getattr(ops, name.upper()) if kind is None else ReduceOp(kind)
    return found if name == reduce_op else found.ordered


def _dim(x: Array, dim: int) -> int:
    ndim = len(x.shape)
    if not -ndim <= dim < ndim:
        raise ValueError(f"the array has {ndim} dimensions, there is no dimension {dim}")
    return dim % ndim


def _array(tensor: Array) -> Array:
    """Return the plain array, an ndarray for a bytearray and the like; TypeError if it is none."""
    x = unwrapped(tensor)
    found = as_buffer(x)
    return x if hasattr(x, "shape") and hasattr(x, "dtype") else found.as_numpy()


def _copy(x: Array) -> Array:
    out = new_array(x, x.shape)
    assign(out, x)
    return out


def _each(x: Any, function: Callable[[Array], Any]) -> Any:
    """Return `function(x)`, or that of each array in a tuple: fields in arrays of their own."""
    return tuple(map(function, x)) if isinstance(x, tuple) else function(x)


def _async_array(out: Array, work: Work | None) -> AsyncCollectiveArray:
    assert work is not None, "the call was asynchronous"
    return AsyncCollectiveArray(out, work)
