"""The backend of torch 2.14: a Backend in Python, which torch registers in a group for devices."""

from __future__ import annotations

from typing import Any

from torch._C import _distributed_c10d as c10d

from nc10d.base.callable_values import CallableInt
from nc10d.base.torch_entry import NAME
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import World
from nc10d.torch.backend.group_calls import TorchCalls

SUPPORTED = hasattr(c10d.Backend, "register_abort_hook")
"""Whether this torch takes a Backend that is written in Python."""


class PythonBackend(TorchCalls, c10d.Backend):
    """A backend of a torch group, whose calls run on a group of nc10d."""

    def __init__(self, group: ProcessGroup, world: World) -> None:
        c10d.Backend.__init__(self, group.rank(), group.size())
        self._open(group, world)

    def name(self) -> str:
        """Return "nc10d"."""
        return NAME

    getBackendName = _backend_name = name

    # torch reads these as attributes, and its C++ code calls them.
    supports_coalescing = CallableInt(True)
    supports_splitting = CallableInt(False)
    supports_shrinking = supports_time_estimate = CallableInt(False)
    supports_reconfigure = supports_window = CallableInt(False)

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return False: torch allocates tensors itself."""
        return False
