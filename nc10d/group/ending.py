"""How a group ends: aborted, interrupted, closed, or inherited through fork.

A group that has ended raises in every later call. An abort has a cause, which all ranks raise; the
first cause wins.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator

from nc10d.backend.config import BackendConfig
from nc10d.base import error_wire
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise
from nc10d.base.signal_errors import from_handler
from nc10d.errors import Aborted, DistError, ForkedGroupError, GroupClosed
from nc10d.group.dispatch import Dispatcher
from nc10d.work import Work

CLOSE_PATIENCE = 10.0
"""Seconds that a rank waits for others at the end of a group, where its backend needs them."""


class EndableGroup(Dispatcher):
    """The part of a group that ends the group."""

    def __init__(self, name: str, config: BackendConfig, timeout: float) -> None:
        super().__init__(name, config, timeout)
        live_groups.add(self)

    @property
    def inherited(self) -> bool:
        """Whether the group belongs to the process that forked this process."""
        return self._backends.inherited

    def abort(self, reason: BaseException | str | None = None) -> None:
        """Fail every pending and later operation here and on every peer.

        They raise `reason` if it is a DistError, else Aborted with its text. The first reason wins.
        In a group across hosts the call blocks until the ranks have agreed on a cause.
        """
        cause = self._cause(reason)
        self._backends.fail(cause)
        self._preparing = None
        self._backends.abort(cause)

    _abort = abort

    @contextlib.contextmanager
    def failed_by_interrupt(self, call: str) -> Iterator[None]:
        """Abort the group if an interrupt, such as Ctrl-C, ends the block: peers wait in `call`."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) or from_handler(error):
                self.abort(f"it was interrupted in {call} ({type(error).__name__})")
            raise

    def _wait_here(self, work: Work) -> None:
        try:
            work.wait()
        except KeyboardInterrupt:
            name = work._describe()
            message = f"rank {self.rank} was interrupted in {name}"
            self.abort(Aborted(message, rank=self.rank, pid=os.getpid(), group=self.name, op=name))
            raise

    def _cause(self, reason: BaseException | str | None) -> DistError:
        """Return a reason as this group's error: a copy, as other groups may share the reason."""
        if isinstance(reason, DistError):
            own = copy_to_raise(reason)
            assert isinstance(own, DistError)
            if own is not reason:
                own.group = own.group or self.name
            return own
        text = "no reason given" if reason is None else error_wire.message_of(reason)
        message = f"group {self.name!r} was aborted by its rank {self.rank}: {text}"
        aborted = Aborted(message, rank=self.rank, pid=os.getpid(), group=self.name)
        aborted.__cause__ = reason if isinstance(reason, BaseException) else None
        return aborted

    def close(self) -> None:
        """Close the backends; idempotent. Calls pending and later raise GroupClosed.

        Blocks until they have released everything: with NCCL, at most ten seconds for other ranks.
        """
        self._close()
        self._backends.await_close(Deadline.after(CLOSE_PATIENCE))

    def _close(self) -> None:
        """Close the backends, whose end may go on in the background."""
        gone = GroupClosed(f"group {self.name!r} has been destroyed", group=self.name)
        self._backends.fail(gone)
        self._preparing = None
        self._backends.close(gone)
        self._stranded.clear()

    shutdown = close

    def _disown(self) -> None:
        """Become unusable in a forked child; the group's resources stay the parent's."""
        self._lock = threading.RLock()
        self._batches.clear()
        self._preparing = None
        message = f"group {self.name!r} belongs to the process that forked this one"
        self._backends.disown(
            ForkedGroupError(
                f"{message}: call init_process_group in the child instead",
                rank=self.rank,
                pid=os.getpid(),
                group=self.name,
            )
        )


live_groups: weakref.WeakSet[EndableGroup] = weakref.WeakSet()
"""The groups of this process; a fork ends them in the child."""


def _disown_all() -> None:
    for group in tuple(live_groups):
        group._disown()


os.register_at_fork(after_in_child=_disown_all)
