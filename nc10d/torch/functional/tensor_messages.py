"""Functional messages: a received tensor is a new tensor, and a graph has each message as operator.

Contract: `dst` and `src` are ranks in the group. Messages in a graph keep their order among all
operators. `isend` in a graph sends a copy, since a compiler may reuse the tensor's memory. No
message has a gradient. Below vmap it is a TypeError: the other rank does not know the samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from nc10d.api.async_array import AsyncCollectiveArray
from nc10d.api.batch_p2p import P2POp
from nc10d.api.batch_p2p import irecv as ordinary_irecv
from nc10d.api.batch_p2p import isend as ordinary_isend
from nc10d.api.functional import GroupLike
from nc10d.group.process_group import ProcessGroup
from nc10d.torch.functional import operators
from nc10d.torch.functional.async_tensor import AsyncCollectiveTensor
from nc10d.torch.functional.labels import found_group, label, resolve
from nc10d.torch.functional.tracing import needs_operator, plain
from nc10d.work import Work


class Ticket(NamedTuple):
    """A graph's message that is on its way: give it to `wait_tensor`."""

    number: Tensor
    like: Tensor


def send(tensor: Tensor, dst: int, group: GroupLike = None, tag: int = 0) -> None:
    """Send `tensor` to the group's rank `dst`; blocks until `tensor` may be changed again."""
    x = plain(tensor).detach()
    if needs_operator(x):
        torch.ops.nc10d.send(x, dst, tag, label(group)[0])
    else:
        found_group(group).send(x, dst, tag)


def recv(like: Tensor, src: int, group: GroupLike = None, tag: int = 0) -> Tensor:
    """Receive a tensor with the shape, dtype and device of `like` from rank `src`. Blocks."""
    x = plain(like).detach()
    if needs_operator(x):
        return torch.ops.nc10d.recv(x, src, tag, label(group)[0])
    out = x.new_empty(x.shape)
    found_group(group).recv(out, src, tag)
    return out


def isend(tensor: Tensor, dst: int, group: GroupLike = None, tag: int = 0) -> Tensor | Ticket:
    """Start to send `tensor` to rank `dst`; `wait_tensor` on the result waits for the end."""
    x = plain(tensor).detach()
    if needs_operator(x):
        return Ticket(torch.ops.nc10d.isend(x, dst, tag, label(group)[0]), x)
    return _pending(x, found_group(group).isend(x, dst, tag))


def irecv(like: Tensor, src: int, group: GroupLike = None, tag: int = 0) -> Tensor | Ticket:
    """Start to receive a tensor like `like` from rank `src`: `wait_tensor` returns that tensor."""
    x = plain(like).detach()
    if needs_operator(x):
        return Ticket(torch.ops.nc10d.irecv(x, src, tag, label(group)[0]), x)
    out = x.new_empty(x.shape)
    return _pending(out, found_group(group).irecv(out, src, tag))


def batch_p2p(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[Tensor],
    group: GroupLike = None,
) -> list[Tensor]:
    """Launch messages together, in any order; return the received tensors.

    Message i is "isend" or "irecv" by `op_list[i]`, with the group's rank `peer_list[i]`. It
    sends `tensors[i]`, or receives a tensor like `tensors[i]`.
    """
    xs = [plain(x).detach() for x in tensors]
    if not len(op_list) == len(peer_list) == len(tag_list) == len(xs):
        raise ValueError("batch_p2p: the lists have different lengths")
    if not all(kind in ("isend", "irecv") for kind in op_list):
        raise ValueError(f"batch_p2p: ops are 'isend' or 'irecv', got {list(op_list)}")
    if needs_operator(*xs):
        lists = list(op_list), list(peer_list), list(tag_list)
        return torch.ops.nc10d.batch_p2p(*lists, xs, label(group)[0])
    works, outs = _launch(op_list, peer_list, tag_list, xs, found_group(group))
    pending = [_pending(x, work) for x, work in zip(outs, works, strict=True)]
    return [x for kind, x in zip(op_list, pending, strict=True) if kind == "irecv"]


def barrier(group: GroupLike = None) -> None:
    """Block until every rank in the group has made this call."""
    if needs_operator():
        torch.ops.nc10d.barrier(label(group)[0])
    else:
        found_group(group).barrier()


def wait_tensor(tensor: Tensor | Ticket) -> Tensor:
    """Block until a result is complete; return its plain tensor. Others return unchanged."""
    if isinstance(tensor, Ticket):
        return torch.ops.nc10d.wait_tensor(tensor.number, tensor.like)
    return plain(tensor)


