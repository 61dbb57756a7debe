"""Parameters as views of flat tensors, with a tensor for each owner and device.

Contract: parameters' values, shapes and strides stay; only their memory changes. On the CPU, peers
can access that memory directly, if the group's backend has such memory. A parameter that has been
given other memory since (`x.data = y`) is a view again after `attach`, with the new values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nc10d.api import registered
from nc10d.group.process_group import ProcessGroup
from nc10d.torch.tensors import DTYPES, as_tensor, like, zeros


class ParamBuckets:
    """Flat tensors, in `flats`, that hold the values of `params` for each owner."""

    def __init__(
        self, params: Sequence[torch.Tensor], owners: Sequence[int], group: ProcessGroup
    ) -> None:
        members: dict[tuple[str, torch.dtype, int], list[torch.Tensor]] = {}
        for x, owner in zip(params, owners, strict=True):
            members.setdefault((str(x.device), x.dtype, owner), []).append(x)
        ordered = sorted(members.items(), key=lambda item: (item[0][0], item[0][2]))
        self.owners = [owner for (_, _, owner), _ in ordered]
        self._flat = [FlatParams(xs, group) for _, xs in ordered]
        self.flats = [each.flat for each in self._flat]
        self._params = list(params)

    def attach(self) -> None:
        """Make every parameter a view again; see `FlatParams.attach`."""
        for each in self._flat:
            each.attach()

    def release(self) -> None:
        """Give every parameter its own memory again."""
        for x in self._params:
            x.data = x.detach().clone()


class FlatParams:
    """Parameters with a single dtype and device, moved into a new flat tensor, `flat`."""

    def __init__(self, params: Sequence[torch.Tensor], group: ProcessGroup) -> None:
        counts = [x.numel() for x in params]
        self.flat = _flat(sum(counts), params[0], group)
        parts = zip(params, self.flat.split(counts), strict=True)
        self._rows = [(x, like(part, x)) for x, part in parts]
        self.attach()

    def attach(self) -> None:
        """Move the values of parameters that have other memory into the flat tensor."""
        for x, part in self._rows:
            if not x.is_set_to(part):
                part.copy_(x.detach())
                x.data = part


def _flat(count: int, like_this: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    dtype = DTYPES[like_this.dtype].numpy
    if not like_this.is_cpu:
        return zeros(count, dtype, like_this.device)
    if count and hasattr(group, "backend"):
        try:
            return as_tensor(registered.zeros(count, dtype, group))
        except MemoryError:  # no room for memory that peers can access
            pass
    return torch.zeros(count, dtype=like_this.dtype)
