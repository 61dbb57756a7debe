"""The protocol of a backend: a method that runs operations, and the ways to end it.

A backend serves a group on one kind of device. The registry maps names to factories, so that a
user's own backend is as good as a built-in backend. Every backend derives from `Backend`, and
inherits defaults for the abilities that are missing. The test kit's `check_backend` checks a
backend. A backend's author needs this file alone, and `abilities` for further features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nc10d.backend.abilities import CallRecords, FailureDetector, OtherBackends, Shrinkable
from nc10d.backend.prepared_protocol import PreparingBackend
from nc10d.base.deadline import Deadline
from nc10d.ops import Array, MessageInfo, Op
from nc10d.store.base import Store
from nc10d.work import Work

Options = Any
"""A backend's own `pg_options`, in a type that the backend was registered with, or None."""


class Backend(Protocol):
    """Runs operations for a group on one kind of device.

    The properties from `failure_detector` on are abilities; by default a backend has none.
    """

    name: str
    device_type: str
    rank: int
    size: int

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Run `ops` in order, as a single submission; several are fused or grouped.

        The backend checks them first (`nc10d.arrays.validate`): the group does not.

        `timeout` (seconds, math.inf for none) runs from this call. Without `async_op` the call
        blocks until all operations have ended, and returns None or raises the failed operation's
        error. With `async_op` the call returns a Work that completes when all have ended.

        A receive's result is the sender. Several operations with receives among them result in a
        list with an entry for each operation, the sender or None. Any thread may call. Operations
        execute in launch order. Point-to-point operations have links of their own: they may
        overtake, also each other where no rank can observe the difference.
        """

    def split(
        self,
        ranks: Sequence[int],
        name: str,
        store: Store,
        deadline: Deadline,
        options: Options = None,
    ) -> Backend:
        """Make the backend for a subgroup with `ranks`; these ranks call, and no other.

        The call may wait for these ranks until `deadline`. If a rank does not come, the call
        releases everything that it has taken, and raises an error that names the rank. `options`
        are as in BackendSetup.
        """

    def split_off(self, ranks: Sequence[int], deadline: Deadline, options: Options = None) -> Any:
        """Prepare the backends of new groups for BackendSetup; all ranks in this group call.

        Each rank is in a new group. This rank's has `ranks`, or none if it is for another backend
        or device. `options` are as in BackendSetup. The result has `abort()`, which releases it if
        the group can't be made. By default there is nothing to prepare: None.
        """
        return None

    def abort(self, reason: BaseException) -> None:
        """Fail every pending and later operation with `reason`, here and on every peer.

        Any thread may call at any time. The first reason in the group wins. In a group across
        hosts the call blocks until the ranks have agreed on a cause.
        """

    def close(self) -> None:
        """Release everything; idempotent. Operations still in flight fail with GroupClosed.

        What needs other ranks goes on in the background, for which `await_close` waits.
        """

    def await_close(self, deadline: Deadline) -> None:
        """Wait until a close has released everything, or until `deadline`."""
        return

    def droppable(self) -> bool:
        """Return whether the backend, if dropped now, ends by itself and cuts no operation off.

        False keeps a dropped group's backend until the default group is destroyed.
        """
        return False

    @property
    def failure_detector(self) -> FailureDetector | None:
        """This backend as a failure detector, None if it can't detect dead ranks."""
        return None

    @property
    def call_records(self) -> CallRecords | None:
        """This backend as the source for a flight recorder, None if it keeps no records."""
        return None

    @property
    def shrinkable(self) -> Shrinkable[Backend] | None:
        """This backend as the maker of a smaller group, None if it can't make any."""
        return None

    @property
    def preparing(self) -> PreparingBackend[Any] | None:
        """This backend as the source of prepared calls, None if it prepares none."""
        return None

    def probe(self, peer: int | None, tag: int | None, deadline: Deadline) -> MessageInfo | None:
        """Return the next message from a rank (None: any) with a tag (None: any); see `recv`.

        Blocks until the message has come, or returns None at `deadline`. A message that a receive
        waits for already is not counted. ValueError if the backend can't look at messages.
        """
        message = f"probe: backend {self.name!r} can't see messages before they are received"
        raise ValueError(f"{message}; send their sizes first")

    def allocate(self, nbytes: int) -> Array | None:
        """Return registered memory as an array of bytes, None if the backend registers none."""
        return None


@dataclass(frozen=True, slots=True)
class BackendSetup:
    """The arguments of a factory: a rank's place in the group, and how to meet the other ranks.

    `options` are the caller's `pg_options` for this backend, in a type that the backend was
    registered with, or None. `device` is init_process_group's `device_id`, or None. `others` are
    the group's backends for other devices: a failure that ends one ends all. `split_off` is what
    the parent group's backend has prepared.
    """

    group_name: str
    rank: int
    size: int
    store: Store
    deadline: Deadline
    options: Options = None
    device: Any = None
    others: OtherBackends = field(default_factory=OtherBackends)
    split_off: Any = None


Factory = Callable[[BackendSetup], Backend]
Meeting = Callable[[int, int, Deadline], "tuple[Store, int, int]"]
"""From rank and size, as far as they are known, to a store that all ranks share, rank and size."""
