"""How the members of a group agree that it exists: on all of them, or on none.

Each member puts into the store where its area lies. The last to come says where all of them lie,
and the group is formed; who gives up (time is over, a member has died, Ctrl-C) says why it is not.
The first word holds for everybody. So all ranks raise the same error at the same time, and what a
group that was not formed had allocated may be used again at once: nobody will look at it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.memory.bits import mask
from nc10d.backend.cpu.memory.group_memory import GroupMemory, area_bytes
from nc10d.backend.cpu.memory.host_peer import death
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.transport import connect as wiring
from nc10d.backend.cpu.transport.remote_group import PURPOSES, RemoteGroup
from nc10d.base import error_wire
from nc10d.base.deadline import Deadline
from nc10d.base.text import listing
from nc10d.errors import Aborted, DistError, PeerLost, RendezvousError
from nc10d.store.arrival import SLICE, come, say, there

if TYPE_CHECKING:
    from nc10d.store.arrival import KeyValueBoard
    from nc10d.store.base import Store


LARGE_HALF, SMALL_HALF = 256 * 1024, 32 * 1024
"""Bytes of a board's half. Large arrays take twice the time with small ones."""
LARGE_BOARDS = 32
"""How many groups of a rank may have large boards: 500 groups are to fit in 64 MiB."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What a rank brings to a group's forming: who the `members` (ranks of the job) are, and how.

    `rank` is mine among them. `check` is called in waits, and raises what makes them pointless.
    """

    host: Context
    name: str
    members: Sequence[int]
    rank: int
    store: Store
    deadline: Deadline
    check: Callable[[], None]

    def who(self, rank: int) -> str:
        """Name a member."""
        return _who(self.members, rank)


def form(founding: GroupSpec) -> GroupMemory:
    """Make this rank's area of a group; return those of its host. Blocks until all have called.

    A DistError, the same on every rank, says why the group was not formed: RendezvousError who
    did not come before the deadline, PeerLost who never will.
    """
    host, store = founding.host, founding.store
    offset, half = _lay_out(founding)
    failure: BaseException | None = None
    try:
        verdict = _meet(founding, offset, half)
    except BaseException as error:  # noqa: BLE001  (Ctrl-C too: the others must hear of it)
        # Should this fail as well, the area stays: others may count on it.
        verdict, failure = say(store, _written(error, founding)), error
    interrupted = failure if not isinstance(failure, Exception) else None
    told = json.loads(verdict)
    if "offsets" not in told:
        host.arena.free(offset)
        raise interrupted or error_wire.read(verdict) from None
    areas = _areas(founding, told["offsets"], told["half"])
    if interrupted is not None:
        withdraw(areas)
        raise interrupted
    return areas


def form_again(founding: GroupSpec, board: KeyValueBoard) -> GroupMemory:
    """Make this rank's area of a group of survivors, who all tell each other where theirs lie.

    As `form`, but it may succeed on some members only: whoever asks sees to it that then nobody
    uses the group. PeerLost or RendezvousError of this rank's own if it can't be formed here.
    """
    host, size = founding.host, len(founding.members)
    offset, half = _lay_out(founding)
    keys = [f"area/{founding.name}/{rank}" for rank in range(size)]
    board.set(keys[founding.rank], f"{offset} {half}")
    try:
        while not there(board, keys, founding.deadline.slice(SLICE)):
            founding.check()
            if founding.deadline.expired():
                raise _absent(founding, [r for r in range(size) if not board.check([keys[r]])])
    except BaseException:
        # Who knows where it lies may still write there, until it has left or died.
        others = [host.near[m] for m in founding.members if m in host.near and m != host.number]
        host.abandon([offset], host.arena.mapping.base + offset + at.AREA_LEFT, mask(others))
        raise
    return _areas(founding, *_places(board.multi_get(keys)))


def _lay_out(founding: GroupSpec) -> tuple[int, int]:
    """Allocate this rank's area; return where it is, and the bytes of a board's half."""
    host, members = founding.host, founding.members
    half = LARGE_HALF if len(host.groups) < LARGE_BOARDS else SMALL_HALF
    offset = host.allocate(area_bytes(len(members), half))
    host.arena.mapping.words(offset + at.AREA_STATE, 1)[0] = at.OPEN
    host.arena.mapping.words(offset + at.AREA_ACCESS, 1)[0] = host.access(members)
    return offset, half


