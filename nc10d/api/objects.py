"""Python objects between ranks: torch.distributed's object calls, safe with untrusted peers.

Common to all calls:

- nc10d.codec carries the objects: JSON-like values, bytes, sets, NumPy arrays, registered types.
  No code that a peer sends is run. With `allow_pickle`, a rank may send other objects as a pickle,
  and may unpickle received messages. A pickle is a CodecError on a receiver without `allow_pickle`.
  None, the default, is False unless the environment has NC10D_ALLOW_PICKLE=1. `weights_only`,
  c10d's from torch 2.14 on, refuses pickles in any case.
- A call blocks until this rank's part is done. The group's timeout is for the whole call: first
  the sizes travel, with objects of up to 4,000 bytes, then larger objects.
- If a rank's object can't be encoded, that rank raises the reason. Every rank that would receive
  the object, or sees the sizes, raises a CodecError that names the rank. A message that can't be
  decoded is a CodecError on its receiver. In both cases lists are unchanged, and the group stays
  usable: all ranks have run the same collectives.
- `map_location` is the place of received arrays. A device (a number, "cuda:1", torch's, CuPy's):
  NumPy arrays become nc10d.cuda's, which every framework takes, and tensors are moved there;
  ValueError if there is no such device. A function (`cupy.asarray`, for instance): it takes each
  array or tensor and returns its replacement. None and "cpu": arrays stay in host memory. Arrays
  inside a pickle stay as they are.
- `device` must be a device for which the group has a backend, as in c10d (ValueError). It does not
  place arrays: bytes travel over the backend for CPU arrays, which the group must have.
- `group`, `src`, `dst`, `group_src` and `group_dst` are as in nc10d.api.calls. ValueError inside a
  coalescing block. For a non-member the call warns and does nothing.
"""

from __future__ import annotations

from typing import Any

from nc10d.api.calls import rank_in, rank_or_first, source_in
from nc10d.api.object_exchange import (
    Location,
    ObjectCall,
    OutgoingObject,
    all_inline,
    check_gather_list,
    check_length,
    check_list,
    encode_outgoing,
    for_each_rank,
    marks,
    opening_of,
    part,
    pieces_to_send,
    raise_if_failed,
    rounds,
    scatter_table,
)
from nc10d.codec import MessageKind
from nc10d.codec.compiled_openings import (
    BROADCAST_OTHER,
    BROADCAST_ROOT,
    GATHER_ELSEWHERE,
    GATHER_HERE,
    RECEIVE,
    SCATTER_OTHER,
    SCATTER_ROOT,
    SEND,
)
from nc10d.codec.messages import later_tag
from nc10d.codec.openings import ALL_ROWS, NO_ROWS, give_back, pools, take
from nc10d.group.world import Group, NonMember, group_or_default, warn_non_member
from nc10d.ops import AllGather, Broadcast, Recv, Scatter, Send

# Each call first tries the prepared way (`run_hooked`). A group whose `allow_pickle` is None has no
# such way: it has made no object call yet, or is a NonMember. Whatever the hooks have not done is
# done here. They have stopped behind `openings.ran` operations.


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: object = None,
    group_src: int | None = None,
    weights_only: bool = False,
    *,
    allow_pickle: bool | None = None,
    map_location: Location = None,
) -> None:
    """Put the objects of rank `src` (0 if neither is given) into every rank's `object_list`.

    All lists have the same length; a rank whose length differs raises CodecError. An object that
    several of the sent objects share is shared by the received objects too.
    """
    found = group_or_default(group)
    root = rank_in(found, "src", rank_or_first(src, group_src), group_src)
    openings, here = None, found.rank == root
    if found.allow_pickle is not None and map_location is None and device is None:
        task = BROADCAST_ROOT if here else BROADCAST_OTHER
        openings = found.run_hooked(Broadcast, root, pools[1], task, object_list, object_list)
        if openings is None:
            return
    check_list("broadcast_object_list", object_list)
    if isinstance(found, NonMember):
        warn_non_member("broadcast_object_list", 3)
        return
    openings = openings or take(1)
    call = ObjectCall(
        "broadcast_object_list", found, openings, allow_pickle, weights_only, map_location, device
    )
    if here:
        out = None
        if not openings.ran:
            out = encode_outgoing([*object_list], call.allow_pickle, openings)
            found.broadcast(opening_of(out, openings), root)
        for each in call.encoded(out):
            found.broadcast(each, root, timeout=call.remaining())
        raise_if_failed(out)
        give_back(openings)
        return
    if not openings.ran:
        found.broadcast(openings.table, root)
    call.receive(
        object_list, root, lambda each: found.broadcast(each, root, timeout=call.remaining())
    )