def _pending(x: Tensor, work: Work | None) -> Tensor:
    assert work is not None, "the call was asynchronous"
    return AsyncCollectiveTensor(AsyncCollectiveArray(x, work))


def _launch(
    kinds: Sequence[str],
    peers: Sequence[int],
    tags: Sequence[int],
    xs: Sequence[Tensor],
    group: ProcessGroup,
) -> tuple[list[Work], list[Tensor]]:
    sends = [kind == "isend" for kind in kinds]
    outs = [x if own else x.new_empty(x.shape) for own, x in zip(sends, xs, strict=True)]
    rows = zip(sends, outs, peers, tags, strict=True)
    ops = [
        P2POp(ordinary_isend if own else ordinary_irecv, x, group=group, tag=tag, group_peer=peer)
        for own, x, peer, tag in rows
    ]
    return group.batch_isend_irecv(ops), outs


# The operators.

_in_flight: dict[int, tuple[Work | None, Tensor | None]] = {}
"""Messages by their tickets' numbers; a receive comes with the tensor that its wait returns."""
_numbers = itertools.count(1)


def _ticket(work: Work | None, out: Tensor | None) -> Tensor:
    number = next(_numbers)
    _in_flight[number] = work, out
    return torch.tensor(number)


def _send(x: Tensor, dst: int, tag: int, group_name: str) -> None:
    resolve(group_name).send(x, dst, tag)


def _recv(x: Tensor, src: int, tag: int, group_name: str) -> Tensor:
    out = x.new_empty(x.shape)
    resolve(group_name).recv(out, src, tag)
    return out


def _isend(x: Tensor, dst: int, tag: int, group_name: str) -> Tensor:
    for number, (work, out) in list(_in_flight.items()):
        if out is None and work is not None and work.is_success():
            _in_flight.pop(number, None)  # nobody has waited for this send
    return _ticket(resolve(group_name).isend(operators.copy_of(x), dst, tag), None)


def _irecv(x: Tensor, src: int, tag: int, group_name: str) -> Tensor:
    out = x.new_empty(x.shape)
    return _ticket(resolve(group_name).irecv(out, src, tag), out)


def _wait(number: Tensor, like: Tensor) -> Tensor:
    work, out = _in_flight.pop(int(number), (None, None))
    if work is not None:
        work.wait()
    return operators.copy_of(like) if out is None else out


def _batch(
    kinds: Sequence[str],
    peers: Sequence[int],
    tags: Sequence[int],
    xs: Sequence[Tensor],
    group_name: str,
) -> list[Tensor]:
    works, outs = _launch(kinds, peers, tags, xs, resolve(group_name))
    for work in works:
        work.wait()
    return [x for kind, x in zip(kinds, outs, strict=True) if kind == "irecv"]


def _fake_ticket(*_: object) -> Tensor:
    return torch.empty((), dtype=torch.int64)


def _fake_batch(
    kinds: Sequence[str], _peers: object, _tags: object, xs: Sequence[Tensor], _name: str
) -> list[Tensor]:
    return [x.new_empty(x.shape) for kind, x in zip(kinds, xs, strict=True) if kind == "irecv"]


_TABLE: dict[str, tuple[operators.Kernel, operators.Kernel]] = {
    "send(Tensor input, int dst, int tag, str group_name) -> ()": (_send, lambda *_: None),
    "recv(Tensor like, int src, int tag, str group_name) -> Tensor": (_recv, operators.same),
    "isend(Tensor input, int dst, int tag, str group_name) -> Tensor": (_isend, _fake_ticket),
    "irecv(Tensor like, int src, int tag, str group_name) -> Tensor": (_irecv, _fake_ticket),
    "wait_tensor(Tensor ticket, Tensor like) -> Tensor": (
        _wait,
        lambda _, like: operators.same(like),
    ),
    "batch_p2p(str[] op_list, int[] peer_list, int[] tag_list, Tensor[] tensors, str group_name) "
    "-> Tensor[]": (_batch, _fake_batch),
}


def _refused(name: str) -> operators.Kernel:
    def rule(*_: object) -> NoReturn:
        raise TypeError(f"{name} has no meaning below vmap: send the whole batch outside of it")

    return rule


for _signature, (_kernel, _fake) in _TABLE.items():
    _name = operators.register(_signature, _kernel, _fake)
    torch.library.register_vmap(f"nc10d::{_name}", _refused(_name), lib=operators.library)
