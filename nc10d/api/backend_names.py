"""Names of backends, and whether they work here: c10d's `Backend` and `is_..._available`.

A backend is available if `init_process_group` can make it here. So `is_nccl_available()` is False
without a GPU, where c10d's answers for the build alone. No call starts anything but CUDA's driver.
"""

from __future__ import annotations

from typing import Any

from nc10d.backend.config import TOGETHER, UNNAMED, BackendConfig
from nc10d.backend.registry import backend_names, find_backend

_NAMES = ("UNDEFINED", "GLOO", "NCCL", "UCC", "MPI", "XCCL", "FAKE", "CPU", "STAGED", "NC10D")


class _BackendNames(type):
    def __getattr__(cls, name: str) -> str:
        known = name in _NAMES or name.lower() in backend_names()
        if not name.isupper() or not known:
            raise AttributeError(f"no backend is called {name}: known are {cls.backend_list}")
        return name.lower()

    @property
    def backend_list(cls) -> list[str]:
        """The names that `init_process_group` takes, registered ones among them."""
        return sorted({*backend_names(), *TOGETHER})

    @property
    def backend_capability(cls) -> dict[str, list[str]]:
        """Each backend's devices."""
        together = {name: [*devices] for name, devices in TOGETHER.items()}
        return together | {name: [*find_backend(name).devices] for name in backend_names()}

    @property
    def default_device_backend_map(cls) -> dict[str, str]:
        """The backend of each device by default; see get_default_backend_for_device."""
        return {d: UNNAMED if d == "cpu" else name for d, name in BackendConfig().devices.items()}


class BackendName(str, metaclass=_BackendNames):
    """c10d's names of backends: `Backend.NCCL` is "nccl", and `Backend("NCCL")`, too.

    The attributes are c10d's names and those of all registered backends; a name says nothing about
    availability. A new backend is registered by nc10d.register_backend.
    """

    __slots__ = ()

    def __new__(cls, name: str) -> Any:
        """Return the name in lower case, a plain str; ValueError if it is no str."""
        if not isinstance(name, str):
            raise ValueError(f"a backend's name must be a str, got {name!r}")
        return str(name).lower()


Backend = BackendName  # under another name, since nc10d.backend.protocol.Backend is the protocol


def is_backend_available(backend: str) -> bool:
    """Return whether each backend in a name or in pairs ("cpu:gloo,cuda:nccl") works here.

    For "gloo" and "nc10d" that is the backend for CPU arrays. False for an unknown name.
    """
    try:
        config = BackendConfig(backend)
    except ValueError:
        return False
    if config.asked in TOGETHER:
        return True
    return not any(find_backend(name).why_unavailable() for name in config.devices.values())


def is_gloo_available() -> bool:
    """Return True: "gloo" names nc10d's own backend for CPU arrays."""
    return is_backend_available("gloo")


def is_nccl_available() -> bool:
    """Return whether this process sees a GPU and has an NCCL library."""
    return is_backend_available("nccl")


def is_mpi_available() -> bool:
    """Return whether mpi4py is installed; it looks for an MPI when it is first used."""
    return is_backend_available("mpi")


def is_ucc_available() -> bool:
    """Return whether this machine has a libucc."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return whether a backend named "xccl" is registered: nc10d itself has none."""
    return is_backend_available("xccl")


def get_default_backend_for_device(device: object) -> str:
    """Return the name of the default backend for "cuda:1", a torch.device or a device's type.

    "gloo" for the CPU, as get_backend() answers. ValueError if there is none.
    """
    kind = str(getattr(device, "type", device)).partition(":")[0]
    found = Backend.default_device_backend_map.get(kind)
    if found is None:
        raise ValueError(f"there is no default backend for the device {device!r}")
    return found
