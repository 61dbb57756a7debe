"""Deadlock detection: a waiting rank publishes a wait notice and looks for a cycle through itself.

| a rank's state | is entered when |
|---|---|
| running | initially; by withdrawing the notice, as the wait ends or another thread could call |
| waiting | the only thread that could make a call has waited for a slice, and publishes a notice |
| in a cycle | the rank finds a cycle through itself (wait_graph.py), or another rank reports one |

A waiting rank looks at its own host's notices and at those received from other hosts (notices.py).
Without a cycle the rank forwards the notices from ranks that wait for this rank.

Invariant: a published notice is true until the rank's wait ends. wait_graph.py proves that a cycle
of such notices is a deadlock, however old they are.

The finder reports the cycle to all the cycle's ranks, and each rank fails its group with the same
text. Before a rank fails, the rank passes the report on by its control connections. So every rank
has the report before any connection to a rank in the cycle ends.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from types import FrameType

from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.control.connections import Message
from nc10d.backend.cpu.deadlock import wait_graph
from nc10d.backend.cpu.deadlock.notices import NoticeExchange, NoticeSlot
from nc10d.backend.cpu.deadlock.wait_graph import Need, ProgressState, WaitNotice
from nc10d.backend.cpu.engine.channel import Channel, Submission
from nc10d.backend.cpu.failure import cause
from nc10d.backend.cpu.failure.health import Health
from nc10d.backend.cpu.membership.group import Group
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.base import signal_errors
from nc10d.base.call_site import (
    bystanders,
    called,
    frames_of_threads,
    here,
    idle_code,
    rank_threads,
)
from nc10d.base.signal_errors import thread_ident
from nc10d.base.text import RETURNED

_NC10D = ("worker", "notify", "control", "poller", "store", "watch")
OWN_THREADS = (*(f"nc10d-{name}" for name in _NC10D), "pytest_timeout ")
"""Name prefixes of threads that never make a call for this rank: nc10d's own (the notifier only in
callbacks, which count apart), and pytest-timeout's timer."""


