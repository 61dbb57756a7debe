"""MPI's calls that c10d lacks: sendrecv, sendrecv_replace, probe, iprobe.

Common to all is what nc10d.api.calls says of arrays, groups, ranks and errors. `wait_any` and
`wait_some` are in nc10d.work.
"""

from __future__ import annotations

from nc10d.api.calls import rank_in, source_in
from nc10d.base.deadline import Timeout
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import Group, NonMember, group_or_default, own_worlds, process_world
from nc10d.ops import Array, MessageInfo


def sendrecv(
    tensor: Array,
    dst: int | None,
    output: Array,
    src: int | None,
    group: Group = None,
    tag: int = 0,
    recv_tag: int | None = None,
    group_dst: int | None = None,
    group_src: int | None = None,
) -> int:
    """Send `tensor` to rank `dst` while receiving `output` from rank `src`; return the sender.

    Blocks until both are done. Ranks may pass arrays of any size around a ring: no order of calls
    is needed. The peers may call sendrecv, or send and recv. `src` is a global rank, or None for
    any rank; `recv_tag` is `tag` unless given. `tensor` and `output` may differ in size and dtype,
    and share no memory. As in MPI, `dst` and `src` may both be this rank: `output` is then a copy.
    Returns -1 for a non-member, and inside a coalescing block, which the two messages join unless
    they are for this rank (ValueError).
    """
    default = process_world.default if group is None and not own_worlds else None
    if default is not None and type(dst) is type(src) is int and group_dst is group_src is None:
        numbers = default.numbers
        if dst in numbers and src in numbers:
            found = default.sendrecv(tensor, numbers[dst], output, numbers[src], tag, recv_tag)
            return -1 if found is None else src
    chosen = group_or_default(group)
    to, source = rank_in(chosen, "dst", dst, group_dst), source_in(chosen, src, group_src)
    return _global(chosen, chosen.sendrecv(tensor, to, output, source, tag, recv_tag))


def sendrecv_replace(
    tensor: Array,
    dst: int | None,
    src: int | None,
    group: Group = None,
    tag: int = 0,
    recv_tag: int | None = None,
    group_dst: int | None = None,
    group_src: int | None = None,
) -> int:
    """Send `tensor` to rank `dst`, and replace it by the array that rank `src` sends.

    As sendrecv, on a single array; a copy of it is sent. A device array must be contiguous.
    ValueError inside a coalescing block.
    """
    chosen = group_or_default(group)
    to, source = rank_in(chosen, "dst", dst, group_dst), source_in(chosen, src, group_src)
    return _global(chosen, chosen.sendrecv_replace(tensor, to, source, tag, recv_tag))


def probe(
    src: int | None = None,
    group: Group = None,
    tag: int | None = None,
    group_src: int | None = None,
    timeout: Timeout = None,
) -> MessageInfo | None:
    """Wait for a message that can be received; return its sender, tag and bytes.

    `src` and `tag` are None for any. The message stays: `recv` from its `src` with its `tag` takes
    it, unless another thread does so before. A message that a receive waits for already is not
    seen. `timeout` (seconds or timedelta) replaces the group's: CollectiveTimeout in this caller
    alone if no message has come. PeerLost if all ranks that could send it have left. ValueError
    inside a coalescing block, and for a backend that can't see messages (NCCL). Returns None for a
    non-member.
    """
    chosen = group_or_default(group)
    return _global_info(chosen, chosen.probe(source_in(chosen, src, group_src), tag, timeout))


def iprobe(
    src: int | None = None,
    group: Group = None,
    tag: int | None = None,
    group_src: int | None = None,
) -> MessageInfo | None:
    """Return sender, tag and bytes of the next message, None if none has come; never waits for one.

    See probe.
    """
    chosen = group_or_default(group)
    return _global_info(chosen, chosen.iprobe(source_in(chosen, src, group_src), tag))


def _global(group: ProcessGroup | NonMember, sender: int | None) -> int:
    return -1 if sender is None or isinstance(group, NonMember) else group.ranks[sender]


def _global_info(group: ProcessGroup | NonMember, found: MessageInfo | None) -> MessageInfo | None:
    if found is None or isinstance(group, NonMember):
        return None
    return found._replace(src=group.ranks[found.src])
