"""Python objects between ranks: torch.distributed's object calls, without trust in what comes.

What holds for all of them:

- Objects are carried by nc10d.codec: JSON-like values, bytes, sets, NumPy arrays, registered
  types. Nothing that a peer sends is run. With `allow_pickle`, a rank may send what the codec does
  not carry as a pickle, and may unpickle what comes; a pickle that reaches a rank that has not
  said so is a CodecError there.
- All of them block until this rank's part is done, and take the group's timeout as a whole: first
  the sizes travel, then the bytes.
- If a rank's object can't be encoded, that rank raises the reason and all who would have had the
  object, or see the sizes, raise a CodecError that names the rank. What has come but can't be
  decoded is a CodecError where that is so. Either way all ranks have made the same calls, lists
  are as they were, and the group goes on.
- `map_location` says where arrays that are received go. A device (a number, "cuda:1", torch's,
  CuPy's): NumPy arrays become nc10d.cuda's, which every framework takes, tensors are on it;
  ValueError if it is not there. A function: it is given each array or tensor and returns what takes
  its place (`cupy.asarray`, say). None and "cpu": all stay in host memory. Arrays inside a pickle
  are left.
- `device` is, as in c10d, one that the group has a backend for (ValueError). It says nothing about
  where arrays go: bytes travel over the backend for CPU arrays, which the group must have.
- `group`, `src`, `dst`, `group_src` and `group_dst` are as in nc10d.api.calls. ValueError inside a
  coalescing block. For a non-member the call warns and does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nc10d.api.calls import first_unless, rank_in, source_in
from nc10d.api.object_exchange import Location, ObjectCall, OutgoingObject
from nc10d.codec import Envelope, MessageKind
from nc10d.codec.messages import WORDS
from nc10d.errors import CodecError
from nc10d.group.world import Group


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    *,
    allow_pickle: bool = False,
    map_location: Location = None,
) -> None:
    """Put the objects of rank `src` (0 if neither is given) into everybody's `object_list`.

    All lists have the same length, else CodecError where it differs. What occurs in several of
    the objects is one object again in what is received.
    """
    call = ObjectCall("broadcast_object_list", group, allow_pickle, map_location, device)
    root = rank_in(call.found, "src", first_unless(src, group_src), group_src)
    _check_list("broadcast_object_list", object_list)
    if not call.begin():
        return
    if call.rank == root:
        out = OutgoingObject(list(object_list), allow_pickle)
        call.group.broadcast(out.message.words(), root, timeout=call.left())
        call.group.broadcast(call.flat(out), root, timeout=call.left())
        out.check()
        return
    words = np.empty(WORDS, np.int64)
    call.group.broadcast(words, root, timeout=call.left())
    envelope = call.envelope(words, root)
    flat = call.room(envelope)
    call.group.broadcast(flat, root, timeout=call.left())
    _fill(object_list, call.opened(envelope, flat, root), root)


def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Group = None,
    *,
    allow_pickle: bool = False,
    map_location: Location = None,
) -> None:
    """Put rank r's `obj` into everybody's `object_list[r]`; the list has one place per rank.

    Every rank receives its own object too, as a copy.
    """
    call = ObjectCall("all_gather_object", group, allow_pickle, map_location)
    _check_list("all_gather_object", object_list)
    if not call.begin():
        return
    _check_length("object_list", object_list, call.group.size)
    out = OutgoingObject(obj, allow_pickle)
    envelopes = call.announce(out)
    flats = [call.room(envelope) for envelope in envelopes]
    call.group.all_gather(flats, call.flat(out), timeout=call.left())
    out.check()
    object_list[:] = call.opened_all(envelopes, flats)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    *,
    allow_pickle: bool = False,
    map_location: Location = None,
) -> None:
    """Put rank r's `obj` into `object_gather_list[r]` of rank `dst` (0 if neither is given).

    The list has one place per rank on `dst`, and is None on the other ranks.
    """
    call = ObjectCall("gather_object", group, allow_pickle, map_location)
    root = rank_in(call.found, "dst", first_unless(dst, group_dst), group_dst)
    if not call.begin():
        return
    mine = _gather_list(object_gather_list, call.rank == root, call.group.size)
    out = OutgoingObject(obj, allow_pickle)
    envelopes = call.announce(out)
    flats = None if mine is None else [call.room(envelope) for envelope in envelopes]
    call.group.gather(call.flat(out), flats, root, timeout=call.left())
    out.check()
    if mine is None or flats is None:
        _check_all_sent(envelopes)
    else:
        mine[:] = call.opened_all(envelopes, flats)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    *,
    allow_pickle: bool = False,
    map_location: Location = None,
) -> None:
    """Put `scatter_object_input_list[r]` of rank `src` (or 0) into rank r's output list, at 0.

    The input list has one object per rank on `src`, and is not looked at elsewhere. If one of them
    can't be encoded, nobody gets any.
    """
    call = ObjectCall("scatter_object_list", group, allow_pickle, map_location)
    root = rank_in(call.found, "src", first_unless(src, group_src), group_src)
    if not call.begin():
        return
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError("scatter_object_output_list must be a list with at least one place")
    table = np.empty((call.group.size, WORDS), np.int64)
    out: list[OutgoingObject] = []
    if call.rank == root:
        out = _for_each_rank(scatter_object_input_list, call.group.size, allow_pickle)
        table[:] = [one.message.words() for one in out]
    call.group.broadcast(table, root, timeout=call.left())
    envelope = call.envelopes(table, root)[call.rank]
    flat = call.room(envelope)
    flats = [call.flat(one) for one in out] or None
    call.group.scatter(flat, flats, root, timeout=call.left())
    for one in out:
        one.check()
    scatter_object_output_list[0] = call.opened(envelope, flat, root)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    *,
    allow_pickle: bool = False,
) -> None:
    """Send the objects to rank `dst`, who calls recv_object_list with a list as long.

    They go as two messages of tag 0. `use_batch` is accepted for c10d's sake.
    """
    call = ObjectCall("send_object_list", group, allow_pickle, device=device)
    peer = rank_in(call.found, "dst", dst, group_dst)
    _check_list("send_object_list", object_list)
    if not call.begin():
        return
    out = OutgoingObject(list(object_list), allow_pickle)
    call.group.send(out.message.words(), peer, timeout=call.left())
    call.group.send(call.flat(out), peer, timeout=call.left())
    out.check()


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    *,
    allow_pickle: bool = False,
    map_location: Location = None,
) -> int:
    """Receive objects from rank `src`, or from anyone; return the sender's global rank.

    `object_list` is as long as the sender's (CodecError). Returns -1 for a non-member.
    """
    call = ObjectCall("recv_object_list", group, allow_pickle, map_location, device)
    peer = source_in(call.found, src, group_src)
    _check_list("recv_object_list", object_list)
    if not call.begin():
        return -1
    words = np.empty(WORDS, np.int64)
    sender = call.group.recv(words, peer, timeout=call.left())
    assert sender is not None, "no block is open, so the message has come"
    envelope = call.envelope(words, sender)
    flat = call.room(envelope)
    call.group.recv(flat, sender, timeout=call.left())
    _fill(object_list, call.opened(envelope, flat, sender), sender)
    return call.group.global_rank(sender)


def _for_each_rank(objects: Any, size: int, allow_pickle: bool) -> list[OutgoingObject]:
    """Return a message for each rank; if one object fails, all of them say so."""
    if objects is None:
        raise ValueError("scatter_object_input_list must be given on the source rank")
    _check_length("scatter_object_input_list", objects, size)
    out = [OutgoingObject(one, allow_pickle) for one in objects]
    error = next((one.error for one in out if one.error is not None), None)
    if error is not None:
        for one in out:
            one.fail(error)
    return out


def _gather_list(places: list[Any] | None, wanted: bool, size: int) -> list[Any] | None:
    """Return the list to fill in, which is there on the destination and only there."""
    if not wanted:
        if places:
            raise ValueError("object_gather_list must be None on ranks other than the destination")
        return None
    if places is None:
        raise ValueError("object_gather_list must be given on the destination rank")
    _check_length("object_gather_list", places, size)
    return places


def _check_list(call: str, objects: Any) -> None:
    if not isinstance(objects, list):
        raise TypeError(f"{call}: object_list must be a list, got {type(objects).__name__}")


def _check_length(name: str, objects: Sequence[Any], size: int) -> None:
    if len(objects) != size:
        raise ValueError(f"{name} must have one place per rank, {size}, got {len(objects)}")


def _check_all_sent(envelopes: Sequence[Envelope]) -> None:
    """Raise CodecError if a rank had no object to send; only its destination learns more."""
    for rank, envelope in enumerate(envelopes):
        if envelope.kind is MessageKind.FAILED:
            raise CodecError(f"gather_object: rank {rank} could not encode its object", rank=rank)


def _fill(places: list[Any], objects: Any, sender: int) -> None:
    """Put received objects into the caller's list, in place."""
    if type(objects) is not list or len(objects) != len(places):
        count = len(objects) if type(objects) is list else "no list of"
        message = f"rank {sender} has sent {count} objects, and the list here has {len(places)}"
        raise CodecError(message, rank=sender)
    places[:] = objects