class DeadlockDetector:
    """The wait notice of a rank in the job, and the search for a cycle."""

    def __init__(self, context: Context) -> None:
        # A weak reference: memory is unmapped as soon as the last user drops the context.
        self._context: Context = weakref.proxy(context)
        self._slots = {peer.number: NoticeSlot(peer.mapping) for peer in context.peers}
        self._slot = self._slots[context.number]
        self._published: WaitNotice | None = None
        self._owner = 0
        """The thread that has published the notice; 0 if there is none."""
        self._finished = 0  # tasks that this rank has finished; see `rest`
        self._waits_in: tuple[Health, Channel] | None = None
        self._exchange = NoticeExchange()
        self._told = ""
        """The text about the latest cycle that this rank has reported to the other ranks."""

    def find_deadlock(
        self, group: Group, channel: Channel, timeout: float, submission: Submission | None
    ) -> str | None:
        """Publish that this thread waits in a channel; return a deadlock's text, or None.

        The thread waits for `submission`, or for the program that this thread runs itself (None).
        `timeout` is the operation's, in seconds.
        """
        notice = self._notice(group, channel, timeout) if self.alone() else None
        # The channel may have gone on to the next submission, which is not this thread's wait.
        if notice is None or (submission is not None and submission.finished()):
            self.clear()
            return None
        # A notice that changes at every look is not worth a message to other hosts each time.
        stable = self._published in (None, notice)
        if notice != self._published:
            self._owner, self._waits_in = thread_ident(), (group.health, channel)
            self._slot.publish(notice)
            self._published = notice
        return self._look(stable)

    def rest(self, finished: int, site: str) -> None:
        """Publish that this rank makes no call before all others have `finished` as many tasks.

        `site` is the line from which the rank's function has returned, or empty.
        """
        self._finished = finished
        if self.alone():
            others = {info.rank for info in self._context.infos} - {self._context.number}
            needs = tuple(Need(_TASKS, finished, -1, other, _TASKS) for other in sorted(others))
            text = called(f"rank {self._context.number} {RETURNED}", site)
            self._owner = thread_ident()
            self._slot.publish(WaitNotice(text, needs, self._progress()))

    def resume(self, finished: int) -> None:
        """Withdraw `rest`'s notice: after `finished` tasks this rank begins another.

        Another rank that rests after as many tasks may begin the next task later, and so does not
        count as returned.
        """
        self.clear()
        self._finished = finished

    def clear(self) -> None:
        """Withdraw this thread's notice, if any: the wait has ended."""
        if self._owner == thread_ident():
            self._owner, self._published, self._waits_in = 0, None, None
            self._slot.publish(None)

    def on_message(self, message: Message) -> None:
        """Process another rank's wait notice, or a report about a cycle that includes this rank."""
        if message["kind"] == "wait_notice":
            self._exchange.receive(message)
            return
        waits_in = self._waits_in
        versions: dict[str, object] = message["versions"]
        version = versions.get(str(self._context.number))
        # The notice may be newer than the reported version, if other ranks have come meanwhile.
        if waits_in is not None and type(version) is int and self._slot.holds(version):
            health, channel = waits_in
            self._tell(versions, message["text"])
            health.abort(health.deadlock_error(channel, message["text"]))

    def _tell(self, versions: dict[str, object], text: str) -> None:
        """Report a cycle once to the other ranks in it; `versions` are its notices' versions."""
        if text != self._told:
            self._told = text
            control = self._context.router.control
            others = [number for number in control.connections if str(number) in versions]
            control.send(
                others, {"kind": "deadlock", "versions": versions, "text": text, "group": ""}
            )

    def _look(self, stable: bool) -> str | None:
        near = {number: slot.read() for number, slot in self._slots.items()}
        near = {number: entry for number, entry in near.items() if entry[1] is not None}
        found = self._exchange.received | near
        notices = {number: notice for number, (_, notice) in found.items() if notice is not None}
        me, control = self._context.number, self._context.router.control
        if me not in notices:  # the notice is too long for the slot
            return None
        cycle = wait_graph.find_cycle(me, notices)
        if cycle:
            text = wait_graph.describe_cycle(cycle, {rank: notices[rank].text for rank in cycle})
            self._tell({str(rank): found[rank][0] for rank in cycle}, text)
            return text
        if stable and self._context.remote_hosts is not None:
            waiting = {rank: found[rank] for rank in wait_graph.waiting_for(me, notices)}
            self._exchange.forward(waiting, me, self._slots.keys(), control)
        return None

    def alone(self) -> bool:
        """Return whether no other thread in this process could make a call during this wait."""
        if self._context.notifies() or self._owner not in (0, thread_ident()):
            return False
        threads, others = threading.enumerate(), (*OWN_THREADS, *rank_threads)
        own = {thread.ident for thread in threads if thread.name.startswith(others)}
        own.add(thread_ident())
        frames = frames_of_threads()
        own |= present_bystanders(threads)
        # This thread's frame has this one as its caller. The cycle through the dict would keep all
        # callers' locals, also the user's, until a garbage collection.
        del frames[thread_ident()]
        return all(ident in own or idles(frame) for ident, frame in frames.items())

    def _notice(self, group: Group, channel: Channel, timeout: float) -> WaitNotice | None:
        needs = tuple(_needs(group, channel))
        if not needs:
            return None
        words = _words(self._context.number, group, channel)
        return WaitNotice(words, needs, self._progress(), timeout)

    def _progress(self) -> tuple[ProgressState, ...]:
        groups = self._context.live_groups.all()
        states = (_states(group) for group in groups if isinstance(group, Group))
        return (ProgressState(_TASKS, self._finished, False), *chain.from_iterable(states))


def present_bystanders(threads: Iterable[threading.Thread]) -> set[int]:
    """Return the idents of bystanders that are still the same threads."""
    now = {thread.ident: thread for thread in threads}
    # A thread that `threading` has not started gets a dummy there by asking for itself.
    return {
        ident
        for ident, thread in bystanders.items()
        if now.get(ident) is thread
        or (thread is None and isinstance(now[ident], threading._DummyThread))
    }


