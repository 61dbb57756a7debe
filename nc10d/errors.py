"""Everything that can go wrong, as types: who failed, in which call, and why.

A caller's mistake is a ValueError or TypeError, raised before anything is sent. What is here is
the other kind: a peer, the network or the clock failed. Every class survives pickling with its
attributes, because test kits and launchers carry errors between processes.
"""

from __future__ import annotations

from typing import Any


class DistError(RuntimeError):
    """A peer, a store or the network failed; attributes say who, where and in which call.

    Attributes that are unknown are None: `rank` (the failed rank in its group), `host`, `pid`,
    `cause` (what the system says of it: "killed by signal 9"), `group` (its name), `op` (operation
    name), `seq` (its sequence number in the group), `waited` (for how many seconds the rank that
    noticed had been in that operation), `last` (rank → sequence number of its last operation).
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        pid: int | None = None,
        group: str | None = None,
        op: str | None = None,
        seq: int | None = None,
        cause: str | None = None,
        waited: float | None = None,
        last: dict[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.pid = pid
        self.group = group
        self.op = op
        self.seq = seq
        self.cause = cause
        self.waited = waited
        self.last = last

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), dict(self.__dict__))


def _rebuild(kind: type[DistError], message: str, attributes: dict[str, Any]) -> DistError:
    error = kind(message)
    error.__dict__.update(attributes)
    return error


class PeerLost(DistError):
    """A rank died or left while others still needed it."""


class CollectiveTimeout(DistError, TimeoutError):
    """An operation did not end within its deadline."""


class CollectiveMismatch(DistError):
    """Ranks of one group made different calls at the same place in their sequence."""


class Aborted(DistError):
    """The group was aborted on purpose; the message carries the reason that was given."""


class GroupClosed(DistError):
    """The group has been destroyed on this rank."""


class ForkedGroupError(DistError):
    """A forked child used a group that belongs to its parent."""


class CodecError(DistError, ValueError):
    """An object can't be carried, or what has come as one is malformed or not allowed here."""


class StoreError(DistError):
    """The key-value store refused a request or could not be reached."""


class StoreTimeout(StoreError, TimeoutError):
    """A store call did not end within its timeout; the message names the store and the keys."""


class NotANumberError(StoreError, ValueError):
    """A store was to add to a value, or to count in one, that is not a number."""


class QueueEmptyError(StoreError):
    """A queue of the store had nothing to pop, and the call was not to wait."""


class RendezvousError(DistError):
    """The ranks could not find each other (bad address, missing variable, wrong world size)."""


class LibraryError(DistError):
    """A library below nc10d refused a call or failed; `code` is its own number for why."""

    def __init__(self, message: str, *, code: int | None = None, **who: Any) -> None:
        super().__init__(message, **who)
        self.code = code


class NCCLError(LibraryError):
    """NCCL failed; `code` is its ncclResult_t."""


class CudaError(LibraryError):
    """The CUDA driver or the device failed; `code` is its CUresult."""


class AuthError(DistError):
    """The job's token is missing or unfit, or somebody who should know it does not."""


class UnsupportedPlatform(DistError):
    """This machine lacks something that the engine needs; the message says what."""
