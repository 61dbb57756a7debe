"""The errors of nc10d: which rank failed, in which call, and why.

A caller's mistake is a ValueError or TypeError, raised before anything is sent. The classes here
are for the other failures: of a peer, of the network, or of a deadline. A handler of c10d's
`DistBackendError`, `DistStoreError`, `DistNetworkError` or `DistQueueEmptyError` gets the failures
that it gets under c10d; here a DistNetworkError is a DistStoreError, too. After
`import nc10d.torch`, torch.distributed's classes are bases of those here. Every class keeps its
attributes when pickled, because test kits and launchers carry errors between processes.
"""

from __future__ import annotations

from typing import Any


class DistError(RuntimeError):
    """A peer, a store or the network failed; the attributes name the rank, its host and the call.

    Unknown attributes are None: `rank` (the failed rank in its group), `host`, `pid`, `cause` (the
    system's reason: "killed by signal 9"), `group` (the group's name), `op` (operation name), `seq`
    (the operation's sequence number in the group), `waited` (seconds that the rank which noticed
    the failure had been in that operation), `last` (rank → sequence number of its last operation).
    """

    _told = False
    """Whether a call on this rank has raised the error, or returned it."""

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
        self.rank, self.host, self.pid = rank, host, pid
        self.group, self.op, self.seq = group, op, seq
        self.cause, self.waited, self.last = cause, waited, last

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), dict(self.__dict__))


def _rebuild(kind: type[DistError], message: str, attributes: dict[str, Any]) -> DistError:
    error = kind(message)
    error.__dict__.update(attributes)
    return error


class DistBackendError(DistError):
    """An operation of a group failed: because of a peer, of a timeout, or of a library below."""


class PeerLost(DistBackendError):
    """A rank died or left while others still needed it."""


class CollectiveTimeout(DistBackendError, TimeoutError):
    """An operation did not end within its timeout."""


class CollectiveMismatch(DistBackendError):
    """Ranks of one group made different calls at the same position of the sequence."""


class Aborted(DistBackendError):
    """The group was aborted on purpose; the message carries the given reason."""


class GroupClosed(DistBackendError):
    """The group has been destroyed on this rank."""


class ForkedGroupError(DistBackendError):
    """A forked child used a group that belongs to the parent process."""


class CodecError(DistError, ValueError):
    """An object can't be encoded, or a received message is malformed or not allowed here."""


class StoreError(DistError):
    """The key-value store refused a request or could not be reached."""


class DistNetworkError(StoreError):
    """A store's server could not be reached, the connection was lost, or the port is taken."""


class StoreTimeout(StoreError, TimeoutError):
    """A store call did not end within its timeout; the message names the store and the keys."""


class ConnectTimeout(StoreTimeout, DistNetworkError):
    """No connection to a store's server could be made within the timeout."""


class NotANumberError(StoreError, ValueError):
    """A store was asked to add to a value that is not a number."""


class QueueEmptyError(StoreError):
    """A store's queue was empty, and the call was not to wait."""


class RendezvousError(StoreError):
    """The ranks could not find each other (bad address, missing variable, wrong world size)."""


DistStoreError, DistQueueEmptyError = StoreError, QueueEmptyError
"""c10d's names."""


class LibraryError(DistBackendError):
    """A library below nc10d refused a call or failed; `code` is that library's error number."""

    def __init__(self, message: str, *, code: int | None = None, **attributes: Any) -> None:
        super().__init__(message, **attributes)
        self.code = code


class NCCLError(LibraryError):
    """NCCL failed; `code` is an ncclResult_t."""


class UCCError(LibraryError):
    """UCC failed; `code` is a ucc_status_t, whose name the message has."""


class CudaError(LibraryError):
    """The CUDA driver or the device failed; `code` is a CUresult."""


class AuthError(DistError):
    """The job's token is missing or malformed, or a peer that should hold it does not."""


class UnsupportedPlatform(DistError):
    """This machine lacks something that the engine needs; the message names it."""