def all_gather_object(
    object_list: list[Any],
    obj: object,
    group: Group = None,
    weights_only: bool = False,
    *,
    allow_pickle: bool | None = None,
    map_location: Location = None,
) -> None:
    """Put rank r's `obj` into every rank's `object_list[r]`; its length is the group's size.

    Every rank receives its own object too, as a copy.
    """
    found = group_or_default(group)
    openings, size = None, found.size
    if found.allow_pickle is not None and map_location is None:
        openings = found.run_hooked(AllGather, None, pools[size], GATHER_HERE, obj, object_list)
        if openings is None:
            return
    check_list("all_gather_object", object_list)
    if isinstance(found, NonMember):
        warn_non_member("all_gather_object", 3)
        return
    openings = openings or take(size)
    call = ObjectCall(
        "all_gather_object", found, openings, allow_pickle, weights_only, map_location
    )
    if not openings.ran:
        check_length("object_list", object_list, size)
    _gather(call, obj, object_list)


def gather_object(
    obj: object,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    weights_only: bool = False,
    *,
    allow_pickle: bool | None = None,
    map_location: Location = None,
) -> None:
    """Put rank r's `obj` into `object_gather_list[r]` of rank `dst` (0 if neither is given).

    On `dst`, the length of the list is the group's size; on the other ranks it is None.
    """
    found = group_or_default(group)
    root = rank_in(found, "dst", rank_or_first(dst, group_dst), group_dst)
    openings, size, here = None, found.size, found.rank == root
    if found.allow_pickle is not None and map_location is None and (here or not object_gather_list):
        task = GATHER_HERE if here else GATHER_ELSEWHERE
        openings = found.run_hooked(AllGather, None, pools[size], task, obj, object_gather_list)
        if openings is None:
            return
    if isinstance(found, NonMember):
        warn_non_member("gather_object", 3)
        return
    openings = openings or take(size)
    call = ObjectCall("gather_object", found, openings, allow_pickle, weights_only, map_location)
    if not openings.ran:
        check_gather_list(object_gather_list, here, size)
    _gather(call, obj, object_gather_list if here else None, root)


