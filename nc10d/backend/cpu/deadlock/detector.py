"""Finding out that ranks wait for each other in a circle, while they do.

A thread that has waited for a slice shows on its rank's noticeboard what it needs, if it is the
only one that could make a call. Whoever shows something looks at the boards of its host, and at
what has come from other hosts (notices.py). A circle is certain (circles.py); its finder tells the
others in it, and each fails the group in which it waits, with the same words. That goes over the
control lines, so that they know it before they can see the finder's end.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import weakref
from collections.abc import Iterator
from threading import get_ident
from types import FrameType

from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.control.connections import Message
from nc10d.backend.cpu.deadlock import wait_graph
from nc10d.backend.cpu.deadlock.notices import NoticeExchange, NoticeSlot
from nc10d.backend.cpu.deadlock.wait_graph import Need, ProgressState, WaitNotice
from nc10d.backend.cpu.engine.call_sites import called, here
from nc10d.backend.cpu.engine.channel import Channel, Submission
from nc10d.backend.cpu.failure import cause
from nc10d.backend.cpu.failure.health import Health
from nc10d.backend.cpu.membership.group import Group
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at

# Threads of nc10d that never make a call, by how their names begin.
OURS = tuple(f"nc10d-{name}" for name in ("worker", "control", "net", "store", "cache", "watch"))


class DeadlockDetector:
    """What one rank of the job shows, and finds out."""

    def __init__(self, context: Context) -> None:
        # Not kept alive by this: memory is unmapped as soon as the last user drops it.
        self._context: Context = weakref.proxy(context)
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._slots = {peer.number: NoticeSlot(peer.mapping) for peer in context.peers}
        self._mine = self._slots[context.number]
        self._shown: WaitNotice | None = None
        self._owner = 0
        self._where: tuple[Health, Channel] | None = None
        self._exchange = NoticeExchange()

    def join(self, group: Group) -> None:
        """Count the progress of a group from now on, as long as it lives."""
        self._groups.add(group)

    def stuck(self, group: Group, channel: Channel, submission: Submission | None) -> str | None:
        """Show that this thread waits in a channel for good; return why it never ends, if so.

        What it waits for is a submission, or the program that it runs itself there.
        """
        standing = self._standing(group, channel) if self._alone() else None
        # What a channel is in now is this thread's affair only if that is not over.
        if standing is None or (submission is not None and submission.finished()):
            self.over()
            return None
        # What changes all the time is not worth telling other hosts each time.
        settled = self._shown in (None, standing)
        if standing != self._shown:
            self._owner, self._where = get_ident(), (group.health, channel)
            self._mine.show(standing)
            self._shown = standing
        return self._look(settled)

    def over(self) -> None:
        """Take away what this thread has shown, if it has: its wait has ended."""
        if self._owner == get_ident():
            self._owner, self._shown, self._where = 0, None, None
            self._mine.show(None)

    def hear(self, message: Message) -> None:
        """Take in what another rank says: what it waits for, or that this one waits in a circle."""
        if message["kind"] == "waits":
            self._exchange.hear(message)
            return
        where = self._where
        # What it shows may have changed meanwhile: others have come, but it is in the same wait.
        if where is not None and self._mine.holds(message["version"]):
            health, channel = where
            health.abort(health.in_circle(channel, message["verdict"]))

    def _look(self, settled: bool) -> str | None:
        boards = {number: board.read() for number, board in self._slots.items()}
        known = self._exchange.heard | {n: one for n, one in boards.items() if one[1] is not None}
        standings = {number: one for number, (_, one) in known.items() if one is not None}
        me, control = self._context.number, self._context.router.control
        if me not in standings:  # it is too much for the board
            return None
        ranks = wait_graph.circle(me, standings)
        if ranks:
            verdict = wait_graph.told(ranks, {rank: standings[rank].words for rank in ranks})
            for rank in set(ranks) - {me}:
                message = {"kind": "circle", "version": known[rank][0], "verdict": verdict}
                control.send([rank], message | {"group": ""})
            return verdict
        if settled and self._context.remote_hosts is not None:
            leading = {rank: known[rank] for rank in wait_graph.leading(me, standings)}
            self._exchange.pass_on(leading, me, self._slots.keys(), control)
        return None

    def _alone(self) -> bool:
        """Say whether no other thread of this process could make a call while this one waits."""
        if self._context.notifies() or self._owner not in (0, get_ident()):
            return False
        ours = {one.ident for one in threading.enumerate() if one.name.startswith(OURS)}
        ours.add(get_ident())
        return all(ident in ours or idles(frame) for ident, frame in sys._current_frames().items())

    def _standing(self, group: Group, channel: Channel) -> WaitNotice | None:
        needs = tuple(_needs(group, channel))
        if not needs:
            return None
        states = tuple(state for group in list(self._groups) for state in _states(group))
        return WaitNotice(_words(self._context.number, group, channel), needs, states)


def idles(frame: FrameType) -> bool:
    """Say whether a thread, by its innermost frame, is a pool's that waits for work.

    Work that it has been given, and not begun for want of a core, may be calls.
    """
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    if function != "_worker" or not file.endswith("concurrent/futures/thread.py"):
        return False
    known = frame.f_locals
    return "work_queue" in known and known["work_queue"].empty() and not known.get("work_item")


def _key(group: str, link: tuple[int, int] | None = None) -> int:
    digest = hashlib.blake2b(f"{group}\0{link}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _link_key(group: Group, channel: Channel) -> int:
    peer = group.links.peer_of(channel)
    assert peer is not None, "every channel of the links is an end of one"
    sending = channel.shared.kind == at.SENDER
    return _key(group.name, (group.rank, peer) if sending else (peer, group.rank))


def _needs(group: Group, channel: Channel) -> Iterator[Need]:
    """Yield what must happen before the wait in a channel can end."""
    key = _key(group.name)
    if channel.shared.kind == at.COLLECTIVE:
        memory, number = group.memory, channel.get(at.C_OPS)
        # Ranks of other hosts publish in their own notices which call they have entered.
        entered = {n for m, n in enumerate(memory.numbers) if memory.last_record(m)[0] >= number}
        for rank, member in enumerate(group.members):
            if rank not in entered:
                yield Need(key, number, -1, member, key)
        return
    peer = group.links.peer_of(channel)
    assert peer is not None, "every channel of the links is an end of one"
    seen = _seen(channel)
    if seen is not None:
        yield Need(_link_key(group, channel), 0, seen, group.members[peer], key)


def _seen(channel: Channel) -> int | None:
    """Return what the other end of a link has counted up to; None if it need not go on.

    There is no counter between hosts: a receiver waits for one message more than it has taken. A
    sender needs room, which the kernel may still make.
    """
    sending = channel.shared.kind == at.SENDER
    if channel.shared.streams:
        return None if sending else channel.get(at.C_OPS)
    counter = channel.shared.counters[sending]
    seen = int(entry_points.load_word(counter))
    blocked = channel.get(at.C_BLOCKED_AT) == counter and seen < channel.get(at.C_BLOCKED_FOR)
    return seen if blocked else None


def _states(group: Group) -> Iterator[ProgressState]:
    """Yield how far this rank is in a group and on its links.

    What is not busy makes no calls while this thread waits: that is asked before the count. Who is
    in a group that has failed leaves it by that: nothing of it is shown.
    """
    if cause.known(group.memory):
        return
    busy = group.channel.busy()
    yield ProgressState(_key(group.name), group.channel.get(at.C_OPS), busy)
    for link in group.links.channels():
        busy = link.busy()
        yield ProgressState(_link_key(group, link), _count(link), busy)


def _count(link: Channel) -> int:
    """Return how far my end of a link is: the messages that have passed, or its counter."""
    if link.shared.streams:
        return link.get(at.C_OPS)
    return int(entry_points.load_word(link.get(at.C_SELF)))


def _words(number: int, group: Group, channel: Channel) -> str:
    """Return the text in which a deadlock error names this rank's wait."""
    name = f"of group {group.name!r}"
    if channel.shared.kind == at.COLLECTIVE:
        seq, memory = channel.get(at.C_OPS), group.memory
        what = called(memory.record(memory.rank, seq) or "a call", memory.site(memory.rank, seq))
        return f"rank {number} waits in #{seq} {name}, {what}"
    call = "send" if channel.shared.kind == at.SENDER else "recv"
    what = called(f"{call} #{channel.get(at.C_OPS) + 1} {name}", here())
    return f"rank {number} waits in {what}"
