"""nc10d's errors as torch.distributed's, which torch's users catch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from nc10d.errors import DistError


def torch_error(error: DistError) -> Exception:
    """Return a torch.distributed.DistBackendError whose cause is `error`, with its message."""
    made = dist.DistBackendError(str(error))
    made.__cause__ = error
    return made  # type: ignore[no-any-return]


@contextlib.contextmanager
def raising_torch_errors() -> Iterator[None]:
    """Raise torch's error in place of nc10d's out of a with-block."""
    try:
        yield
    except DistError as error:
        raise torch_error(error) from error
