"""c10d's deprecated and private names: each warns as in c10d, and does as its successor.

The warnings are FutureWarnings; Python shows one of each line of code once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from nc10d.api.calls import all_gather_into_tensor, gather_single, reduce_scatter_tensor
from nc10d.arrays.arguments import check_elements, each_once
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import Group, NonMember, group_or_default, warn_non_member
from nc10d.ops import SUM, Array, ReduceOp
from nc10d.work import Work


def warn_deprecated(name: str, successor: str) -> None:
    """Warn the caller's caller that it should use another name."""
    message = f"nc10d.{name} is deprecated, as in c10d: use nc10d.{successor}"
    warnings.warn(message, FutureWarning, stacklevel=3)


def _all_gather_base(
    output_tensor: Array, input_tensor: Array, group: Group = None, async_op: bool = False
) -> Work | None:
    """Call all_gather_single; deprecated."""
    warn_deprecated("_all_gather_base", "all_gather_single")
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def _reduce_scatter_base(
    output: Array, input: Array, op: ReduceOp = SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Call reduce_scatter_single; deprecated."""
    warn_deprecated("_reduce_scatter_base", "reduce_scatter_single")
    return reduce_scatter_tensor(output, input, op, group, async_op)


def gather_into_tensor(
    tensor: Array,
    gather_tensor: Array | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Call gather_single; deprecated."""
    warn_deprecated("gather_into_tensor", "gather_single")
    return gather_single(tensor, gather_tensor, dst, group, async_op, group_dst)


def all_reduce_coalesced(
    tensors: Sequence[Array], op: ReduceOp = SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduce each of `tensors` as all_reduce does, in a single submission; deprecated.

    An array that the list has twice is reduced once. ValueError if two share memory.
    """
    warn_deprecated("all_reduce_coalesced", "coalescing_manager")
    found = group_or_default(group)
    if isinstance(found, NonMember):
        warn_non_member("all_reduce_coalesced", 3)
        return None
    if not isinstance(tensors, (list, tuple)):
        tensors = [tensors]
    with found.coalescing_manager(async_ops=async_op) as block:
        for tensor in each_once("all_reduce_coalesced", "tensors", tensors):
            found.all_reduce(tensor, op)
    return block.works[0] if block.works else None


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[Array]],
    input_tensor_list: Sequence[Array],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Copy rank r's i-th input into every rank's `output_tensor_lists[r][i]`; deprecated.

    A single submission, which gathers each input as all_gather does. ValueError if an output shares
    memory with another i's arrays.
    """
    warn_deprecated("all_gather_coalesced", "coalescing_manager")
    found = group_or_default(group)
    if isinstance(found, NonMember):
        warn_non_member("all_gather_coalesced", 3)
        return None
    if any(len(outputs) != len(input_tensor_list) for outputs in output_tensor_lists):
        count = len(input_tensor_list)
        raise ValueError(f"each list of output_tensor_lists must have {count} arrays, as the input")
    outs = [[outputs[i] for outputs in output_tensor_lists] for i in range(len(input_tensor_list))]
    check_elements("all_gather_coalesced", outs, input_tensor_list)
    with found.coalescing_manager(async_ops=async_op) as block:
        for out, tensor in zip(outs, input_tensor_list, strict=True):
            found.all_gather(out, tensor)
    return block.works[0] if block.works else None


def _broadcast_coalesced(
    process_group: ProcessGroup, tensors: Sequence[Array], buffer_size: int, src: int = 0
) -> None:
    """Copy the tensors of the group's rank `src` into every rank's, in a single submission.

    `buffer_size` is accepted as in c10d; nothing is copied into buffers.
    """
    with group_or_default(process_group).coalescing_manager():
        for tensor in tensors:
            process_group.broadcast(tensor, src)


class _ReduceOpNames:
    """`reduce_op.SUM` and the others, as c10d had them before ReduceOp."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not isinstance(getattr(ReduceOp, name, None), ReduceOp):
            raise AttributeError(f"reduce_op has no attribute {name!r}")
        warn_deprecated("reduce_op", "ReduceOp")
        return getattr(ReduceOp, name)


reduce_op = _ReduceOpNames()
