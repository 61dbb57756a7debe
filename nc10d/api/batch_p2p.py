"""Messages: send, recv, isend, irecv; and several at once, as a batch with a `P2POp` for each.

Common to all is what nc10d.api.calls says of arrays, groups, ranks and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nc10d.api.calls import rank_in, source_in
from nc10d.arrays.arguments import LARGEST_TAG
from nc10d.group.point_to_point import recv_op, send_op
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import Group, NonMember, group_or_default, own_worlds, process_world
from nc10d.ops import Array, Recv, Send
from nc10d.work import Work

# The shortest calls look up the default group inline, as in nc10d.api.calls.


def send(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send `tensor` to rank `dst`; block until `tensor` may be changed again.

    The call may return before `tensor` is received. Messages with the same tag (0 or more, 63 bits)
    arrive in the order of their sends; messages may overtake collectives.
    """
    default = process_world.default if group is None is group_dst and not own_worlds else None
    if default is not None and type(dst) is int and type(tag) is int:
        # The body of ProcessGroup.send: its frame would cost a short message a tenth of its time.
        number = default.numbers.get(dst, -1)
        if number >= 0 and 0 <= tag <= LARGEST_TAG:
            default._call(Send, number, tensor, tag, False, None)
            return
    found = group_or_default(group)
    found.send(tensor, rank_in(found, "dst", dst, group_dst), tag)


def isend(
    tensor: Array,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """Start to send `tensor` to rank `dst`; it must not be changed before the Work has ended."""
    default = process_world.default if group is None is group_dst and not own_worlds else None
    if default is not None and type(dst) is int and type(tag) is int:
        number = default.numbers.get(dst, -1)
        if number >= 0 and 0 <= tag <= LARGEST_TAG:
            return default._start(Send, number, tensor, tag, None)  # type: ignore[return-value]
    found = group_or_default(group)
    # Typed as in a group that has this rank; a call for another group returns None, as all do.
    return found.isend(tensor, rank_in(found, "dst", dst, group_dst), tag)  # type: ignore[return-value]


def recv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive `tensor` from rank `src`, or from any rank; return the sender's global rank.

    Blocks until the first message with that tag has come; CollectiveMismatch if it has another
    dtype or size. A receive that was posted before takes its message first. Returns -1 for a
    non-member, and inside a coalescing block, where no message has come yet.
    """
    default = process_world.default if group is None is group_src and not own_worlds else None
    if default is not None and type(src) is int and type(tag) is int:
        number = default.numbers.get(src, -1)
        if number >= 0 and 0 <= tag <= LARGEST_TAG:
            default._call(Recv, number, tensor, tag, False, None)
            return -1 if default._batches and default.in_batch() else src
    found = group_or_default(group)
    sender = found.recv(tensor, source_in(found, src, group_src), tag)
    if sender is None or isinstance(found, NonMember):
        return -1
    return found.ranks[sender]


def irecv(
    tensor: Array,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """Start to receive `tensor` from rank `src`, or from any rank if none is given.

    Of two receives that a message fits, the one that was posted first takes it. The Work's
    `result()` is the sender's rank in the group.
    """
    default = process_world.default if group is None is group_src and not own_worlds else None
    if default is not None and type(src) is int and type(tag) is int:
        number = default.numbers.get(src, -1)
        if number >= 0 and 0 <= tag <= LARGEST_TAG:
            return default._start(Recv, number, tensor, tag, None)  # type: ignore[return-value]
    found = group_or_default(group)
    return found.irecv(tensor, source_in(found, src, group_src), tag)  # type: ignore[return-value]


class P2POp:
    """A send or receive of a batch: `op` is `isend` or `irecv`, `peer` a global rank.

    `group_peer`, the peer's rank in `group`, may replace `peer`. ValueError unless exactly one of
    them is given, for any other `op`, and if this rank is not in the group.
    """

    __slots__ = ("group", "group_peer", "op", "peer", "tag", "tensor")

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: Array,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise ValueError(f"P2POp: op must be isend or irecv, got {op!r}")
        if isinstance(group, NonMember):
            raise ValueError("P2POp: this rank is not in the group")
        if (peer is None) == (group_peer is None):
            raise ValueError(f"P2POp: give either peer or group_peer, got {peer} and {group_peer}")
        self.op, self.tensor, self.tag = op, tensor, tag
        self.group: ProcessGroup = group_or_default(group)
        global_peer = self.group.global_rank(group_peer) if group_peer is not None else peer
        self.group_peer = self.group.group_rank(global_peer)  # type: ignore[arg-type]
        self.peer = self.group.global_rank(self.group_peer)

    def operation(self) -> Send | Recv:
        """Return the operation, with the peer's rank in the group."""
        make = send_op if self.op is isend else recv_op
        return make(self.tensor, self.group_peer, self.tag)

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag}, {self.group!r})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Launch sends and receives of a group together, in any order; return a Work for each.

    Does not block. Inside a coalescing block of the group, they join the block. ValueError for an
    empty list, for items that are no P2POp, or for several groups.
    """
    if not p2p_op_list or not all(isinstance(item, P2POp) for item in p2p_op_list):
        raise ValueError("batch_isend_irecv needs a list of P2POp, and not an empty one")
    return p2p_op_list[0].group.batch_isend_irecv(p2p_op_list)
