"""The wait graph: waiting ranks' notices, and the search for a cycle in them. No I/O.

A rank that has waited for long publishes a wait notice: its needs, and its progress in everything
that other ranks could need. The notice stays true while the rank's only thread is in that wait: the
rank can make no other call meanwhile. There are two kinds of needs:

- A rank in a group's collective n needs every member to have entered collective n.
- A rank that sends or receives a message needs the counter at the link's other end to change.

A cycle of needs, none of which the next rank has met, is a deadlock, however slow the machine is
and however old the notices are. Proof: suppose that a rank in the cycle has left its wait. Let A be
the first such rank, and B the next rank in the cycle. B had met A's need by then. But B had not met
that need when B published its notice, and B has been waiting ever since: a contradiction. The proof
requires counts that only grow. A group's counts end with the group, so a rank that has left a group
counts as having met all needs there.

All waits in a cycle have the same timeout. Otherwise the shortest wait would end first, and fail
one group while the others go on: a rank may probe its peers by such a wait.

Between hosts a notice is a probe that follows the needs (Chandy, Misra and Haas 1983, "Distributed
deadlock detection"): a waiting rank forwards the notices from the ranks that wait for this rank.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nc10d.base.text import RETURNED

_HEAD = struct.Struct("<3Hd")
_NEED = struct.Struct("<5q")
_STATE = struct.Struct("<3q")
NO_TIMEOUT = -1.0
MOST_DESCRIBED = 8
"""Most ranks in a cycle that an error describes: an error that all ranks share is cut at 1,920
bytes, and a control message beyond 64 KiB ends its connection."""


@dataclass(frozen=True, slots=True)
class Need:
    """A waiting rank's need: progress by `rank` (a number in the job) in `key`.

    For a collective, `seen` is -1 and `key` is the group: the need is met when `rank` has entered
    call number `until`. For a message, `key` is the link: the need is met when the counter at the
    other end differs from `seen`. `group` is the key of the group in both cases.
    """

    key: int
    until: int
    seen: int
    rank: int
    group: int


@dataclass(frozen=True, slots=True)
class ProgressState:
    """A rank's progress: the number of the latest call in a group, or the counter on a link.

    A `busy` group or link may progress without a further call, since an operation is in flight.
    """

    key: int
    count: int
    busy: bool


@dataclass(frozen=True, slots=True)
class WaitNotice:
    """A waiting rank: a description for errors, its needs, and its progress everywhere.

    `timeout` is the operation's in seconds; NO_TIMEOUT for a rank that makes no call.
    """

    text: str
    needs: tuple[Need, ...]
    states: tuple[ProgressState, ...]
    timeout: float = NO_TIMEOUT

    def waits_as_long_as(self, other: WaitNotice) -> bool:
        """Return whether two waits' timeouts are the same, or a rank makes no call."""
        return self.timeout == other.timeout or NO_TIMEOUT in (self.timeout, other.timeout)

    def meets(self, need: Need) -> bool:
        """Return whether this rank has met, or may yet meet, another rank's need."""
        states = {state.key: state for state in self.states}
        if need.group not in states:  # this rank has left that group, or not joined yet
            return True
        state = states.get(need.key)
        if state is None:  # a link that this rank has never used
            return need.seen != 0
        if state.busy:
            return True
        return state.count >= need.until if need.seen < 0 else state.count != need.seen

    def packed(self, most: int) -> bytes | None:
        """Return this notice as bytes; None if they are more than `most`."""
        words = self.text.encode(errors="replace")
        rows = [_NEED.pack(n.key, n.until, n.seen, n.rank, n.group) for n in self.needs]
        rows += [_STATE.pack(s.key, s.count, s.busy) for s in self.states]
        head = _HEAD.pack(len(words), len(self.needs), len(self.states), self.timeout)
        raw = head + words + b"".join(rows)
        return raw if len(raw) <= most else None

    @classmethod
    def unpacked(cls, raw: bytes) -> WaitNotice:
        """Return the notice that was packed into `raw`."""
        length, needs, states, timeout = _HEAD.unpack_from(raw)
        first = _HEAD.size + length
        second = first + needs * _NEED.size
        rows = _STATE.iter_unpack(raw[second : second + states * _STATE.size])
        return cls(
            raw[_HEAD.size : first].decode(errors="replace"),
            tuple(Need(*row) for row in _NEED.iter_unpack(raw[first:second])),
            tuple(ProgressState(key, count, bool(busy)) for key, count, busy in rows),
            timeout,
        )


def find_cycle(start: int, notices: Mapping[int, WaitNotice]) -> list[int]:
    """Return the ranks of a cycle through `start`, each needing the next; [] if there are none."""
    previous: dict[int, int] = {}
    todo = [start]
    while todo:
        rank = todo.pop()
        for other in _needed(rank, notices):
            if other == start:
                path = [rank]
                while path[-1] != start:
                    path.append(previous[path[-1]])
                return path[::-1]
            if other not in previous:
                previous[other] = rank
                todo.append(other)
    return []


def waiting_for(target: int, notices: Mapping[int, WaitNotice]) -> set[int]:
    """Return the ranks that wait for `target`, directly or through others, and `target`."""
    found = {target}
    while more := {r for r in notices.keys() - found if found & _needed(r, notices)}:
        found |= more
    return found


def _needed(rank: int, notices: Mapping[int, WaitNotice]) -> set[int]:
    """Return the ranks that are known to leave a need of `rank` unmet for as long as it waits."""
    mine = notices[rank]
    known = ((need, notices[need.rank]) for need in mine.needs if need.rank in notices)
    return {
        need.rank for need, other in known if mine.waits_as_long_as(other) and not other.meets(need)
    }


def describe_cycle(ranks: Sequence[int], words: Mapping[int, str]) -> str:
    """Return the text for a deadlock error: each rank, its call, and the awaited rank.

    The text begins with the lowest rank, so every finder of the same cycle returns the same text.
    """
    first = ranks.index(min(ranks))
    turned = [*ranks[first:], *ranks[:first]]
    pairs = zip(turned, [*turned[1:], turned[0]], strict=True)
    links = [
        words[rank] if RETURNED in words[rank] else f"{words[rank]}, for rank {other}"
        for rank, other in pairs
    ]
    if len(links) > MOST_DESCRIBED:
        links[MOST_DESCRIBED:] = [f"and so on, by {len(links) - MOST_DESCRIBED} more ranks"]
    if any(RETURNED in link for link in links):
        return f"a rank waits for a rank that makes no call any more: {'; '.join(links)}"
    return (
        f"ranks wait for each other in a circle (ranks of the job): {'; '.join(links)}. Make calls "
        "of several groups, and messages, in one order on all ranks"
    )
