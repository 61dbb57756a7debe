"""The torch group for torch 2.13: a ProcessGroup in Python, which torch uses for every device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nc10d.base.torch_registration import NAME
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import World
from nc10d.torch.backend.c10d_operators import through_operators
from nc10d.torch.backend.group_calls import TorchCalls


@through_operators
class PythonGroup(TorchCalls, dist.ProcessGroup):
    """A torch group whose calls run on an nc10d group."""

    supports_splitting = False
    supports_coalescing = True

    def __init__(self, group: ProcessGroup, world: World, name: str = NAME) -> None:
        dist.ProcessGroup.__init__(self, group.rank(), group.size())
        self._open(group, world, name)

    def getBackendName(self) -> str:
        """Return "nc10d", or "gloo" in gloo's place."""
        return self.torch_name

    def name_for_torch(self, group: dist.ProcessGroup, name: str) -> None:
        """Answer `name` when torch asks for the backend's."""
        self.torch_name = name

    def setGroupName(self, name: str) -> None:
        """Take torch's name for the group."""
        self._name = name

    def getGroupName(self) -> str:
        """Return torch's name of the group."""
        return getattr(self, "_name", "")

    def setGroupDesc(self, description: str) -> None:
        """Take torch's description of the group."""
        self._description = self.nc10d_group.description = description

    def getGroupDesc(self) -> str:
        """Return torch's description of the group."""
        return getattr(self, "_description", "")

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> PythonGroup:
        """Return the group, which serves every device."""
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: torch allocates tensors itself."""
        return False
