"""nc10d's errors as torch.distributed's, which torch's users catch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch.distributed as dist

from nc10d.errors import (
    AuthError,
    CodecError,
    CollectiveTimeout,
    DistBackendError,
    DistError,
    DistNetworkError,
    QueueEmptyError,
    StoreError,
    UnsupportedPlatform,
)

_TIMEOUT = "; the timeout is that of the call, or of the call that made the group"
_MISSING = re.compile(r": rank(?P<more>s?) (?P<ranks>[^:]*) of group ")

_TORCHS: dict[type[DistError], type[RuntimeError]] = {
    DistBackendError: dist.DistBackendError,
    StoreError: dist.DistStoreError,
    DistNetworkError: dist.DistNetworkError,
    QueueEmptyError: dist.QueueEmptyError,
    CodecError: dist.DistError,
    AuthError: dist.DistError,
    UnsupportedPlatform: dist.DistError,
}


def register() -> None:
    """Give nc10d's errors torch's classes as bases, so that handlers of torch's errors get them."""
    # Nothing raises a bare DistError; Python changes no bases of a class right below its own.
    for own, theirs in _TORCHS.items():
        if not issubclass(own, theirs):
            own.__bases__ += (theirs,)


def torch_error(error: DistError, of_wait: bool = False) -> Exception:
    """Return a torch.distributed.DistBackendError whose cause is `error`, with its message.

    `of_wait` says that a `wait` was too short, and the operation goes on.
    """
    return _made(str(error), error, of_wait)


def _made(message: str, error: DistError, of_wait: bool = False) -> Exception:
    if isinstance(error, CollectiveTimeout) and not of_wait:
        message += _TIMEOUT
    made: Exception = dist.DistBackendError(message)
    made.__cause__ = error
    return made


def barrier_error(error: DistError, rank: int, patient: bool, wait_all_ranks: bool) -> Exception:
    """Return the error for a monitored_barrier on `rank`, which begins with gloo's words.

    A rank that is not `patient`, with a timeout of 0, has itself to blame.
    """
    missing = _MISSING.search(str(error)) if error.op == "monitored_barrier" else None
    if not isinstance(error, CollectiveTimeout):
        return torch_error(error)
    if missing is None and (rank or not error.rank or not patient):
        words = f"Rank {rank} timed out in monitoredBarrier"
    elif rank:
        words = (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
            "for send/recv from rank 0"
        )
    elif wait_all_ranks and missing is not None and missing["more"]:
        words = f"Ranks {missing['ranks']} failed to pass monitoredBarrier"
    else:
        words = f"Rank {error.rank} failed to pass monitoredBarrier"
    return _made(f"{words}: {error}", error)


@contextlib.contextmanager
def raising_torch_errors() -> Iterator[None]:
    """Raise torch's error in place of nc10d's from a with-block."""
    try:
        yield
    except DistError as error:
        raise torch_error(error) from error
