"""A group's failure on NCCL: the first error ends the group, here and on every peer.

All ranks raise the same error, the cause. The failure detector among the group's other backends
agrees on the cause; without a detector, the group's store carries the cause.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from nc10d.backend.abilities import OtherBackends
from nc10d.backend.nccl.bindings.library import RESULT
from nc10d.base import error_wire
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise
from nc10d.base.signal_errors import Event, Thread, suppress_here
from nc10d.errors import DistError, NCCLError
from nc10d.store.base import Store

_ABOUT_A_PEER = frozenset({RESULT["ncclRemoteError"], RESULT["ncclSystemError"]})
_CAUSE_KEY = "cause"  # in the store, for groups without a failure detector
_CAUSE_GRACE = 0.5  # seconds to wait for such an error's cause
_CAUSE_PAUSE = 0.01  # seconds between polls for the cause


class GroupFailure:
    """Why a group has failed, if it has; any thread may call.

    `refuse` refuses launches from now on. `end` ends the communicators and Works with the cause, on
    its own thread; the text of `note`, if any, is added to the cause first.
    """

    def __init__(
        self,
        store: Store,
        others: OtherBackends,
        refuse: Callable[[], None],
        end: Callable[[DistError], None],
        note: Callable[[], str],
    ) -> None:
        self._new_store, self._others = store.clone, others
        self._refuse, self._end, self._note = refuse, end, note
        self._store: Store | None = None
        self._lock = threading.RLock()  # a signal's handler may fail the group at any point
        self._agreed = Event()
        self.error: DistError | None = None
        """This rank's first error until the ranks have agreed; then the cause."""
        self.over = Event()
        """Set when the group has ended on this rank."""

    def connect(self) -> None:
        """Connect to the store, before the first `poll`; may block."""
        self._store = self._new_store()

    def check(self) -> None:
        """Raise the cause, if the group has failed; waits until the ranks have agreed."""
        if self.error is not None:
            self._agreed.wait()
            raise copy_to_raise(self.error)

    def check_peers(self) -> None:
        """Raise the cause, also if only a peer has failed so far."""
        if self.error is None:
            self.poll()
        self.check()

    def poll(self) -> None:
        """Fail with the error of the group's other backends, or of a peer, from the store."""
        cause = self.cause_of_peers()
        if cause is not None:
            self.fail(cause, notify=False)

    @property
    def store(self) -> Store:
        """A connection to the group's store, for short calls in any thread."""
        assert self._store is not None, "connect() comes first"
        return self._store

    def cause_of_peers(self) -> DistError | None:
        """Return the error of the group's other backends, or of a peer, None if there is none."""
        cause = self._others.cause()
        if cause is None and not self._others.agree:
            with suppress_here(DistError, OSError):
                cause = _published(self.store)
        return cause

    def fail(self, error: DistError, notify: bool = True) -> None:
        """End the group with `error`; the first error wins, and peers are notified."""
        with self._lock:
            if self.error is not None:
                return
            try:
                self.error = error
                self._refuse()
            finally:  # Ctrl-C may come meanwhile, and other threads wait for the end
                _start_thread(self._run, error, notify)

    def close(self, gone: DistError, release: Callable[[], None]) -> bool:
        """Refuse launches by `gone`, which peers do not learn, and release what the group has.

        `release` runs on its own thread. False if the group has failed, or has been closed.
        """
        with self._lock:
            if self.error is not None:
                return False
            try:
                self.error = gone
                self._refuse()
            finally:
                self._agreed.set()
                _start_thread(self._release, release)
            return True

    def _release(self, release: Callable[[], None]) -> None:
        release()
        self.over.set()

    def _run(self, error: DistError, notify: bool) -> None:
        error = self._root_cause(error)
        if notify:
            error = self._notify_peers(error)
        note = self._note()
        if note:
            error.add_note(note)
        self.error = error
        self._agreed.set()
        self._end(error)
        self.over.set()

    def _notify_peers(self, error: DistError) -> DistError:
        """Notify peers about an error; return the error that holds for all ranks."""
        found = self._others.notify(error)
        if found is None:  # without a failure detector the store carries the cause
            with contextlib.suppress(DistError, OSError):  # the store may be gone
                found = _publish(self._store or self._new_store(), error)
        if found is None:
            return error
        own = copy_to_raise(found)
        assert isinstance(own, DistError), "a copy has the type of the original"
        own._told = False  # the detector has told this backend, and no caller
        return own

    def _root_cause(self, error: DistError) -> DistError:
        """Return another backend's cause for NCCL's error about a peer, else the error."""
        if isinstance(error, NCCLError) and error.code in _ABOUT_A_PEER:
            grace = Deadline.after(_CAUSE_GRACE)
            while not grace.expired():
                found = self._others.cause()
                if found is not None:
                    return found
                self.over.wait(_CAUSE_PAUSE)
        return error


def _start_thread(target: Callable[..., None], *arguments: object) -> None:
    Thread(target=target, args=arguments, name="nc10d-nccl-end", daemon=True).start()


def _publish(store: Store, cause: DistError) -> DistError:
    """Publish an error for all ranks; return the first error that any rank has published."""
    own_text = error_wire.encode_error(cause)
    first = store.compare_set(_CAUSE_KEY, "", own_text)
    return cause if first == own_text else error_wire.decode_error(first)


def _published(store: Store) -> DistError | None:
    """Return the error that a rank has published, None if none has; never blocks."""
    return error_wire.decode_error(store.get(_CAUSE_KEY)) if store.check([_CAUSE_KEY]) else None
