"""Shrink a group to the surviving ranks, which agree on the next group's members.

1. Each survivor announces itself. It waits until all other ranks have announced themselves or are
   known to be dead, or until the time is up.
2. Each survivor proposes members for the next group; consensus decides on a single list
   (backend/cpu/control/group_control.py).
3. The members form the group, and confirm that all have done so. If a member dies or stops
   meanwhile, no member keeps the group, and the survivors start again.

A rank that is not on the list (it was stopped and goes on later) cannot disturb the members: the
new group has separate memory, connections and messages. All messages go over the job's control
connections. The store is not used, because its host may be dead, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Protocol

from nc10d.arrays.arguments import integer
from nc10d.backend.abilities import Shrinkable
from nc10d.backend.protocol import Backend
from nc10d.base.deadline import Deadline, Timeout, seconds
from nc10d.base.signal_errors import raised_here
from nc10d.base.stored import distinct, read_json
from nc10d.errors import Aborted, DistError, PeerLost, RendezvousError
from nc10d.group.process_group import ProcessGroup, prefix_store
from nc10d.group.world import current_world, group_or_default

PATIENCE = 5.0
"""Seconds that survivors wait for a live rank that does not call.

Survivors also give the members at least this time to form the group.
"""
_POLL_SECONDS, _GRACE_SECONDS = 0.02, 2.0


class SurvivorControl(Protocol):
    """The old group's control: keys that all members see, and decisions."""

    members: list[int]
    rank: int

    def set(self, key: str, value: str, /) -> None:
        """Publish a value to all members."""

    def check(self, keys: Sequence[str], /) -> bool:
        """Return whether all these keys have been published."""

    def multi_get(self, keys: Sequence[str], /) -> list[bytes]:
        """Return the keys' published values."""

    def decided(self, topic: str, /) -> str | None:
        """Return the decision on a topic, or None."""

    def decide(self, topic: str, value: str, /) -> str:
        """Propose a value and return the decision; blocks until the decision is made."""

    def until(self, ready: Callable[[], bool], timeout: float, /) -> bool:
        """Block until `ready()`, at most `timeout` seconds; return whether that is so."""


def shrink_group(
    ranks_to_exclude: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    timeout: Timeout = PATIENCE,
) -> ProcessGroup:
    """Make a group from the surviving ranks of `group`, and close `group`; every survivor calls.

    Dead and departed ranks are left out. So are `ranks_to_exclude` (of `group`), which live but
    don't call. So are ranks that do not call within `timeout` (seconds or timedelta) of this rank,
    and ranks that stop for longer (5 s at least) while the group forms. Ranks keep their order and
    are numbered from 0. The successor of the default group becomes the default group, and its
    ranks are the global ranks from then on. Older groups keep their old numbers.

    Blocks until all survivors have come. Aborted on a rank that the survivors have left out;
    RendezvousError if live ranks can't make a group; TypeError for a backend that can't shrink;
    ValueError for a rank that excludes itself or is not in `group`.
    """
    old = group_or_default(group)
    if not isinstance(old, ProcessGroup):
        raise ValueError("shrink_group: this rank is not in the group")
    old.refuse_in_batch("shrink_group")
    backend = _shrinkable(old)
    excluded = _excluded(old, ranks_to_exclude)
    new = _shrink(old, backend.control, lambda: backend.gone() | excluded, seconds(timeout))
    world = current_world()
    default = old is world.default
    world.keep(new)
    world.forget(old)
    if default:
        world.default = new
    return new


def _shrinkable(group: ProcessGroup) -> Shrinkable[Backend]:
    """Return the backend that detects failures, and over whose connections survivors agree."""
    place = group.config.failure_detector
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


def _shrink(
    old: ProcessGroup, control: SurvivorControl, gone: Callable[[], set[int]], patience: float
) -> ProcessGroup:
    """Try until a group is made; each further attempt has fewer ranks."""
    failure: DistError | None = None
    lost: set[int] = set()

    def missing() -> set[int]:
        return gone() | lost

    for number in range(1, old.size + 1):
        attempt = ShrinkAttempt(control, number, missing)
        try:
            return _attempt(old, attempt, patience)
        except raised_here(PeerLost, RendezvousError) as error:
            failure = error
            lost |= attempt.lost
    message = f"the survivors of group {old.name!r} could not make another: {failure}"
    raise RendezvousError(message, group=old.name) from failure


