"""The context, which all groups of a rank share: arena, doorbell, local peers and threads.

Three helper threads serve the context:

- the control thread waits for deaths of peers (pidfds) and for control messages;
- the worker advances asynchronous operations without the GIL; the first starts the worker;
- the notifier finishes Works that have callbacks; the first starts the notifier.

At the end the control thread joins the other two, and then gives up the memory and the peers.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from nc10d.backend.cpu.algorithms.group_shape import Thresholds, grouped
from nc10d.backend.cpu.bootstrap import host_peers
from nc10d.backend.cpu.bootstrap.heartbeats import compiling
from nc10d.backend.cpu.control.router import ControlledGroup, LiveGroups, Router
from nc10d.backend.cpu.control.silence import peer_seconds
from nc10d.backend.cpu.engine import cpu_policy
from nc10d.backend.cpu.engine.call_log import CallLog
from nc10d.backend.cpu.engine.channel import Words
from nc10d.backend.cpu.engine.channels import Channels
from nc10d.backend.cpu.memory.arena import Arena, span_of
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.memory.host_peer import HostPeer, mask
from nc10d.backend.cpu.memory.peer_access import AccessProbe, access_to
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.transport.remote_group import RemoteHosts
from nc10d.base.deadline import Deadline
from nc10d.base.run_to_end import run_to_end
from nc10d.base.signal_errors import Event, Thread

if TYPE_CHECKING:
    from nc10d.store.base import Store

RESTLESS_MS = 20
"""How often the notifier polls Works whose end no other thread announces."""


class WorkList(Protocol):
    """The Works of a group that nobody waits for."""

    def notify(self) -> bool:
        """Finish Works that have ended; return True to be called again soon."""

    def pending(self) -> bool:
        """Return whether a Work is left to finish, or its callbacks run."""

    def disown(self) -> None:
        """Become unusable in a forked child."""


class ContextGroup(ControlledGroup, Protocol):
    """A live group of the context."""

    memory: GroupMemory


class Context:
    """The state that all groups of a rank share, made once per job."""

    # `number` is the rank in the job; `rank` is the index in `peers`, this host's ranks. `near`
    # maps the job's ranks to these indices.

    def __init__(
        self, store: Store, rank: int, size: int, deadline: Deadline, host_id: str | None = None
    ) -> None:
        self._lock = threading.RLock()
        self._events = self._wake = self._look = -1
        with compiling(store, deadline):  # all ranks have come: none is late by compiling
            entry_points.prepare()
        self._peer_seconds = peer_seconds()
        self.number = rank
        self.pid = os.getpid()
        self._closing = False
        self.peers: list[HostPeer] = []
        self.arena = Arena(*span_of(min(size, host_peers.MAX_RANKS)))
        try:
            self._meet(store, size, deadline, host_id)
            self._set_up(store, deadline)
            _contexts.add(self)
        except BaseException:
            self._unmap()
            self._close_events()
            raise

    def _meet(self, store: Store, size: int, deadline: Deadline, host_id: str | None) -> None:
        """Map the memory of this host's ranks; blocks until all ranks have come."""
        bell = self.arena.allocate(at.FIRST_PAGES)
        assert bell == 0, "everyone's doorbell is at the start of its arena"
        self._probe = AccessProbe(self.arena)
        self.peers, self.infos = host_peers.map_peers(
            store, self.number, size, self.arena, deadline, host_id
        )
        self.topology = grouped([info.host_id for info in self.infos])
        self.near = {peer.number: peer.rank for peer in self.peers}
        self.rank, self.size = self.near[self.number], len(self.peers)

    def _set_up(self, store: Store, deadline: Deadline) -> None:
        """Make the shared state of groups; blocks until the ranks on other hosts are connected."""
        infos = [self.infos[peer.number] for peer in self.peers]
        cores, quotas = [info.cores for info in infos], [info.quota for info in infos]
        self.oversubscribed = cpu_policy.oversubscribed(cores, quotas)
        thresholds = [Thresholds(info.read_from, info.write_from) for info in infos]
        self.thresholds = cpu_policy.agreed_thresholds(thresholds)
        self.waiting = cpu_policy.waiting_policy(oversubscribed=self.oversubscribed)
        self._access = [access_to(peer) for peer in self.peers]
        self._bells: Words = np.array([peer.mapping.base for peer in self.peers], np.int64)
        self._rank_block: Words = np.zeros(at.RANK_BLOCK_BYTES // 8, np.int64)
        self.rank_block: int = plain.address(self._rank_block)
        self.log = CallLog()
        self.live_groups = LiveGroups[ContextGroup]()
        self._work_lists: list[weakref.ref[WorkList]] = []
        self._abandoned: list[tuple[Sequence[int], int, int]] = []
        self._dead = 0
        self._events = os.eventfd(0, os.EFD_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._look = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._set(at.P_BELL, self.arena.mapping.base)
        self._set(at.P_BELLS, plain.address(self._bells))
        self._set(at.P_EVENT_FD, self._events)
        self._set(at.P_LOG, self.log.address)
        self.channels = Channels(self.arena, self._rank_block, mask([self.rank]), self.waiting)
        self._worker: Thread | None = None
        self._notifier: Thread | None = None
        self._control = _thread("control", self._run_control)
        self._freed = False
        self._ended = Event()
        wires = {peer.number: peer.wire for peer in self.peers if peer.wire is not None}
        self.remote_hosts: RemoteHosts | None = None
        if len(self.topology.hosts) > 1:
            self.remote_hosts = RemoteHosts(self.number, self.topology, self.rank_block, store)
            wires |= self.remote_hosts.connect(store, deadline)
        self.router = Router(wires, self.near, self.live_groups, self._look, self._peer_seconds)

    def start(self) -> None:
        """Start the control thread. Receivers for control messages have been set before."""
        self._control.start()

    def _set(self, field: int, value: int) -> None:
        self._rank_block[field // 8] = value

    # -- groups ----------------------------------------------------------------------------

    def join(self, group: ContextGroup, reference: weakref.ref[ContextGroup]) -> None:
        """Add a group; report a death and the messages that came while the group formed."""
        # Added before the look at deaths: a death in between is reported twice, never lost.
        self.live_groups.join(group, reference)
        dead = self.lost(group.members)
        if dead is not None:
            group.on_death(dead.number)
        self.router.join(group)

    def leave(self, key: str, reference: weakref.ref[ContextGroup]) -> None:
        """Remove a group; removing the last group closes the context. Idempotent."""
        if self.live_groups.leave(key, reference) == 0:
            self.close()

    def add_work_list(self, works: WorkList) -> None:
        """Let the notifier finish the Works of a group, as long as `works` lives."""
        with self._lock:
            live = [reference for reference in self._work_lists if reference() is not None]
            self._work_lists = [*live, weakref.ref(works)]

    def _live_work_lists(self) -> list[WorkList]:
        with self._lock:
            found = [reference() for reference in self._work_lists]
        return [works for works in found if works is not None]

    def lost(self, ranks: Sequence[int]) -> HostPeer | None:
        """Return the first of the job's `ranks` that has died on this host, or None."""
        near = (self.peers[self.near[rank]] for rank in ranks if rank in self.near)
        return next((peer for peer in near if self._dead & mask([peer.rank])), None)

    # -- memory ----------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Return the offset of zeroed memory in my arena, after reclaiming abandoned pieces."""
        with self._lock:
            abandoned, self._abandoned = self._abandoned, []
            for piece in abandoned:
                offsets, left_word, members = piece
                if members & ~(entry_points.load_word(left_word) | self._dead):
                    self._abandoned.append(piece)
                    continue
                for offset in offsets:
                    self.arena.free(offset)
        return self.arena.allocate(nbytes)

    def abandon(self, offsets: Sequence[int], left_word: int, members: int) -> None:
        """Have a later `allocate` free memory once all ranks in the mask `members` left or died."""
        # Each member sets its bit in the word at `left_word`, which lies in that memory. The word
        # is this rank's own: a peer's memory may belong to that peer's next group already.
        with self._lock:
            self._abandoned.append((offsets, left_word, members))

    def access(self, members: Iterable[int]) -> int:
        """Return the kernel's access to private memory of all `members`: 0, READS or WRITES."""
        return min(self._access[self.near[rank]] for rank in members if rank in self.near)

    def ring(self, ranks: int) -> None:
        """Ring the doorbells of local ranks (a bit mask), and this rank's own."""
        entry_points.ring(self.rank_block, ranks)

    # -- threads ---------------------------------------------------------------------------

    def need_worker(self) -> None:
        """Start the worker unless it runs."""
        if self._worker is None:
            with self._lock:
                if self._worker is None and not self._closing:
                    worker = _thread("worker", self._work)
                    self.channels.watched = True
                    worker.start_in(self, "_worker")

    def need_notifier(self) -> None:
        """Start the notifier unless it runs."""
        if self._notifier is None:
            with self._lock:
                if self._notifier is None and not self._closing:
                    notifier = _thread("notify", self._notify)
                    notifier.start_in(self, "_notifier")

    def notifies(self) -> bool:
        """Return whether a callback is pending or runs; a callback may make calls."""
        return any(works.pending() for works in self._live_work_lists())

    def poke_notifier(self) -> bool:
        """Make the notifier look at all Works; return False if the notifier can't run any more."""
        with self._lock:
            if self._events >= 0 and not self._closing:
                os.eventfd_write(self._events, 1)
                return True
        return False

    def _work(self) -> None:
        policy = self.waiting
        while True:
            # The worker spins only for a moment: the cores belong to the threads that compute.
            answer = entry_points.work(
                self.rank_block, policy.spin // 4, policy.few_yields, entry_points.SLICE_NS
            )
            if answer == at.DONE:
                return
            address = int(self._rank_block[at.P_FAILED // 8])
            for group in self.live_groups.all():
                group.on_engine_failure(address, answer)

    def _notify(self) -> None:
        poller = select.poll()
        events = self._events
        poller.register(events, select.POLLIN)
        restless = False
        while not self._closing:
            if poller.poll(RESTLESS_MS if restless else None):
                os.eventfd_read(events)
            restless = sum(works.notify() for works in self._live_work_lists()) > 0

    def in_control(self) -> bool:
        """Return whether this is the control thread, which must not wait for peers' messages."""
        return threading.current_thread() is self._control

    def _run_control(self) -> None:
        try:
            self._watch_peers()
            self._free()
        finally:
            self._ended.set()

    def _watch_peers(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        by_fd = {peer.pidfd: peer for peer in self.peers if peer.pidfd >= 0}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        self.router.register(poller)
        patience = self.router.overdue()
        while not self._closing:
            ready = [fd for fd, _ in poller.poll(patience)]
            # A rank's last messages are handled before its end, which may be ready as well.
            for fd in [fd for fd in ready if not self.router.ready(fd, poller)]:
                if fd in by_fd:
                    poller.unregister(fd)
                    self._dead |= mask([by_fd[fd].rank])
                    for group in self.live_groups.all():
                        group.on_death(by_fd[fd].number)
            patience = self.router.overdue()

    def close(self) -> None:
        """Stop the threads, give up memory and peers, and close all descriptors; idempotent.

        Blocks until that is done, except in one of these threads. If an error such as Ctrl-C ends
        the call meanwhile, the control thread does the rest.
        """
        self._stop()
        if threading.current_thread() in (self._worker, self._notifier, self._control):
            return
        if sys.is_finalizing():  # no thread runs any more; the kernel frees the rest
            return
        # `is_alive` and `join` of Python 3.11 take a thread for ended if an error cuts them off.
        begun = not self._control.abandon()
        while begun and not self._ended.wait(0.05):
            pass
        if not self._freed:  # the thread has never begun, or died by an error
            run_to_end(self._free)
        if begun:
            self._control.join()
        self._close_events()

    def _stop(self) -> None:
        with self._lock:
            self._closing = True
        self.router.stop()
        self._set(at.P_STOP, 1)
        self._set(at.P_EVENT_FD, -1)
        entry_points.ring(self.rank_block, 0)
        with self._lock:
            if self._events >= 0:
                os.eventfd_write(self._events, 1)
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _free(self) -> None:
        """Join the other threads, then give up the memory and the peers."""
        # Never in the main thread, where signals' handlers run. No lock is taken that a thread may
        # hold which waits in `close`.
        for thread in (self._worker, self._notifier):
            while thread is not None and thread.is_alive():
                entry_points.ring(self.rank_block, 0)
                thread.join(0.05)
        if self.remote_hosts is not None:
            self.remote_hosts.close()
        self.router.close()
        self._unmap()
        self._freed = True

    def _unmap(self) -> None:
        for peer in self.peers:
            peer.close()
        self.arena.close()

    def _close_events(self) -> None:
        with self._lock:
            events, self._events = self._events, -1
            if events >= 0:
                os.close(events)
            wake, self._wake = self._wake, -1
            if wake >= 0:
                os.close(wake)
            look, self._look = self._look, -1
            if look >= 0:
                os.close(look)

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Needed if an error has cut off `close`, or if a helper thread called `close`.
        if hasattr(self, "_look") and not ending():
            self._close_events()

    def disown(self) -> None:
        """Become harmless in a forked child: memory and threads are the parent's."""
        # The child's copies of channels stay locked, so that no wait advances them.
        self._lock = threading.RLock()
        self._closing = True
        self.channels.disown()
        self.live_groups.disown()
        for works in self._live_work_lists():
            works.disown()
        if self.remote_hosts is not None:
            self.remote_hosts.disown()
        self.router.close(shared=True)
        self._unmap()
        self._close_events()


def _thread(name: str, body: Callable[[], None]) -> Thread:
    return Thread(target=body, name=f"nc10d-{name}", daemon=True)


_contexts: weakref.WeakSet[Context] = weakref.WeakSet()


def _disown_all() -> None:
    for context in tuple(_contexts):
        context.disown()


os.register_at_fork(after_in_child=_disown_all)
