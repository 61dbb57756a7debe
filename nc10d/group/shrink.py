"""Go on with the ranks that are left: they agree on who that is, and make a group of them.

Each survivor tells the others that it is there. When all have who are not known to be dead, or the
time is up, it proposes who goes on; one list is decided (backend/cpu/control/group_control.py). A
rank that is
not on it (it was stopped, and woke up) can't disturb the others: the new group has memory,
connections and messages of its own. If a member dies or stops meanwhile, the group is made on none
of them, and they agree anew. All of that goes over the job's control lines: nothing is asked of the
store, whose host may be dead, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Protocol

from nc10d.arrays.arguments import integer
from nc10d.backend.base import Shrinkable
from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.errors import Aborted, DistError, PeerLost, RendezvousError
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import current_world, group_or_default, prefix_store

PATIENCE = 5.0
"""Seconds that survivors wait for a rank that lives and does not say that it goes on.

So long, at least, they also wait for the members on their list to make the group: that takes time
even where nobody is waited for.
"""
_SLICE, _MOMENT = 0.02, 2.0


class SurvivorControl(Protocol):
    """How the ranks of the old group tell each other, and decide."""

    members: list[int]
    rank: int

    def set(self, key: str, value: str, /) -> None:
        """Tell everyone."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Say whether all of these have been told."""

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """Return what was told."""

    def decided(self, topic: str, /) -> str | None:
        """Return what has been decided, if anything."""

    def decide(self, topic: str, value: str, /) -> str:
        """Propose, and return what was decided; blocks until then."""

    def until(self, ready: Callable[[], bool], timeout: float, /) -> bool:
        """Block until something is ready, at most so many seconds; say whether it is."""


def shrink_group(
    ranks_to_exclude: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    timeout: Timeout = PATIENCE,
) -> ProcessGroup:
    """Make a group of the ranks of `group` that are left, and close `group`; they all call.

    Ranks that have died or left go without saying; `ranks_to_exclude` (of `group`) are left out
    though they live, and don't call. So are those that have not called within `timeout` (seconds
    or timedelta) of this rank, and who calls and then stops for longer (5 s at least) while the
    group is made. Ranks keep their order and are numbered anew from 0. The default group's
    successor is the default group, and its ranks are the global ranks from then on; other groups
    that were made before keep the numbers of their time.

    Blocks until all survivors have come. Aborted on a rank that the others have gone on without;
    RendezvousError if ranks that live can't make a group; TypeError for a backend that can't do
    this; ValueError for a rank that excludes itself or is
    not one of `group`.
    """
    old = group_or_default(group)
    if not isinstance(old, ProcessGroup):
        raise ValueError("shrink_group: this rank is not in the group")
    old.refuse_in_batch("shrink_group")
    backend = _lookout(old)
    excluded = _excluded(old, ranks_to_exclude)
    new = _made(old, backend.control, lambda: backend.gone() | excluded, seconds(timeout))
    world = current_world()
    default = old is world.default
    world.keep(new)
    world.forget(old)
    if default:
        world.default = new
    return new


def _lookout(group: ProcessGroup) -> Shrinkable:
    """Return the backend that learns of deaths, and on whose lines survivors agree."""
    place = group.config.lookout
    backend = group.backend(place) if place in group.config.places else None
    shrinkable = None if backend is None else backend.shrinkable
    if shrinkable is None:
        raise TypeError(f"the backend {group.backend_name!r} of {group!r} can't shrink a group")
    return shrinkable


def _excluded(group: ProcessGroup, ranks: Sequence[int] | None) -> set[int]:
    excluded = {integer("shrink_group", "a rank", rank) for rank in ranks or ()}
    unknown = sorted(rank for rank in excluded if not 0 <= rank < group.size)
    if unknown:
        raise ValueError(f"shrink_group: {group!r} has no rank {unknown[0]}")
    if group.rank in excluded:
        raise ValueError(f"shrink_group: rank {group.rank} can't exclude itself, only be excluded")
    return excluded


def _made(
    old: ProcessGroup, council: SurvivorControl, gone: Callable[[], set[int]], patience: float
) -> ProcessGroup:
    """Try until a group is made; each further attempt has lost one more rank."""
    failure: DistError | None = None
    lost: set[int] = set()

    def missing() -> set[int]:
        return gone() | lost

    for number in range(1, old.size + 1):
        attempt = ShrinkAttempt(council, number, missing)
        try:
            return _attempt(old, attempt, patience)
        except (PeerLost, RendezvousError) as error:
            failure = error
            lost |= attempt.lost
    message = f"those who are left of group {old.name!r} could not make another: {failure}"
    raise RendezvousError(message, group=old.name) from failure