def _gather(
    call: ObjectCall, obj: object, places: list[Any] | None, root: int | None = None
) -> None:
    """Put all ranks' objects into `places`, if this rank has any: `root` has, or all ranks have."""
    group, openings = call.group, call.openings
    out = None
    if not openings.ran:
        out = encode_outgoing(obj, call.allow_pickle, openings)
        group.all_gather_into_tensor(openings.table, opening_of(out, openings))
    objects = call.objects(NO_ROWS if places is None else ALL_ROWS)
    if objects is not None:
        give_back(openings)
        if places is not None:
            places[:] = objects
        return
    arrived = call.incoming_all(openings.table)
    sent = call.encoded(out)
    received = [] if places is None else list(map(call.allocate, arrived))
    for number in rounds(arrived):
        mine = part(sent, number)
        parts = [part(each, number) for each in received]
        if root is None:
            group.all_gather(parts, mine, timeout=call.remaining())
        else:
            group.gather(mine, parts or None, root, timeout=call.remaining())
    raise_if_failed(out)
    if places is None:
        for incoming in arrived:  # the destination has the reason
            if incoming.envelope.kind is MessageKind.FAILED:
                sender = call.name_of(incoming.sender)
                raise call.error_about(incoming.sender, f"{sender} could not encode its object")
    else:
        places[:] = [call.decode(incoming) for incoming in arrived]
    give_back(openings)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    weights_only: bool = False,
    *,
    allow_pickle: bool | None = None,
    map_location: Location = None,
) -> None:
    """Put `scatter_object_input_list[r]` of rank `src` (or 0) into rank r's output list, at 0.

    On `src`, the input list has an object for each rank; on other ranks it is ignored. If an
    object can't be encoded, no rank receives any.
    """
    found = group_or_default(group)
    root = rank_in(found, "src", rank_or_first(src, group_src), group_src)
    openings, size, here = None, found.size, found.rank == root
    if found.allow_pickle is not None and map_location is None:
        task = SCATTER_ROOT if here else SCATTER_OTHER
        sent, places = scatter_object_input_list, scatter_object_output_list
        openings = found.run_hooked(Scatter, (root, True), pools[size], task, sent, places)
        if openings is None:
            return
    if isinstance(found, NonMember):
        warn_non_member("scatter_object_list", 3)
        return
    openings = openings or take(size)
    call = ObjectCall(
        "scatter_object_list", found, openings, allow_pickle, weights_only, map_location
    )
    out: list[OutgoingObject | None] = []
    if not openings.ran:
        if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
            raise ValueError("scatter_object_output_list must be a list with at least one place")
        rows = None
        if here:
            out = for_each_rank(scatter_object_input_list, openings, call.allow_pickle)
            rows = openings.table if all_inline(out) else marks(size)
        found.scatter_single(openings.receive_own(), rows, root)
    incoming = call.incoming(openings.own, root)
    if incoming.envelope.kind is MessageKind.TABLE_FOLLOWS:
        incoming = scatter_table(call, out, root)
    elif not incoming.envelope.inline:
        raise call.error_about(root, f"{call.name_of(root)} has sent a part of a message only")
    for each in out:
        raise_if_failed(each)
    scatter_object_output_list[:1] = [call.decode(incoming)]
    give_back(openings)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: object = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
    *,
    allow_pickle: bool | None = None,
) -> None:
    """Send the objects to rank `dst`, which calls recv_object_list with a list of the same length.

    They travel with tag 0, as one message if they are small, else as several; the later ones have
    tags from 2**62 on. Several threads may send to one rank. `use_batch` is accepted as in c10d.
    """
    found = group_or_default(group)
    peer = rank_in(found, "dst", dst, group_dst)
    openings = None
    if found.allow_pickle is not None and device is None:
        openings = found.run_hooked(Send, peer, pools[1], SEND, object_list, None)
        if openings is None:
            return
    check_list("send_object_list", object_list)
    if isinstance(found, NonMember):
        warn_non_member("send_object_list", 3)
        return
    openings = openings or take(1)
    call = ObjectCall("send_object_list", found, openings, allow_pickle, weights_only, None, device)
    out = None
    if not openings.ran:
        out = encode_outgoing([*object_list], call.allow_pickle, openings)
        openings.number(opening_of(out, openings))
    tag = later_tag(opening_of(out, openings))
    for place, each in enumerate(pieces_to_send(out, openings), openings.ran):
        found.send(each, peer, tag if place else 0, call.remaining())
    for each in call.encoded(out):
        found.send(each, peer, tag, call.remaining())
    raise_if_failed(out)
    give_back(openings)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: object = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
    *,
    allow_pickle: bool | None = None,
    map_location: Location = None,
) -> int:
    """Receive objects from rank `src`, or from any rank; return the sender's global rank.

    CodecError if the length of `object_list` is not that of the sender's list. Several threads may
    receive: each message comes to one of them, whole. Returns -1 for a non-member.
    """
    found = group_or_default(group)
    peer = source_in(found, src, group_src)
    openings = None
    if found.allow_pickle is not None and map_location is None and device is None:
        openings = found.run_hooked(Recv, peer, pools[1], RECEIVE, None, object_list)
        if openings is None:
            assert peer is not None, "a receive from any rank is not prepared"
            return found.ranks[peer]
    check_list("recv_object_list", object_list)
    if isinstance(found, NonMember):
        warn_non_member("recv_object_list", 3)
        return -1
    openings = openings or take(1)
    call = ObjectCall(
        "recv_object_list", found, openings, allow_pickle, weights_only, map_location, device
    )
    sender = peer if openings.ran else found.recv(openings.first, peer)
    assert sender is not None, "no block is open, so the message has come"
    tag = later_tag(openings.first)
    for each in openings.later_pieces():
        found.recv(each, sender, tag, call.remaining())
    call.receive(object_list, sender, lambda each: found.recv(each, sender, tag, call.remaining()))
    return found.ranks[sender]
