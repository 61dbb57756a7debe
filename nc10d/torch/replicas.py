"""What a module consists of, and how ranks come to have the same of it.

Contract: parameters and buffers in torch's order, each once however often it is shared, without
what the module asks to leave alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nc10d.group import ProcessGroup


class Contents:
    """The parameters and buffers of `module`, by name."""

    def __init__(self, module: torch.nn.Module) -> None:
        ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._module = module
        self._params = {n: x for n, x in module.named_parameters() if n not in ignored}
        self._ignored = ignored

    def parameters(self) -> list[torch.Tensor]:
        """Return all parameters."""
        return list(self._params.values())

    def trained(self) -> dict[str, torch.Tensor]:
        """Return the parameters that require gradients; RuntimeError if there are none."""
        found = {name: x for name, x in self._params.items() if x.requires_grad}
        if not found:
            raise RuntimeError("no parameter of the module requires a gradient: nothing to reduce")
        return found

    def sparse(self) -> set[str]:
        """Return the names of parameters whose gradients will be sparse: those of embeddings."""
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        found = {
            id(one.weight)
            for one in self._module.modules()
            if isinstance(one, kinds) and one.sparse
        }
        return {name for name, x in self._params.items() if id(x) in found}

    def states(self) -> list[torch.Tensor]:
        """Return all parameters and buffers."""
        return [*self.parameters(), *self.buffers()]

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers as they are now: a module may replace them."""
        found = self._module.named_buffers()
        return [x for name, x in found if name not in self._ignored]


def same_everywhere(group: ProcessGroup, tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank what rank 0 has in `tensors`, as one submission for each kind of device.

    Blocks, for tensors on the CPU.
    """
    whole = [x.detach() for x in tensors if x.numel()]
    for kind in sorted({x.device.type for x in whole}):
        with group.coalescing_manager():
            for x in whole:
                if x.device.type == kind:
                    group.broadcast(x, 0)