def idles(frame: FrameType) -> bool:
    """Return whether the thread of an innermost frame is an executor's and has no work.

    Work that is assigned to the thread, but not begun for lack of a core, may make calls. A thread
    in `idle_code` is idle, too.
    """
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    while file == _WAITS and frame.f_back is not None:
        frame = frame.f_back
        file, function = frame.f_code.co_filename, frame.f_code.co_name
    if frame.f_code in idle_code:
        return True
    if function != "_worker" or not file.endswith("concurrent/futures/thread.py"):
        return False
    local = frame.f_locals
    return "work_queue" in local and local["work_queue"].empty() and not local.get("work_item")


def _key(group: str, link: tuple[int, int] | None = None) -> int:
    digest = hashlib.blake2b(f"{group}\0{link}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


_WAITS = signal_errors.__file__
"""The file with Event and Condition, whose frames belong to a wait and not to its caller."""
_TASKS = _key("tasks")
"""The key for a rank's progress in its tasks."""


def _link_key(group: Group, channel: Channel) -> int:
    peer = group.links.peer_of(channel)
    assert peer is not None, "every channel of the links is an end of one"
    sending = channel.spec.kind == at.SENDER
    return _key(group.key, (group.rank, peer) if sending else (peer, group.rank))


def _needs(group: Group, channel: Channel) -> Iterator[Need]:
    """Yield the needs that must be met before the wait in a channel can end."""
    key = _key(group.key)
    if channel.spec.kind == at.COLLECTIVE:
        memory, number = group.memory, channel.get(at.C_OPS)
        # Ranks on other hosts are always included: their notices show whether they have entered.
        entered = {
            n for m, n in enumerate(memory.group_ranks) if memory.last_record(m)[0] >= number
        }
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
    """Return the counter at a link's other end; None if the wait depends on no counter.

    Links between hosts have none. There a receiver waits for a message beyond the messages taken so
    far, and a sender waits for room in the socket, which the kernel may still make.
    """
    sending = channel.spec.kind == at.SENDER
    if channel.spec.streams:
        return None if sending else channel.get(at.C_OPS)
    counter = channel.spec.counters[sending]
    seen = int(entry_points.load_word(counter))
    blocked = channel.get(at.C_BLOCKED_AT) == counter and seen < channel.get(at.C_BLOCKED_FOR)
    return seen if blocked else None


def _states(group: Group) -> Iterator[ProgressState]:
    """Yield this rank's progress in a group and on its links.

    A failed or closed group yields nothing, and so counts as left. `busy` is read before the count:
    a channel that is not busy stays so while this thread waits, so the count is final.
    """
    if group.health.closed or cause.has_failed(group.memory):
        return
    busy = group.channel.busy()
    yield ProgressState(_key(group.key), group.channel.get(at.C_OPS), busy)
    for link in group.links.channels():
        busy = link.busy()
        yield ProgressState(_link_key(group, link), _count(link), busy)


def _count(link: Channel) -> int:
    """Return the progress at this end of a link: the messages that have passed, or its counter."""
    if link.spec.streams:
        return link.get(at.C_OPS)
    return int(entry_points.load_word(link.get(at.C_SELF)))


def _words(number: int, group: Group, channel: Channel) -> str:
    """Return the text in which a deadlock error names this rank's wait."""
    name = f"of group {group.name!r}"
    if channel.spec.kind == at.COLLECTIVE:
        seq, memory = channel.get(at.C_OPS), group.memory
        what = called(memory.record(memory.rank, seq) or "a call", memory.site(memory.rank, seq))
        return f"rank {number} waits in #{seq} {name}, {what}"
    call = "send" if channel.spec.kind == at.SENDER else "recv"
    what = called(f"{call} #{channel.get(at.C_OPS) + 1} {name}", here())
    return f"rank {number} waits in {what}"
