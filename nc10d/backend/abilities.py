"""Abilities that a backend may have: dead ranks, records of calls, smaller groups.

`Backend` names each as a property that is None by default. A group and its other backends ask for
an ability, never for a backend's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from nc10d.backend.shared_board import GroupMessages, SharedBoard
from nc10d.base.deadline import Deadline
from nc10d.errors import DistError, GroupClosed, PeerLost
from nc10d.store.base import Store

B = TypeVar("B", covariant=True)


class FailureDetector(Protocol):
    """The ability to detect dead ranks and to agree with all ranks on a cause."""

    record_address: int
    """The address of the record where this rank publishes its launches on other devices."""

    @property
    def messages(self) -> GroupMessages:
        """Small texts between the ranks of the group."""

    def share_board(self, nbytes: int) -> SharedBoard:
        """Allocate memory of zeros for this rank that its local peers can read; called once."""

    def failure(self) -> BaseException | None:
        """Return the group's error, the same on all ranks; None if the group has not failed."""

    def abort(self, reason: BaseException) -> None:
        """Fail the group with `reason` on every rank; the first reason wins."""

    def whereabouts(self) -> tuple[str, dict[int, int]]:
        """Return the latest calls on this host: as the end of an error, and numbers by rank."""

    def gone(self) -> set[int]:
        """Return the ranks that have died, have left, or can't be reached any more."""

    def peer_left(self, rank: int, within: str) -> DistError:
        """Return the error for a rank that has left while this rank waits for it in `within`."""


class CallRecords(Protocol):
    """The ability to report which calls and messages a rank has begun; for flight recorders."""

    rank: int
    size: int

    def logged(self) -> Sequence[tuple[Any, str, bool]]:
        """Return the latest entries, oldest first: entry, text, and whether that is a message."""

    def waits_for(self) -> int | None:
        """Return the rank that the latest collective waits for now, None if it does not wait."""

    def traffic(self) -> Sequence[tuple[str, int, int, bool]]:
        """Return direction, peer, messages ended, and whether this rank waits, for each link."""

    def progress(self) -> dict[int, int]:
        """Return the number of each local rank's latest collective."""

    def observe_failure(self, observer: Callable[[DistError], None]) -> None:
        """Have `observer` called with the error when the group fails."""


class Shrinkable(Protocol[B]):
    """The ability to make a backend for the ranks that survive; `control` connects them."""

    control: Any
    """The group control through which survivors agree."""

    def gone(self) -> set[int]:
        """Return the ranks that have died, have left, or can't be reached any more."""

    def shrink(self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline) -> B:
        """Make the backend for the surviving `ranks`, which all call."""


class OtherBackends:
    """A group's other failure detectors, as one of its backends sees them; more may come later."""

    def __init__(self, detectors: Callable[[], Iterator[FailureDetector]] = lambda: iter(())):
        self._detectors = detectors

    @property
    def agree(self) -> bool:
        """Whether another backend detects dead ranks, and agrees with all ranks on a cause."""
        return any(True for _ in self._detectors())

    def record_address(self) -> int:
        """Return the address of the record to which a rank publishes its latest launch; 0: none."""
        # `backend.cpu.native.offsets` has its layout. The record exists until the group is closed.
        return next((detector.record_address for detector in self._detectors()), 0)

    def share_board(self, nbytes: int) -> SharedBoard | None:
        """Allocate this rank's board, None without a failure detector; called once in a group."""
        return next((each.share_board(nbytes) for each in self._detectors()), None)

    def messages(self) -> GroupMessages | None:
        """Return the carrier of small texts between the group's ranks, None without a detector."""
        return next((detector.messages for detector in self._detectors()), None)

    def whereabouts(self) -> tuple[str, dict[int, int]]:
        """Return the latest calls on this host: as the end of an error, and numbers by rank."""
        detector = next(self._detectors(), None)
        return ("", {}) if detector is None else detector.whereabouts()

    def gone(self) -> set[int]:
        """Return the ranks that have died, have left, or can't be reached any more, if known."""
        detector = next(self._detectors(), None)
        return set() if detector is None else detector.gone()

    def peer_left(self, rank: int, within: str) -> DistError:
        """Return the error for one of the ranks that are `gone`; this rank waits in `within`."""
        detector = next(self._detectors(), None)
        if detector is None:  # the group is closed meanwhile
            return PeerLost(f"rank {rank} has left the group", rank=rank)
        return detector.peer_left(rank, within)

    def cause(self) -> DistError | None:
        """Return the error of another backend, None if none has failed; blocks only shortly."""
        return next(filter(None, map(cause_of, self._detectors())), None)

    def notify(self, error: DistError) -> DistError | None:
        """Fail with `error` on every rank; return the agreed cause, None if none `agree`."""
        for detector in self._detectors():
            detector.abort(error)
        return self.cause()


def cause_of(detector: FailureDetector) -> DistError | None:
    """Return why a backend has failed; a mere close is no cause for others."""
    found = detector.failure()
    return None if isinstance(found, GroupClosed) or not isinstance(found, DistError) else found
