"""The CPU backend: runs a group's operations by programs on shared memory.

A backend is made when all of a group's ranks have come. The backend launches (launcher.py), waits
(waiter.py), and answers questions about the group.

After a failure, the rank that learns the cause publishes it (failure/cause.py). Every wait on every
rank finds the cause within 50 ms, stops the rank's channels and raises the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.backend.cpu.algorithms.group_shape import DEFAULTS, DIRECT, GroupShape, one_shot_bytes
from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.control.group_control import GroupControl
from nc10d.backend.cpu.deadlock.detector import DeadlockDetector
from nc10d.backend.cpu.engine.call_log import LogEntry
from nc10d.backend.cpu.engine.channel import Channel
from nc10d.backend.cpu.failure.error_text import message_in_words
from nc10d.backend.cpu.launcher import OpLauncher
from nc10d.backend.cpu.membership import formation
from nc10d.backend.cpu.membership.formation import GroupSpec, check_alive
from nc10d.backend.cpu.membership.group import Group
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.waiter import Waiter
from nc10d.backend.protocol import Backend, BackendSetup
from nc10d.backend.shared_board import SharedBoard
from nc10d.base.call_site import called, here
from nc10d.base.deadline import Deadline
from nc10d.base.run_to_end import run_to_end
from nc10d.base.text import members_text
from nc10d.errors import DistError, PeerLost
from nc10d.ops import MessageInfo, Op
from nc10d.store.arrival import KeyValueExchange
from nc10d.store.base import Store
from nc10d.work import Work

_GRACE_SECONDS = 1.0
"""The time in which a cancelled formation gives its memory back and tells its peers."""


def make(setup: BackendSetup, host_id: str | None = None) -> CpuBackend:
    """Make the backend of a job's first group; blocks until all ranks have come."""
    # Ranks with the same `host_id` share memory; by default, those that the kernel lets do so.
    return _formed(partial(_first, setup, host_id), setup.deadline)


def _formed(form: Callable[[], CpuBackend], deadline: Deadline) -> CpuBackend:
    """Return `form()`, which runs off the main thread; a handler's error cancels `deadline`."""
    # The error waits for a moment, so that the peers learn of it while the store is still there.
    return run_to_end(form, deadline.cancel, CpuBackend.close, _GRACE_SECONDS)


def _first(setup: BackendSetup, host_id: str | None) -> CpuBackend:
    context = Context(setup.store, setup.rank, setup.size, setup.deadline, host_id)
    try:
        name, members = setup.group_name, range(setup.size)
        check = partial(check_alive, context, name, members)
        detector = DeadlockDetector(context)
        context.router.on_job_message = detector.on_message
        context.start()
        spec = GroupSpec(context, name, members, setup.rank, setup.store, setup.deadline, check)
        return _connected(spec, formation.form, spec.store, detector)
    except BaseException:
        context.close()
        raise


def _connected(
    spec: GroupSpec,
    form: Callable[[GroupSpec], GroupMemory],
    exchange: KeyValueExchange,
    detector: DeadlockDetector,
) -> CpuBackend:
    """Form a group, and connect it to its other hosts; return its backend."""
    memory = form(spec)
    try:
        remote = formation.reach(spec, memory, exchange)
    except BaseException:
        formation.give_back(spec.context, memory)
        raise
    return CpuBackend(Group(spec.context, memory, spec.name, spec.members, remote), detector)


