"""Several sends and receives at once: a `P2POp` for each, launched by `batch_isend_irecv`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nc10d.api.calls import irecv, isend
from nc10d.group.point_to_point import recv_op, send_op
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import Group, NonMember, group_or_default
from nc10d.ops import Array, Recv, Send
from nc10d.work import Work


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
