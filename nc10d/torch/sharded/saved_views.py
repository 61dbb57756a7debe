"""Views of flat tensors that a forward pass saves for its backward pass.

Contract: a flat tensor's memory may be freed before the backward pass. So a saved view is kept as
its place, and the backward pass gathers the tensor before reading the view, whatever the path to
the view: an output, a loss that a layer keeps, a checkpoint, a kept graph. Changing a saved tensor
in place is an error, as in torch; so is changing a shard, for instance by a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from nc10d.torch.sharded.flat import Flat


def saving_views(flats: Iterable[Flat]) -> contextlib.AbstractContextManager[None]:
    """Return a block whose forward pass saves views of these flat tensors as their places.

    Hooks around the block see all other tensors.
    """
    flat_of = {flat.full.untyped_storage()._cdata: flat for flat in flats}
    around: Any = torch._C._autograd._top_saved_tensors_default_hooks(
        True
    )  # the innermost block's: torch calls no others

    def pack(x: torch.Tensor) -> object:
        flat = flat_of.get(x.untyped_storage()._cdata) if x.layout is torch.strided else None
        if flat is not None:
            return _View.of(flat, x)
        # Detached: an output that its own node saves would keep itself alive.
        return around[0](x) if around else (x.detach(), x._version)

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, _View):
            return packed.read()
        if around:
            return around[1](packed)
        x, version = packed
        _require_version(x, version, "a tensor")
        return x

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _require_version(x: torch.Tensor, version: int, what: str) -> None:
    if x._version != version:
        raise RuntimeError(
            f"{what} of shape {tuple(x.shape)} that the backward pass needs has been changed "
            f"in place since the forward pass: it is at version {x._version}, not {version}"
        )


class _View(NamedTuple):
    """A view's place in a flat tensor's memory, and the version of the flat tensor's shard."""

    flat: Flat
    version: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, flat: Flat, x: torch.Tensor) -> _View:
        place = x.storage_offset(), x.shape, x.stride()
        return cls(flat, flat.shard._version, x.dtype, *place, x.is_conj(), x.is_neg())

    def read(self) -> torch.Tensor:
        """Gather the flat tensor if the memory was freed; return the view. Blocks.

        RuntimeError if the shard has been changed since: the gradient would belong to no weights.
        """
        _require_version(self.flat.shard, self.version, "a shard")
        self.flat.wait()
        whole = self.flat.full
        with torch.no_grad():
            x = torch.empty(0, dtype=self.dtype, device=whole.device)
            x = x.set_(whole.untyped_storage(), self.offset, self.shape, self.strides)
            x = x.conj() if self.conjugate else x
            return torch._neg_view(x) if self.negative else x