class ShrinkAttempt:
    """A rank's part in the survivors' attempt; `lost` has the ranks that caused a failure."""

    def __init__(self, control: SurvivorControl, number: int, gone: Callable[[], set[int]]) -> None:
        """`gone` returns the ranks that are known not to come; their number may grow."""
        self.number = number
        self.lost: set[int] = set()
        self._control, self._gone = control, gone
        self._size = len(control.members)
        self._ranks = range(self._size)

    def agree(self, until: Deadline) -> list[int]:
        """Return the next group's members, alike on all ranks; waits for silent ones to `until`."""
        topic = f"members/{self.number}"
        self._control.set(self._arrival_key(self._control.rank), "")
        while not self._control.until(lambda: self._all_called(topic), until.slice(_POLL_SECONDS)):
            if until.expired():
                break
        members = [r for r in self._ranks if self._has_called(r) and r not in self._gone()]
        decision = self._decide(topic, members, members)
        return read_json(topic, decision, lambda text: distinct(text["what"], self._size))

    def confirm(self, members: Sequence[int], made: bool, until: Deadline) -> bool:
        """Return whether all members have `made` the group; all members get the same answer."""
        # Between hosts, a rank may have all its connections while another rank can't complete its
        # own. If the first rank went on alone, the wait would never end. Blocks until all members
        # have voted, a member has failed, or a member has not voted by `until`. On every member
        # `lost` then has the ranks at fault, so that the next attempt need not wait for them.
        topic = f"outcome/{self.number}"
        votes = [self._vote_key(rank) for rank in members]
        blamed = None if made else sorted(self._gone().intersection(members))
        self._control.set(self._vote_key(self._control.rank), json.dumps(blamed))
        while made and not self._control.until(
            lambda: self._control.check(votes) or self._control.decided(topic) is not None,
            until.slice(_POLL_SECONDS),
        ):
            if until.expired() or self._gone().intersection(members):
                break
        complete = all(vote is None for vote in self._votes(members).values())
        lost = None if complete else self._at_fault(members, until)
        decision = self._decide(topic, members, lost)
        outcome = read_json(topic, decision, lambda text: self._blamed(text["what"]))
        self.lost.update(outcome or ())
        return outcome is None

    def _votes(self, members: Sequence[int]) -> dict[int, list[int] | None]:
        """Return each member's vote: None if it has made the group, else the ranks it blames."""
        # A member that has not voted blames no rank.
        keys = {rank: self._vote_key(rank) for rank in members}
        voted = {rank: key for rank, key in keys.items() if self._control.check([key])}
        texts = zip(voted.values(), self._control.multi_get([*voted.values()]), strict=True)
        votes = [read_json(key, text, self._blamed) for key, text in texts]
        return {rank: [] for rank in members} | dict(zip(voted, votes, strict=True))

    def _blamed(self, value: object) -> list[int] | None:
        return None if value is None else distinct(value, self._size)

    def _at_fault(self, members: Sequence[int], until: Deadline) -> list[int]:
        """Return the members that any vote or this rank blames, and those that did not vote."""
        late = until.expired()
        if late:  # the deadlines of other members end a little earlier or later
            votes = [*map(self._vote_key, members)]
            self._control.until(lambda: self._control.check(votes), _GRACE_SECONDS)
        silent = {r for r in members if late and not self._control.check([self._vote_key(r)])}
        gone = self._gone().intersection(members)
        blamed = (ranks or () for ranks in self._votes(members).values())
        return sorted(gone.union(silent, *blamed))

    def _decide(self, topic: str, members: Sequence[int], value: object) -> bytes:
        """Propose `value` and return the decision; ranks outside `members` may be silent."""
        without = [rank for rank in self._ranks if rank not in members]
        proposal = json.dumps({"what": value, "without": without})
        return self._control.decide(topic, proposal).encode(errors="replace")

    def _all_called(self, topic: str) -> bool:
        """Return whether no rank is left to wait for."""
        if self._control.decided(topic) is not None:
            return True
        return all(self._has_called(rank) for rank in self._ranks if rank not in self._gone())

    def _arrival_key(self, rank: int) -> str:
        return f"here/{self.number}/{rank}"

    def _vote_key(self, rank: int) -> str:
        return f"made/{self.number}/{rank}"

    def _has_called(self, rank: int) -> bool:
        return self._control.check([self._arrival_key(rank)])


def _attempt(old: ProcessGroup, attempt: ShrinkAttempt, patience: float) -> ProcessGroup:
    """Agree on members and form the group; PeerLost or RendezvousError if a member fails."""
    name = f"{old.name}/shrunk{attempt.number}"
    members = attempt.agree(Deadline.after(patience))
    if old.rank not in members:
        raise Aborted(
            f"the other ranks of group {old.name!r} have gone on without rank {old.rank}: "
            f"they are {members}",
            rank=old.rank,
            group=old.name,
        )
    # Waiting for silent ranks may have used up the deadline: forming the group has its own.
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
