"""Group formation: a group exists on all members, or on none.

1. Each member allocates its area of group memory and puts the offset into the store.
2. The last member to arrive writes the outcome: all areas' offsets. The group is formed.
3. A member that gives up (deadline, a member's death, Ctrl-C) writes an error as the outcome.

The first outcome holds for every member. So all ranks raise the same error, and an unformed group's
areas can be reused at once: no rank maps them.

Any process that reaches the store can write anything there. So an offset is used only if the owner
has put the group's mark at that place in its arena. The mark is a digest over the group, the area's
size, and a secret in the arena, which came over the owner's own connection.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.memory.arena import MOST_BYTES, PAGE, ArenaMapping
from nc10d.backend.cpu.memory.group_memory import GroupMemory, area_bytes
from nc10d.backend.cpu.memory.host_peer import death, mask
from nc10d.backend.cpu.memory.peer_access import arena_secret
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.transport.connect import EndpointExchange, connect
from nc10d.backend.cpu.transport.remote_group import PURPOSES, RemoteGroup
from nc10d.base import error_wire
from nc10d.base.deadline import Deadline
from nc10d.base.stored import read_json, whole
from nc10d.base.text import join_words, members_text
from nc10d.base.wait_report import WaitReport
from nc10d.errors import Aborted, DistError, PeerLost, RendezvousError, StoreError
from nc10d.store.arrival import OUTCOME_KEY, KeyValueExchange, arrive, await_ranks, publish_outcome
from nc10d.store.base import Store

LARGE_SLOT, SMALL_SLOT = 256 * 1024, 32 * 1024
"""Bytes in a staging buffer's slot. Large arrays take twice the time with small slots."""
LARGE_STAGING_GROUPS = 32
"""How many of a rank's groups get large slots. With this limit 500 groups fit in 64 MiB."""

Area = tuple[int, int]
"""The offset of a rank's area in its arena, and the bytes in a staging buffer's slot."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The parameters for a group that forms; `members` are ranks in the job, `rank` an index."""

    # `check` is called during waits, and raises an error if waiting has become pointless.
    # `whereabouts` returns what ranks are doing instead of joining, as the end of a sentence.

    context: Context
    name: str
    members: Sequence[int]
    rank: int
    store: Store
    deadline: Deadline
    check: Callable[[], None]
    whereabouts: Callable[[], str] = str


def form(spec: GroupSpec) -> GroupMemory:
    """Allocate this rank's area for a group; return all local areas. Blocks until all call.

    A DistError, the same on every rank, explains why the group was not formed: RendezvousError
    for ranks that did not come before the deadline, PeerLost for ranks that have died. Any
    other error is raised unchanged, and the other ranks are told. An error of a signal's handler
    cancels the deadline, and is reported in the same way.
    """
    context, store = spec.context, spec.store
    offset, slot_bytes = _allocate(spec)
    failure: BaseException | None = None
    try:
        outcome = _arrive(spec, offset, slot_bytes)
    except BaseException as error:  # noqa: BLE001  (the other ranks must learn of it, too)
        # An error about the group is agreed with the others; any other error is this rank's own.
        cancelled = spec.deadline.cancelled()
        failure = error if cancelled or not isinstance(error, DistError) else None
        try:
            outcome = publish_outcome(store, _encoded(cancelled or error, spec))
        except DistError:
            # The area stays allocated: the other ranks may use it.
            if failure is not None:
                raise failure  # noqa: B904  (no consequence of the store's error)
            raise
    try:
        areas = read_json(OUTCOME_KEY, outcome, partial(_areas_in, len(spec.members)))
        if areas is not None:
            memory = _map(spec, areas, OUTCOME_KEY)
    except BaseException:
        # The other ranks may have formed the group: they learn that this rank has left.
        context.arena.mapping.words(offset + at.AREA_STATE, 1)[0] = at.CLOSED
        raise
    if areas is None:
        context.arena.mapping.words(offset + at.AREA_MARK, 1)[0] = 0
        context.arena.free(offset)
        if failure is not None:
            raise failure
        raise error_wire.decode_error(outcome) from None
    if failure is not None:
        give_back(context, memory)
        raise failure
    return memory


