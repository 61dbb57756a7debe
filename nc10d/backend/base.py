"""What a backend is: one method that runs operations, and the ways to end it.

A backend belongs to one group on one kind of device. The registry maps names to factories, so
that a user's own backend is as good as a built-in one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nc10d.base.deadline import Deadline
from nc10d.errors import DistError
from nc10d.ops import Op
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.store.base import Store


class Backend(Protocol):
    """Runs operations for one group on one kind of device."""

    name: str
    device_type: str
    rank: int
    size: int

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Run `ops` in order, as one submission; more than one is one fused or grouped launch.

        The operations have been validated. `timeout` (seconds, math.inf for none) runs from this
        call. Without `async_op` the call blocks until all are done and returns None, or raises
        what made it fail; with it the Work completes when all are done. A receive's
        result is its sender; that of several operations with receives among them is a list with
        one entry each, the sender or None. Any thread may call;
        the order of launch is the order of execution, except that point-to-point operations
        have links of their own and overtake, each other too where nobody can tell.
        """
        ...

    def split(
        self,
        ranks: Sequence[int],
        name: str,
        store: Store,
        deadline: Deadline,
        options: Any = None,
    ) -> Backend:
        """Make the backend of a group of some of my ranks; only they call, all of them.

        It may wait for them, until `deadline`; if one does not come, it gives back all that it
        has taken and raises who. `options` are as in BackendSetup.
        """
        ...

    def abort(self, reason: BaseException) -> None:
        """Fail every pending and later operation with `reason`, here and on every peer.

        Any thread, any time; never blocks. The first reason in the group wins.
        """
        ...

    def close(self) -> None:
        """Give everything back; idempotent. Operations still in flight fail with GroupClosed."""
        ...


class OtherBackends:
    """The other backends of a group, as one of them sees them; here, that there are none."""

    @property
    def agree(self) -> bool:
        """Say whether one of them learns of deaths, and finds one cause with all ranks."""
        return False

    def note(self) -> int:
        """Return where a rank tells what it began last, for the others to read; 0: nowhere.

        That is the address of a record as `backend.cpu.native.layout` has it, until the group is
        closed.
        """
        return 0

    def whereabouts(self) -> tuple[str, dict[int, int]]:
        """Return what each rank began last, as the end of a message, and numbers by rank."""
        return "", {}

    def cause(self) -> DistError | None:
        """Return why one of them has failed, None if none has; never blocks for long."""
        return None

    def tell(self, error: DistError) -> DistError | None:
        """Fail with `error`, on every rank; return the cause that counts, None if none `agree`."""
        return None


@dataclass(frozen=True, slots=True)
class BackendSetup:
    """What a backend is made from: its place in the group, where and by when to meet the others.

    `options` are the caller's `pg_options` for this backend, of a type that it was registered
    with, or None. `device` is init_process_group's `device_id`, or None. `others` are the group's
    backends of other devices: what one of them learns of a death or an abort ends the group on all.
    """

    group_name: str
    rank: int
    size: int
    store: Store
    deadline: Deadline
    options: Any = None
    device: Any = None
    others: OtherBackends = field(default_factory=OtherBackends)


Factory = Callable[[BackendSetup], Backend]
Meeting = Callable[[int, int, Deadline], "tuple[Store, int, int]"]
"""From rank and size, as far as they are known, to a store that all ranks share, rank and size."""
