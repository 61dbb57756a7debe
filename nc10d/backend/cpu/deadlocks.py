"""Finding out that ranks of a host wait for each other in a circle, while they do.

A thread that has waited for a slice shows on its rank's noticeboard what it needs, if it is the
only one that could make a call. Whoever shows something looks at the others' boards. A circle is
certain (circles.py); its finder tells the others in it, and each fails the group in which it waits,
with the same words.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import weakref
from collections.abc import Iterator
from threading import get_ident
from typing import TYPE_CHECKING

from nc10d.backend.cpu import circles
from nc10d.backend.cpu.channel import Channel, Submission
from nc10d.backend.cpu.circles import Need, Standing, State
from nc10d.backend.cpu.native import engine
from nc10d.backend.cpu.native import layout as at
from nc10d.backend.cpu.noticeboard import Noticeboard
from nc10d.backend.cpu.sites import called, here

if TYPE_CHECKING:
    from nc10d.backend.cpu.backend import CpuBackend
    from nc10d.backend.cpu.host import Host
    from nc10d.backend.cpu.waits import Waits

# Threads of nc10d that never make a call, by how their names begin.
OURS = tuple(f"nc10d-{name}" for name in ("worker", "control", "net", "store", "cache", "watch"))


class Deadlocks:
    """What one rank of a host shows, and finds out."""

    def __init__(self, host: Host) -> None:
        self._host: Host = weakref.proxy(host)  # whose part this is: no circle here
        self._boards = [Noticeboard(mate.mapping) for mate in host.mates]
        self._mine = self._boards[host.rank]
        self._shown: Standing | None = None
        self._owner = 0

    def stuck(self, backend: Waits, channel: Channel, submission: Submission | None) -> str | None:
        """Show that this thread waits in a channel for good; return why it never ends, if so.

        What it waits for is a submission, or the program that it runs itself there.
        """
        mine = self._owner == get_ident()
        verdict = self._mine.verdict() if mine or not self._owner else None
        if mine and verdict is not None:
            return verdict
        standing = self._standing(backend, channel) if self._alone() else None
        # What a channel is in now is this thread's affair only if that is not over.
        if standing is None or (submission is not None and submission.finished()):
            self.over()
            return None
        if standing != self._shown:
            self._owner = get_ident()
            self._mine.show(standing)
            self._shown = standing
        return self._look()

    def over(self) -> None:
        """Take away what this thread has shown, if it has: its wait has ended."""
        if self._owner == get_ident():
            self._owner, self._shown = 0, None
            self._mine.show(None)

    def _look(self) -> str | None:
        seen = {rank: board.read() for rank, board in enumerate(self._boards)}
        standings = {rank: one for rank, (_, one) in seen.items() if one is not None}
        ranks = circles.circle(self._host.rank, standings)
        if not ranks:
            return None
        numbers = {rank: self._host.mates[rank].number for rank in ranks}
        words = {numbers[rank]: standings[rank].words for rank in ranks}
        verdict = circles.told([numbers[rank] for rank in ranks], words)
        for rank in ranks:
            if rank != self._host.rank:
                self._boards[rank].tell(seen[rank][0], verdict)
        return verdict

    def _alone(self) -> bool:
        """Say whether no other thread of this process could make a call while this one waits."""
        if self._host.notifies() or self._owner not in (0, get_ident()):
            return False
        ours = {one.ident for one in threading.enumerate() if one.name.startswith(OURS)}
        ours.add(get_ident())
        return all(
            ident in ours or _idles(frame.f_code.co_filename, frame.f_code.co_name)
            for ident, frame in sys._current_frames().items()
        )

    def _standing(self, backend: Waits, channel: Channel) -> Standing | None:
        needs = tuple(_needs(backend, channel))
        if not needs:
            return None
        states = tuple(state for group in self._host.live_groups() for state in _states(group))
        return Standing(_words(self._host.number, backend, channel), needs, states)


def _idles(file: str, function: str) -> bool:
    """Say whether a thread, by its innermost frame, is a pool's that waits for work."""
    return function == "_worker" and file.endswith("concurrent/futures/thread.py")


def _key(group: str, link: tuple[int, int] | None = None) -> int:
    digest = hashlib.blake2b(f"{group}\0{link}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _link_key(backend: Waits, channel: Channel) -> int:
    peer = backend.links.peer_of(channel)
    assert peer is not None, "every channel of the links is an end of one"
    sending = channel.shared.kind == at.SENDER
    return _key(backend.group_name, (backend.rank, peer) if sending else (peer, backend.rank))


def _needs(backend: Waits, channel: Channel) -> Iterator[Need]:
    """Yield what must happen before the wait in a channel can end."""
    areas = backend.areas
    if channel.shared.streams:  # of other hosts nothing is known
        return
    if channel.shared.kind == at.COLLECTIVE:
        number = channel.get(at.C_OPS)
        for mate in range(areas.size):
            if areas.last_record(mate)[0] < number:
                yield Need(_key(backend.group_name), number, -1, areas.members[mate])
        return
    peer = backend.links.peer_of(channel)
    counter = channel.shared.counters[channel.shared.kind == at.SENDER]
    seen = int(engine.load_word(counter))
    blocked = channel.get(at.C_BLOCKED_AT) == counter and seen < channel.get(at.C_BLOCKED_FOR)
    if blocked and peer in areas.numbers:
        mate = areas.members[areas.numbers.index(peer)]
        yield Need(_link_key(backend, channel), 0, seen, mate)


def _states(backend: CpuBackend) -> Iterator[State]:
    """Yield how far this rank is in a group and on its links."""
    channel = backend.channel
    yield State(_key(backend.group_name), channel.get(at.C_OPS), channel.busy())
    for link in backend.links.channels():
        counter = engine.load_word(link.get(at.C_SELF))
        yield State(_link_key(backend, link), int(counter), link.busy())


def _words(number: int, backend: Waits, channel: Channel) -> str:
    group = f"of group {backend.group_name!r}"
    if channel.shared.kind == at.COLLECTIVE:
        seq, rank = channel.get(at.C_OPS), backend.areas.rank
        what = called(backend.areas.record(rank, seq) or "a call", backend.areas.site(rank, seq))
        return f"rank {number} waits in #{seq} {group}, {what}"
    name = "send" if channel.shared.kind == at.SENDER else "recv"
    what = called(f"{name} #{channel.get(at.C_OPS) + 1} {group}", here())
    return f"rank {number} waits in {what}"