def form_again(spec: GroupSpec, exchange: KeyValueExchange) -> GroupMemory:
    """As `form`, for a failed group's survivors, which exchange offsets through `exchange`."""
    # Some members may succeed and others fail; the caller makes sure that nobody uses the group
    # then. PeerLost or RendezvousError is this rank's own error.
    context, size = spec.context, len(spec.members)
    offset, slot_bytes = _allocate(spec)
    keys = [f"area/{spec.name}/{rank}" for rank in range(size)]
    exchange.set(keys[spec.rank], json.dumps([offset, slot_bytes]))
    report = _report(spec)
    try:
        await_ranks(exchange, keys, report, partial(_absent, spec), spec.deadline, spec.check)
        return _map(spec, _read_areas(keys, exchange.multi_get(keys)), keys[spec.rank])
    except BaseException:
        # A peer that knows the offset may still write there, until that peer has left or died.
        near = context.near
        others = [near[m] for m in spec.members if m in near and m != context.number]
        left_word = context.arena.mapping.base + offset + at.AREA_LEFT
        context.abandon([offset], left_word, mask(others))
        raise


def _allocate(spec: GroupSpec) -> tuple[int, int]:
    """Allocate this rank's area; return its offset, and the bytes in a staging buffer's slot."""
    context, members = spec.context, spec.members
    slot_bytes = LARGE_SLOT if len(context.live_groups) < LARGE_STAGING_GROUPS else SMALL_SLOT
    offset = context.allocate(area_bytes(len(members), slot_bytes))
    context.arena.mapping.words(offset + at.AREA_STATE, 1)[0] = at.OPEN
    context.arena.mapping.words(offset + at.AREA_ACCESS, 1)[0] = context.access(members)
    mark = _mark(spec, context.arena.mapping, slot_bytes)
    context.arena.mapping.words(offset + at.AREA_MARK, 1)[0] = mark
    return offset, slot_bytes


def _mark(spec: GroupSpec, arena: ArenaMapping, slot_bytes: int) -> int:
    """Return the mark for the group's area in a rank's arena, as a positive int64."""
    text = repr((arena_secret(arena), spec.name, [*spec.members], slot_bytes))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") + 1


def _map(spec: GroupSpec, areas: Sequence[Area], key: str) -> GroupMemory:
    """Return a group's memory; the smallest slot size counts.

    StoreError names `key`, where the areas were found, if a local peer has no such area.
    """
    context, members = spec.context, spec.members
    near = [number for number, member in enumerate(members) if member in context.near]
    peers = [context.peers[context.near[members[number]]] for number in near]
    for number, peer in zip(near, peers, strict=True):
        offset, slot_bytes = areas[number]
        most = len(peer.mapping.data) - area_bytes(len(members), slot_bytes)
        marked = offset <= most and peer.mapping.words(offset + at.AREA_MARK, 1)[0] == _mark(
            spec, peer.mapping, slot_bytes
        )
        if not marked:
            text = members_text(members, [number])
            raise StoreError(
                f"the store's {key!r} has an area of the group {spec.name!r} at {offset} for "
                f"{text}, where that rank has none: something else than the ranks has written it"
            )
    least = min(slot_bytes for _, slot_bytes in areas)
    return GroupMemory(peers, near.index(spec.rank), [areas[n][0] for n in near], least, near)


def give_back(context: Context, memory: GroupMemory, links: Sequence[int] = ()) -> None:
    """Leave a group; its memory, and that of `links` (offsets), is freed when all have left.

    Only the first call does anything: the memory may belong to another group afterwards.
    """
    if not memory.left:
        memory.leave()
        context.ring(memory.bits())
        context.abandon([memory.offset, *links], memory.left_word(), memory.bits())


def check_alive(context: Context, name: str, members: Sequence[int]) -> None:
    """Raise PeerLost if a member in a group that forms has died or can't be reached any more."""
    peer = context.lost(members)
    if peer is not None:
        rank = members.index(peer.number)
        raise _lost(name, members, rank, death(peer), peer.pid, peer.host)
    for rank, member in enumerate(members):
        reason = context.router.unreachable(member)
        if reason is not None:
            info = context.infos[member]
            raise _lost(name, members, rank, reason, info.pid, info.host)


