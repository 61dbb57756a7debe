"""Whether a backend can work on this machine, and why not. Nothing is initialised but the driver.

Backends of other registrations are taken to work: their factories report what they lack.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import MappingProxyType

from nc10d.backend.config import BackendConfig
from nc10d.base.run_to_end import import_to_end
from nc10d.errors import CudaError, UnsupportedPlatform


def _require_device() -> None:
    driver = import_to_end("nc10d.cuda.driver")  # imported late: most jobs have no use for it
    try:
        count = driver.device_count()
    except (CudaError, UnsupportedPlatform) as error:
        raise UnsupportedPlatform(f"it needs a GPU, and none can be used ({error})") from error
    if not count:
        message = "it needs a GPU, and the driver shows none to this process (CUDA_VISIBLE_DEVICES)"
        raise UnsupportedPlatform(message)


def _require_nccl() -> None:
    nccl = import_to_end("nc10d.backend.nccl.bindings.library")
    _require_device()
    nccl.library()


def _require_mpi() -> None:
    if importlib.util.find_spec("mpi4py") is None:
        raise UnsupportedPlatform("mpi4py is not installed: pip install mpi4py, beside an MPI")


def _require_ucc() -> None:
    import_to_end("nc10d.backend.ucc.library").library()


_REQUIRE: MappingProxyType[str, Callable[[], None]] = MappingProxyType(
    {"nccl": _require_nccl, "staged": _require_device, "mpi": _require_mpi, "ucc": _require_ucc}
)


def why_unavailable(backend: str) -> str | None:
    """Return why a registered backend can't work on this machine, None if it can."""
    try:
        _REQUIRE.get(backend, lambda: None)()
    except UnsupportedPlatform as error:
        return str(error)
    return None


def require(config: BackendConfig) -> None:
    """Raise UnsupportedPlatform unless the backend that every group needs can work here.

    That is the backend of CPU arrays, or the first of a configuration for devices alone. A backend
    for devices beside it may be missing, as in the default configuration.
    """
    name = config.backend_for(config.first)
    reason = why_unavailable(name)
    if reason is not None:
        message = f"the backend {config.asked!r} can't work on this machine: {reason}"
        raise UnsupportedPlatform(f'{message}; for arrays in host memory pass "gloo" or nothing')
