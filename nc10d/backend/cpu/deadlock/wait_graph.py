"""Ranks that wait for each other in a circle: who needs what of whom. Pure.

A rank that has waited long shows what it needs, and how far it is with everything that others
could need of it. What it shows holds while its one thread is in that wait: calls that it has not
made it can't make. So a circle of needs, each of which the next rank can't meet while it waits, is
broken by nobody, and whoever finds one may say so, however slow the machine is. That what it goes
by was shown at different times, and has been on its way, does not matter: if somebody of the circle
had left its wait since, take the first who did; the next rank had met its need by then, but had not
when it showed what it did, and was waiting ever since. That takes counts that only grow: those of a
group end with it, so who has left a group has met whatever was needed of it there.

Two kinds of needs. A collective ends for nobody before all have entered it, so a rank in number n
of a group needs everybody to have entered that. A message needs the counter of the other end of its
link to change.

Over distances, what a rank shows is a probe that follows the needs (Chandy, Misra and Haas 1983,
"Distributed deadlock detection"): a rank that waits passes on what has led to it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_HEAD = struct.Struct("<3H")
_NEED = struct.Struct("<5q")
_STATE = struct.Struct("<3q")
MOST_TOLD = 8
"""How many ranks of a circle are told of: what all ranks keep of an error is cut at 1,920 bytes,
and a control line takes no message of more than 64 KiB."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a waiting rank needs of `rank` (a number in the job): that `key` gets on.

    A collective has `seen` -1 and is met when the group `key` has entered call number `until`; a
    message when the counter of the link `key` is no more what this rank has `seen`. `group` is the
    key of the group of either.
    """

    key: int
    until: int
    seen: int
    rank: int
    group: int


@dataclass(frozen=True, slots=True)
class ProgressState:
    """How far a rank is: the number of its latest call in a group, or its counter on a link.

    `busy`: it may get on by itself, since something is under way.
    """

    key: int
    count: int
    busy: bool


@dataclass(frozen=True, slots=True)
class WaitNotice:
    """What a rank shows while it waits: in words, its needs, and how far it is everywhere."""

    words: str
    needs: tuple[Need, ...]
    states: tuple[ProgressState, ...]

    def meets(self, need: Need) -> bool:
        """Say whether this rank has met, or may yet meet, what another one needs of it."""
        states = {state.key: state for state in self.states}
        if need.group not in states:  # it has left that group since, or is not in it yet
            return True
        state = states.get(need.key)
        if state is None:  # a link that it has never used
            return need.seen != 0
        if state.busy:
            return True
        return state.count >= need.until if need.seen < 0 else state.count != need.seen

    def packed(self, most: int) -> bytes | None:
        """Return this as bytes, None if that is more than `most`."""
        words = self.words.encode(errors="replace")
        rows = [_NEED.pack(n.key, n.until, n.seen, n.rank, n.group) for n in self.needs]
        rows += [_STATE.pack(s.key, s.count, s.busy) for s in self.states]
        raw = _HEAD.pack(len(words), len(self.needs), len(self.states)) + words + b"".join(rows)
        return raw if len(raw) <= most else None

    @classmethod
    def unpacked(cls, raw: bytes) -> WaitNotice:
        """Return what was packed."""
        length, needs, states = _HEAD.unpack_from(raw)
        first = _HEAD.size + length
        second = first + needs * _NEED.size
        return cls(
            raw[_HEAD.size : first].decode(errors="replace"),
            tuple(Need(*row) for row in _NEED.iter_unpack(raw[first:second])),
            tuple(
                ProgressState(key, count, bool(busy))
                for key, count, busy in _STATE.iter_unpack(
                    raw[second : second + states * _STATE.size]
                )
            ),
        )


def circle(start: int, standings: Mapping[int, WaitNotice]) -> list[int]:
    """Return the ranks of a circle through `start`, each of which needs the next; [] if none is."""
    came: dict[int, int] = {}
    todo = [start]
    while todo:
        rank = todo.pop()
        for other in _needed(rank, standings):
            if other == start:
                return _way(start, rank, came)
            if other not in came:
                came[other] = rank
                todo.append(other)
    return []


def leading(to: int, standings: Mapping[int, WaitNotice]) -> set[int]:
    """Return the ranks whose needs lead to a rank in the end, and that rank."""
    found = {to}
    while more := {r for r in standings.keys() - found if found & _needed(r, standings)}:
        found |= more
    return found


def _needed(rank: int, standings: Mapping[int, WaitNotice]) -> set[int]:
    """Return the ranks that are known not to meet what a rank needs of them."""
    needs = (need for need in standings[rank].needs if need.rank in standings)
    return {need.rank for need in needs if not standings[need.rank].meets(need)}


def _way(start: int, rank: int, came: Mapping[int, int]) -> list[int]:
    way = [rank]
    while way[-1] != start:
        way.append(came[way[-1]])
    return way[::-1]


def told(ranks: Sequence[int], words: Mapping[int, str]) -> str:
    """Say who waits in which call for whom, beginning with the lowest rank."""
    first = ranks.index(min(ranks))
    turned = [*ranks[first:], *ranks[:first]]
    pairs = zip(turned, [*turned[1:], turned[0]], strict=True)
    links = [f"{words[rank]}, for rank {other}" for rank, other in pairs]
    if len(links) > MOST_TOLD:
        links[MOST_TOLD:] = [f"and so on, by {len(links) - MOST_TOLD} more ranks"]
    return (
        f"ranks wait for each other in a circle (ranks of the job): {'; '.join(links)}. Make calls "
        "of several groups, and messages, in one order on all ranks"
    )