class ShrinkAttempt:
    """One attempt of the survivors, as one of them takes part in it."""

    def __init__(self, council: SurvivorControl, number: int, gone: Callable[[], set[int]]) -> None:
        """`gone` says who is known not to come, and may learn of more."""
        self.number = number
        self.lost: set[int] = set()
        self._council, self._gone = council, gone
        self._ranks = range(len(council.members))

    def agree(self, until: Deadline) -> list[int]:
        """Return who goes on, the same list on every rank that asks; blocks until that is known.

        Whoever has called by `until` is waited for no longer than that.
        """
        topic = f"members/{self.number}"
        self._council.set(self._here(self._council.rank), "")
        while not self._council.until(lambda: self._settled(topic), until.slice(_SLICE)):
            if until.expired():
                break
        members = [r for r in self._ranks if self._has_come(r) and r not in self._gone()]
        listed: list[int] = json.loads(self._decide(topic, members, members))["what"]
        return listed

    def confirm(self, members: Sequence[int], made: bool, until: Deadline) -> bool:
        """Say whether all members have `made` the group; the same answer on all who ask.

        Between hosts one may have all its connections when another can't get the last of its own.
        Who went on then would never meet the others again. Blocks until all have asked, one has
        failed, or a member has not asked by `until`. `lost` has, on all, who was to blame: another
        attempt need not wait until everyone has heard of a death.
        """
        topic = f"outcome/{self.number}"
        votes = [self._vote(rank) for rank in members]
        mine = None if made else sorted(self._gone().intersection(members))
        self._council.set(self._vote(self._council.rank), json.dumps(mine))
        while made and not self._council.until(
            lambda: self._council.check(votes) or self._council.decided(topic) is not None,
            until.slice(_SLICE),
        ):
            if until.expired() or self._gone().intersection(members):
                break
        whole = all(vote is None for vote in self._votes(members).values())
        lost = None if whole else self._to_blame(members, until)
        outcome = json.loads(self._decide(topic, members, lost))["what"]
        self.lost.update(outcome or ())
        return outcome is None

    def _votes(self, members: Sequence[int]) -> dict[int, list[int] | None]:
        """Return whom each member blames; None if it has made the group, [] if it has not said."""
        keys = {rank: self._vote(rank) for rank in members}
        there = {rank: key for rank, key in keys.items() if self._council.check([key])}
        votes = map(json.loads, self._council.multi_get([*there.values()]))
        return {rank: [] for rank in members} | dict(zip(there, votes, strict=True))

    def _to_blame(self, members: Sequence[int], until: Deadline) -> list[int]:
        """Return the members that have gone, as anybody says, and who has not asked in time."""
        late = until.expired()
        if late:  # so it is for the others, a little earlier or later
            self._council.until(lambda: self._council.check([*map(self._vote, members)]), _MOMENT)
        silent = {r for r in members if late and not self._council.check([self._vote(r)])}
        gone = self._gone().intersection(members)
        return sorted(
            gone.union(silent, *(blamed or () for blamed in self._votes(members).values()))
        )

    def _decide(self, topic: str, members: Sequence[int], what: object) -> str:
        """Have everyone decide; who is not among `members` may be silent."""
        without = [rank for rank in self._ranks if rank not in members]
        return self._council.decide(topic, json.dumps({"what": what, "without": without}))

    def _settled(self, topic: str) -> bool:
        """Say whether there is nobody left to wait for."""
        if self._council.decided(topic) is not None:
            return True
        return all(self._has_come(rank) for rank in self._ranks if rank not in self._gone())

    def _here(self, rank: int) -> str:
        return f"here/{self.number}/{rank}"

    def _vote(self, rank: int) -> str:
        return f"made/{self.number}/{rank}"

    def _has_come(self, rank: int) -> bool:
        return self._council.check([self._here(rank)])


def _attempt(old: ProcessGroup, attempt: ShrinkAttempt, patience: float) -> ProcessGroup:
    """Agree and form; PeerLost or RendezvousError on all members if one of them has not."""
    name = f"{old.name}/shrunk{attempt.number}"
    members = attempt.agree(Deadline.after(patience))
    if old.rank not in members:
        raise Aborted(
            f"the other ranks of group {old.name!r} have gone on without rank {old.rank}: "
            f"they are {members}",
            rank=old.rank,
            group=old.name,
        )
    # Who had to be waited for has used up that deadline: forming has one of its own.
    until = Deadline.after(max(patience, PATIENCE))
    try:
        new = old.successor(name, members, prefix_store(name, old.store), until)
    except BaseException:
        attempt.confirm(members, False, until)
        raise
    try:
        made = attempt.confirm(members, True, until)
    except BaseException:
        new.close()
        raise
    if not made:
        new.close()
        raise RendezvousError(f"not all of {members} have made the group {name!r}", group=name)
    return new