def _areas(founding: GroupSpec, offsets: Sequence[int], half: int) -> GroupMemory:
    host, members = founding.host, founding.members
    near = [number for number, member in enumerate(members) if member in host.near]
    mates = [host.near[members[number]] for number in near]
    mine = near.index(founding.rank)
    return GroupMemory(host, mates, mine, [offsets[n] for n in near], half, near)


def withdraw(areas: GroupMemory, links: Sequence[int] = ()) -> None:
    """Leave a group that exists; its memory, and that of `links`, goes when all have left."""
    areas.leave()
    areas.host.ring(areas.bits())
    areas.host.abandon([areas.offset, *links], areas.left_word(), areas.bits())


def check_alive(host: Context, name: str, members: Sequence[int]) -> None:
    """Raise PeerLost if one of a forming group's members has died."""
    mate = host.lost(members)
    if mate is not None:
        rank = members.index(mate.number)
        message = (
            f"{_who(members, rank)} is lost while the group {name!r} forms: "
            f"{death(mate)} (pid {mate.pid} on {mate.host})"
        )
        raise PeerLost(message, rank=rank, host=mate.host, pid=mate.pid, group=name)
    for rank, member in enumerate(members):
        reason = host.peers.unreachable(member)
        if reason is not None:
            card = host.cards[member]
            message = (
                f"{_who(members, rank)} is lost while the group {name!r} forms: "
                f"{reason} (pid {card.pid} on {card.host})"
            )
            raise PeerLost(message, rank=rank, host=card.host, pid=card.pid, group=name)


def _meet(founding: GroupSpec, offset: int, half: int) -> bytes:
    """Say that this rank has come, and return the verdict; the smallest board counts."""
    store, size = founding.store, len(founding.members)
    keys = [f"area/{rank}" for rank in range(size)]
    store.set(keys[founding.rank], f"{offset} {half}")

    def conclude() -> str:
        offsets, least = _places(store.multi_get(keys))
        return json.dumps({"offsets": offsets, "half": least})

    def give_up() -> str:
        raise _absent(founding, [rank for rank in range(size) if not store.check([keys[rank]])])

    return come(store, size, conclude, give_up, founding.deadline, founding.check)


def _places(texts: Sequence[bytes]) -> tuple[list[int], int]:
    """Return where areas lie, and the bytes of the smallest half."""
    places = [text.split() for text in texts]
    return [int(offset) for offset, _ in places], min(int(half) for _, half in places)


def _absent(founding: GroupSpec, ranks: Sequence[int]) -> RendezvousError:
    who, name = listing([founding.who(r) for r in ranks]), founding.name
    message = f"{who} did not join the group {name!r} in time"
    return RendezvousError(message, rank=ranks[0] if ranks else None, group=name)


def _who(members: Sequence[int], rank: int) -> str:
    same = members[rank] == rank
    return f"rank {rank}" if same else f"rank {rank} (global rank {members[rank]})"


def _written(error: BaseException, founding: GroupSpec) -> bytes:
    """Return why a rank gives up, as the others will read it."""
    name, rank = founding.name, founding.rank
    if not isinstance(error, DistError):
        kind, words = type(error).__name__, error_wire.in_words(error)
        what = f"{kind}: {words}" if words else kind
        error = Aborted(f"rank {rank} gave up while the group {name!r} formed: {what}", rank=rank)
    return error_wire.written(error, group=name)


def reach(founding: GroupSpec, areas: GroupMemory, board: KeyValueBoard) -> RemoteGroup | None:
    """Connect a group to its ranks on other hosts, if it has any; blocks until all have."""
    host, name, members = founding.host, founding.name, founding.members
    hosts = host.topology.restricted(members)
    if len(hosts.hosts) == 1:
        return None
    rank, away = areas.number, hosts.away(areas.number)
    assert host.abroad is not None, "there are several hosts"
    place = wiring.MeetingPoint(board, host.abroad.address, name, rank)
    wires = wiring.connect(place, away, PURPOSES, founding.deadline, founding.check)
    return RemoteGroup(host, wires, hosts)