class CpuBackend(Backend):
    """A group's backend. Methods that block are marked so."""

    name = "cpu"
    device_type = "cpu"

    def __init__(self, group: Group, detector: DeadlockDetector) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size
        self.control = group.control
        self.record_address: int = group.memory.note
        self._detector = detector
        context, hosts = group.context, None if group.remote is None else group.remote.hosts
        # All ranks of a group choose alike, so a group across hosts takes the defaults.
        crowded = context.oversubscribed or hosts is not None
        small = one_shot_bytes(group.size, oversubscribed=crowded)
        limits = context.thresholds if hosts is None else DEFAULTS
        staging = group.memory.slot_bytes
        self.shape = GroupShape(group.size, group.rank, staging, small, hosts, DIRECT, limits)
        self.waiter = Waiter(group, detector)
        self.launcher = OpLauncher(group, self.shape, self.waiter)

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Run `ops`; see Backend."""
        return self.launcher.launch(ops, timeout, async_op)

    def probe(self, peer: int | None, tag: int | None, deadline: Deadline) -> MessageInfo | None:
        """Return the next message; see Backend."""
        return self.launcher.mailbox.probe(peer, tag, deadline)

    # -- asking ----------------------------------------------------------------------------------

    def failure(self) -> DistError | None:
        """Return why the group has failed on all ranks, or None."""
        return self.group.health.failure()

    def abort(self, reason: BaseException) -> None:
        """Fail the group with `reason` on every rank; the first reason wins."""
        self.group.health.abort_for_caller(reason)

    def logged(self) -> list[tuple[LogEntry, str, bool]]:
        """Return the latest entries, oldest first; calls count in the group, messages on a link."""
        channels = {channel.label: channel for channel in self.group.channels()}
        collectives = self.group.channel.label
        entries = self.group.context.log.read(channels)
        return [
            (entry, self._text(channels[entry.label], entry), entry.label != collectives)
            for entry in entries
        ]

    def _text(self, channel: Channel, entry: LogEntry) -> str:
        if channel.spec.kind == at.COLLECTIVE:
            return entry.text
        peer = self.group.links.peer_of(channel)
        return message_in_words(peer, *entry.message, sending=channel.spec.kind == at.SENDER)

    def waits_for(self) -> int | None:
        """Return the rank that the latest collective waits for now; None if it does not wait."""
        peers, channel = self.group.health.peers, self.group.channel
        return peers.awaited(channel) if peers.is_waiting(channel) else None

    def traffic(self) -> list[tuple[str, int, int, bool]]:
        """Return a row for each of my ends of links; see CallRecords."""
        found = []
        for channel in self.group.links.channels():
            peer = self.group.links.peer_of(channel)
            assert peer is not None, "every channel of the links is an end of a link"
            waits = self.group.health.peers.is_waiting(channel) and not channel.is_over()
            direction = "to" if channel.spec.kind == at.SENDER else "from"
            found.append((direction, peer, channel.get(at.C_OPS), waits))
        return found

    def progress(self) -> dict[int, int]:
        """Return the number of each local rank's latest collective."""
        return self.group.memory.progress()

    @property
    def messages(self) -> GroupControl:
        """The group's control messages."""
        return self.control

    @property
    def failure_detector(self) -> CpuBackend:
        """This backend, which detects dead ranks."""
        return self

    @property
    def preparing(self) -> OpLauncher:
        """The launcher, which prepares calls on plain arrays."""
        return self.launcher

    @property
    def call_records(self) -> CpuBackend:
        """This backend: the engine logs its calls and messages."""
        return self

    @property
    def shrinkable(self) -> CpuBackend:
        """This backend: survivors agree over its group control."""
        return self

    def observe_failure(self, observer: Callable[[DistError], object]) -> None:
        """Have `observer` called with the error when the group fails, after those before."""
        self.group.health.on_failure.append(observer)

    def whereabouts(self) -> tuple[str, dict[int, int]]:
        """Return each local rank's latest call: as the end of an error, and numbers."""
        return self.group.health.whereabouts()

    def share_board(self, nbytes: int) -> SharedBoard:
        """Allocate this rank's board; called once in a group."""
        self.group.health.check()
        return self.group.share_board(nbytes)

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return registered memory, which is freed when no array refers to that memory any more."""
        self.group.health.check()
        return self.group.context.arena.allocate_array(nbytes)

    # -- making and ending groups ----------------------------------------------------------------

    def split(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline, options: Any = None
    ) -> CpuBackend:
        """Make the backend for a group of some of my ranks; blocks until they all have come."""
        self.group.health.check()
        # For ranks that wait for this rank in another call meanwhile.
        self.group.memory.write_note(called(f"new_group({name!r})", here()))
        check = partial(check_parent, self.group)
        spec = self._spec(ranks, name, store, deadline, check)
        return _formed(partial(_connected, spec, formation.form, store, self._detector), deadline)

    def _spec(
        self,
        ranks: Sequence[int],
        name: str,
        store: Store,
        deadline: Deadline,
        check: Callable[[str, Sequence[int]], None],
    ) -> GroupSpec:
        """Return the spec of a group of some of my ranks; `check` is called during its waits."""
        group = self.group
        members, rank = [group.members[rank] for rank in ranks], list(ranks).index(group.rank)
        checked = partial(check, name, members)
        whereabouts = group.health.whereabouts
        return GroupSpec(
            group.context, name, members, rank, store, deadline, checked, lambda: whereabouts()[0]
        )

    def peer_left(self, rank: int, within: str) -> PeerLost:
        """Return the error for a rank that has left; blocks a moment if its program ends."""
        return self.group.health.error_of_left(rank, within)

    def gone(self) -> set[int]:
        """Return the ranks that have died, have left, or can't be reached any more."""
        return self.group.gone()

    def shrink(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline
    ) -> CpuBackend:
        """Make the backend for those of my ranks that are left, which all call at once."""
        # As `split`, but the group may have failed, and the store's host may be gone: the ranks
        # exchange offsets and addresses over their control connections.
        alive = partial(check_alive, self.group.context)
        spec = self._spec(ranks, name, store, deadline, alive)
        control = self.group.control
        form = partial(formation.form_again, exchange=control)
        return _formed(partial(_connected, spec, form, control, self._detector), deadline)

    def rest(self, finished: int, site: str) -> None:
        """Publish that this thread, the rank's only one, makes no call before all ranks rest.

        `finished` is how many tasks all ranks have finished when they all rest. `site` is the line
        that this rank has returned from, or empty.
        """
        self._detector.rest(finished, site)

    def resume(self, finished: int) -> None:
        """Withdraw what `rest` has published: this rank begins a task after so many."""
        self._detector.resume(finished)

    def droppable(self) -> bool:
        """Return whether no operation is in flight: a dropped group leaves without its peers."""
        return all(channel.oldest() is None for channel in self.group.channels())

    def close(self) -> None:
        """Leave the group; idempotent. Operations in flight fail with GroupClosed."""
        health = self.group.health
        health.fail_by_submissions()
        if health.close():
            self.waiter.notify()
            self.launcher.mailbox.drop_pending()
            self.group.leave()
            health.log_untold()

    def disown(self) -> None:
        """Become unusable in a forked child; the parent keeps memory and sockets."""
        self.waiter.disown()
        self.group.disown()


def check_parent(parent: Group, name: str, members: Sequence[int]) -> None:
    """Raise the reason why a group of some ranks of `parent` can't be formed, if any."""
    # First of all: members that have been told of the parent's failure may have exited since.
    parent.health.check()
    check_alive(parent.context, name, members)
    for rank, member in enumerate(members):
        if parent.health.peers.has_closed(parent.members.index(member)):
            text = members_text(members, [rank])
            message = (
                f"{text} cannot join the group {name!r}: it has left {parent.name!r}, from which "
                "the group is made"
            )
            raise PeerLost(message, rank=rank, group=name)
