"""What all groups of one rank share on its host: memory, doorbells, and three helper threads.

The control thread waits for the kernel's word that a peer has died. The worker advances what was
launched asynchronously, without the GIL; it starts with the first such launch. The notifier runs
callbacks; it starts with the first of them. Threads are joined before memory goes.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nc10d.backend.cpu.algorithms.topology import grouped
from nc10d.backend.cpu.bootstrap import host_peers as meeting
from nc10d.backend.cpu.control.router import Router
from nc10d.backend.cpu.deadlock.detector import DeadlockDetector
from nc10d.backend.cpu.engine.call_log import CallLog
from nc10d.backend.cpu.engine.channel import Words
from nc10d.backend.cpu.engine.channels import Channels
from nc10d.backend.cpu.engine.cpu_policy import WaitPolicy, boards, roomy, waiting_policy
from nc10d.backend.cpu.memory.arena import Arena
from nc10d.backend.cpu.memory.bits import mask
from nc10d.backend.cpu.memory.host_peer import HostPeer
from nc10d.backend.cpu.memory.peer_access import AccessProbe, access_to
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.transport.remote_group import RemoteHosts
from nc10d.base.deadline import Deadline

if TYPE_CHECKING:
    from nc10d.backend.cpu.backend import CpuBackend
    from nc10d.store.base import Store

WORKER_SLICE_NS = 50_000_000
# How often the notifier looks at works that nobody tells it about.
RESTLESS_MS = 20


class Context:
    """One rank's place on its host; made once per job, shared by all of its groups."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        deadline: Deadline,
        host_id: str | None = None,
    ) -> None:
        entry_points.prepare()
        self.number = rank
        self.pid = os.getpid()
        self.arena = Arena()
        try:
            bell = self.arena.allocate(at.FIRST_PAGES)
            assert bell == 0, "everyone's doorbell is at the start of its arena"
            self._probe = AccessProbe(self.arena)
            self.mates, self.cards = meeting.gather(
                store, rank, size, self.arena, deadline, host_id
            )
        except BaseException:
            self.arena.close()
            raise
        self.topology = grouped([card.host_id for card in self.cards])
        self.near = {mate.number: mate.rank for mate in self.mates}
        self.rank, self.size = self.near[rank], len(self.mates)
        cards = [self.cards[mate.number] for mate in self.mates]
        self.roomy, self.boards = roomy(cards), boards(cards)
        self.waiting: WaitPolicy = waiting_policy(self.roomy)
        self._access = [access_to(mate) for mate in self.mates]
        self._bells: Words = np.array([mate.mapping.base for mate in self.mates], np.int64)
        self._process: Words = np.zeros(at.PROCESS_BYTES // 8, np.int64)
        self.process: int = plain.address(self._process)
        self.log = CallLog()
        self._zombies: list[tuple[Sequence[int], int, int]] = []
        self._dead = 0
        self.groups: dict[str, weakref.ref[CpuBackend]] = {}
        self._lock = threading.RLock()
        self._events = os.eventfd(0, os.EFD_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._closing = False
        self._users = 0
        self._set(at.P_BELL, self.arena.mapping.base)
        self._set(at.P_BELLS, plain.address(self._bells))
        self._set(at.P_EVENT_FD, self._events)
        self._set(at.P_LOG, self.log.address)
        self.channels = Channels(self.arena, self._process, mask([self.rank]), self.waiting)
        self._worker: threading.Thread | None = None
        self._notifier: threading.Thread | None = None
        self.deadlocks = DeadlockDetector(self)
        self._control = threading.Thread(
            target=self._watch_peers, name="nc10d-control", daemon=True
        )
        wires = {mate.number: mate.wire for mate in self.mates if mate.wire is not None}
        self.abroad: RemoteHosts | None = None
        try:
            if len(self.topology.hosts) > 1:
                self.abroad = RemoteHosts(self, store)
                wires |= self.abroad.connect(store, deadline)
        except BaseException:
            self._close_descriptors()
            raise
        self.peers = Router(self, wires)
        self._control.start()
        _hosts.add(self)

    def _set(self, field: int, value: int) -> None:
        self._process[field // 8] = value

    # -- groups ----------------------------------------------------------------------------

    def join(self, backend: CpuBackend) -> None:
        """Count one more group in; it hears of those who have died while it formed."""
        with self._lock:
            self._users += 1
            self.groups[backend.group_name] = weakref.ref(backend)
        mate = self.lost(backend.members)
        if mate is not None:
            backend.health.on_death(mate)
        self.peers.join(backend)

    def leave(self, backend: CpuBackend) -> None:
        """Count a group out; the last one closes the host."""
        with self._lock:
            self.groups.pop(backend.group_name, None)
            self._users -= 1
            last = self._users == 0
        if last:
            self.close()

    def lost(self, ranks: Sequence[int]) -> HostPeer | None:
        """Return the first of some ranks of the job that has died on this host, if one has."""
        near = (self.mates[self.near[rank]] for rank in ranks if rank in self.near)
        return next((mate for mate in near if self._dead & mask([mate.rank])), None)

    def live_groups(self) -> list[CpuBackend]:
        """Return the groups that have not been closed."""
        with self._lock:
            found = [ref() for ref in list(self.groups.values())]
        return [group for group in found if group is not None]

    # -- memory ----------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Return the offset of zeroed memory in my arena, after taking back what nobody uses."""
        with self._lock:
            zombies, self._zombies = self._zombies, []
            for zombie in zombies:
                offsets, left_word, members = zombie
                if members & ~(entry_points.load_word(left_word) | self._dead):
                    self._zombies.append(zombie)
                    continue
                for offset in offsets:
                    self.arena.free(offset)
        return self.arena.allocate(nbytes)

    def abandon(self, offsets: Sequence[int], left_word: int, members: int) -> None:
        """Give memory back once the word at `left_word`, which lies in it, shows all `members`.

        The word is mine until then: a peer's own state could be overwritten by its next group.
        """
        with self._lock:
            self._zombies.append((offsets, left_word, members))

    def access(self, members: Iterable[int]) -> int:
        """Return what the kernel lets this rank do with private memory of all `members` here.

        0, READS, or WRITES, which includes reading.
        """
        return min(self._access[self.near[rank]] for rank in members if rank in self.near)

    def ring(self, ranks: int) -> None:
        """Ring the doorbells of host ranks (a bit mask), and my own."""
        entry_points.ring(self.process, ranks)

    # -- threads ---------------------------------------------------------------------------

    def need_worker(self) -> None:
        """Start the worker unless it runs."""
        if self._worker is None:
            with self._lock:
                if self._worker is None and not self._closing:
                    thread = threading.Thread(target=self._work, name="nc10d-worker", daemon=True)
                    self._worker = thread
                    self.channels.watched = True
                    thread.start()

    def need_notifier(self) -> None:
        """Start the notifier unless it runs."""
        if self._notifier is None:
            with self._lock:
                if self._notifier is None and not self._closing:
                    thread = threading.Thread(target=self._notify, name="nc10d-notify", daemon=True)
                    self._notifier = thread
                    thread.start()

    def notifies(self) -> bool:
        """Say whether there is a notifier: callbacks may call what no other thread does."""
        return self._notifier is not None

    def poke_notifier(self) -> bool:
        """Have the notifier look at all watched works; False if there is none any more."""
        with self._lock:
            if self._events >= 0 and not self._closing:
                os.eventfd_write(self._events, 1)
                return True
        return False

    def _work(self) -> None:
        policy = self.waiting
        while True:
            # It looks on for a moment only: the cores belong to those who compute.
            answer = entry_points.work(
                self.process, policy.spin // 4, policy.yields // 20, WORKER_SLICE_NS
            )
            if answer == at.DONE:
                return
            address = int(self._process[at.P_LATE // 8])
            for group in self.live_groups():
                group.on_failure(address, answer)

    def _notify(self) -> None:
        poller = select.poll()
        events = self._events
        poller.register(events, select.POLLIN)
        restless = False
        while not self._closing:
            if poller.poll(RESTLESS_MS if restless else None):
                os.eventfd_read(events)
            restless = sum(group.notify() for group in self.live_groups()) > 0

    def in_control(self) -> bool:
        """Say whether this is the thread that hears from peers: it can't wait for them."""
        return threading.current_thread() is self._control

    def _watch_peers(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        by_fd = {mate.pidfd: mate for mate in self.mates if mate.pidfd >= 0}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        self.peers.register(poller)
        patience = None
        while not self._closing:
            ready = [fd for fd, _ in poller.poll(patience)]
            # What a rank has said comes before its end: poll looks at lines after ends.
            for fd in [fd for fd in ready if not self.peers.ready(fd, poller)]:
                if fd in by_fd:
                    poller.unregister(fd)
                    with self._lock:
                        self._dead |= mask([by_fd[fd].rank])
                    for group in self.live_groups():
                        group.health.on_death(by_fd[fd])
            patience = self.peers.overdue()

    def close(self) -> None:
        """Stop and join the threads, then let go of memory and descriptors; idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._set(at.P_STOP, 1)
        entry_points.ring(self.process, 0)
        if sys.is_finalizing():  # threads can't be joined any more; the kernel takes the rest
            return
        os.eventfd_write(self._wake, 1)
        os.eventfd_write(self._events, 1)
        for thread in (self._worker, self._notifier, self._control):
            if thread is not None and thread is not threading.current_thread():
                while thread.is_alive():
                    entry_points.ring(self.process, 0)
                    thread.join(0.05)
        if self.abroad is not None:
            self.abroad.close()
        self.peers.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        with self._lock:
            ends = [self._events, self._wake]
            self._events = self._wake = -1
            for mate in self.mates:
                mate.close()
            for fd in ends:
                if fd >= 0:
                    os.close(fd)
            self.arena.close()

    def disown(self) -> None:
        """Become harmless in a forked child: the memory is the parent's, the threads are not here.

        The child's copies of channels are locked for good, so that no wait advances them.
        """
        self._lock = threading.RLock()
        self._closing = True
        self.channels.disown()
        for group in self.live_groups():
            group.disown()
        if self.abroad is not None:
            self.abroad.disown()
        self.peers.close(shared=True)
        self._close_descriptors()


_hosts: weakref.WeakSet[Context] = weakref.WeakSet()


def _disown_all() -> None:
    for host in tuple(_hosts):
        host.disown()


os.register_at_fork(after_in_child=_disown_all)