def _lost(
    name: str, members: Sequence[int], rank: int, reason: str, pid: int, host: str
) -> PeerLost:
    message = (
        f"{members_text(members, [rank])} is lost while the group {name!r} forms: "
        f"{reason} (pid {pid} on {host})"
    )
    return PeerLost(message, rank=rank, host=host, pid=pid, group=name)


def _arrive(spec: GroupSpec, offset: int, slot_bytes: int) -> bytes:
    """Announce this rank's area, and return the outcome."""
    store, size = spec.store, len(spec.members)
    keys = [f"area/{rank}" for rank in range(size)]
    store.set(keys[spec.rank], json.dumps([offset, slot_bytes]))

    def conclude() -> str:
        return json.dumps({"areas": _read_areas(keys, store.multi_get(keys))})

    report = _report(spec)

    def absent() -> list[int]:
        return [rank for rank in range(size) if not store.check([keys[rank]])]

    def check() -> None:
        spec.check()
        report.look(lambda: _absent(spec, absent()))

    def give_up() -> str:
        ranks = absent()
        text = report.timed_out(_absent(spec, ranks))
        raise RendezvousError(text, rank=next(iter(ranks), None), group=spec.name)

    return arrive(store, size, conclude, give_up, spec.deadline, check)


def _report(spec: GroupSpec) -> WaitReport:
    return WaitReport(members_text(spec.members, [spec.rank]), spec.deadline, spec.name)


def _read_areas(keys: Sequence[str], texts: Sequence[bytes]) -> list[Area]:
    return [read_json(key, text, _area) for key, text in zip(keys, texts, strict=True)]


def _area(value: Any) -> Area:
    """Return an area from its JSON; ValueError or TypeError if malformed."""
    offset, slot_bytes = value
    if slot_bytes not in (LARGE_SLOT, SMALL_SLOT) or whole(offset, PAGE, MOST_BYTES) % PAGE:
        raise ValueError("no area")
    return offset, slot_bytes


def _areas_in(size: int, outcome: Any) -> list[Area] | None:
    """Return the areas for the `size` members in an outcome; None for an error."""
    if "areas" not in outcome:
        return None
    areas = [_area(area) for area in outcome["areas"]]
    if len(areas) != size:
        raise ValueError(f"areas of {len(areas)} members, not of {size}")
    return areas


def _absent(spec: GroupSpec, ranks: Sequence[int]) -> str:
    absent = join_words([members_text(spec.members, [rank]) for rank in ranks])
    return f"{absent} did not join the group {spec.name!r}{spec.whereabouts()}"


def _encoded(error: BaseException, spec: GroupSpec) -> bytes:
    """Return the error for which this rank gives up, as the other ranks will read it."""
    name, rank = spec.name, spec.rank
    if not isinstance(error, DistError):
        kind, text = type(error).__name__, error_wire.message_of(error)
        reason = f"{kind}: {text}" if text else kind
        error = Aborted(f"rank {rank} gave up while the group {name!r} formed: {reason}", rank=rank)
    return error_wire.encode_error(error, group=name)


def reach(spec: GroupSpec, memory: GroupMemory, exchange: KeyValueExchange) -> RemoteGroup | None:
    """Connect a group to its ranks on other hosts, if any; blocks until all members have."""
    context = spec.context
    hosts = context.topology.restricted(spec.members)
    if len(hosts.hosts) == 1:
        return None
    remote = context.remote_hosts
    assert remote is not None, "there are several hosts"
    # Slot sizes that differ between hosts would make ranks transfer different amounts.
    terms = f" {memory.slot_bytes}"
    endpoints = EndpointExchange(exchange, remote.address, spec.name, memory.group_rank, terms)
    peers = hosts.remote_ranks(memory.group_rank)
    sockets = connect(endpoints, peers, PURPOSES, spec.deadline, spec.check)
    return RemoteGroup(remote.poller, sockets, hosts)
