"""Parameters as a flat tensor that is divided over a group: each rank keeps a shard.

Contract: the shard is a parameter. The whole tensor has memory from `gather` to `free`. Its views
stand for the parameters in a pass. The storage stays the same object, so views are valid again
after the next `gather`. Views that autograd saves are kept as places (saved_views.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.function import FunctionCtx

from nc10d.group.process_group import ProcessGroup
from nc10d.reducer.hooks.grad_bucket import require_work
from nc10d.work import Work


class ParamEntry(NamedTuple):
    """A parameter: name, shape, and the modules and attributes where it is used."""

    name: str
    shape: torch.Size
    places: list[tuple[torch.nn.Module, str]]


class Layout(NamedTuple):
    """Where parameters lie in a flat tensor with `size * length` elements."""

    entries: Sequence[ParamEntry]
    length: int
    size: int

    @property
    def counts(self) -> list[int]:
        """Each parameter's elements, then those that fill up the last shard."""
        counts = [entry.shape.numel() for entry in self.entries]
        return [*counts, self.length * self.size - sum(counts)]

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of a flat tensor, by parameter name."""
        parts = torch.split(flat, self.counts)
        rows = zip(self.entries, parts, strict=False)
        return {entry.name: part.view(entry.shape) for entry, part in rows}

    def joined(self, values: dict[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor with values; parameters without a value have zeros."""
        flat = like.new_zeros(self.length * self.size)
        for name, part in self.split(flat).items():
            if name in values:
                part.copy_(values[name])
        return flat


def check_shapes(
    expected: Mapping[str, torch.Size | None], found: Mapping[str, torch.Size | None]
) -> None:
    """Raise a ValueError that names the first difference between names and shapes."""
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"{name}: the module has {_in_words(expected.get(name))}, the state "
                f"{_in_words(found.get(name))}: a state fits modules with the same parameters only"
            )


def _in_words(shape: torch.Size | None) -> str:
    return "no such parameter" if shape is None else f"the shape {tuple(shape)}"


class Use(Enum):
    """The reason for which views were set; the views' gradient arrives with it."""

    FORWARD = auto()
    """A forward pass."""
    RECOMPUTED = auto()
    """A checkpoint around the unit runs the forward pass again."""
    IN_BACKWARD = auto()
    """The unit's own backward pass runs; checkpoints inside the unit read these views."""


class Flat:
    """Parameters with a single dtype, in a flat tensor; `shard` is this rank's part.

    `dtypes` are for the whole tensor and for the reduction of its gradient, None for the
    parameters' own.
    """

    on_gradient: Callable[[Flat, torch.Tensor, Use], None]
    """Takes a whole gradient in a backward pass; set before the first pass."""

    def __init__(
        self,
        entries: Sequence[ParamEntry],
        params: Sequence[torch.Tensor],
        group: ProcessGroup,
        dtypes: tuple[torch.dtype | None, torch.dtype | None],
    ) -> None:
        size, first = group.size(), params[0]
        count = sum(x.numel() for x in params)
        self.layout = Layout(entries, max(1, -(-count // size)), size)
        self.group, self._rank = group, group.rank
        values = {entry.name: x.detach() for entry, x in zip(entries, params, strict=True)}
        with torch.no_grad():
            own = self.own(self.layout.joined(values, first)).clone()
        self.shard = torch.nn.Parameter(own, requires_grad=first.requires_grad)
        floating = first.is_floating_point()
        self.dtype = (dtypes[0] if floating else None) or first.dtype
        self._reduce_dtype = (dtypes[1] if floating else None) or self.dtype
        self.full = torch.empty(self.layout.length * size, dtype=self.dtype, device=first.device)
        self._bytes = self.full.untyped_storage().nbytes()
        self._held: torch.Tensor | None = None
        self._work: Work | None = None
        self._gathered, self._has_memory = False, True
        self.uses = 0
        """The number of forward uses whose gradient has not come yet."""
        self._current: torch.Tensor | None = None
        self._earlier: torch.Tensor | None = None
        empty = partial(torch.empty, dtype=self.shard.dtype, device="meta")
        self._empty = {entry.name: empty(entry.shape) for entry in entries}
        self._viewed = True
        self.free()
        self.remove_views()

    def own(self, flat: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """Return a rank's part of a flat tensor, by default this rank's."""
        rank = self._rank if rank is None else rank
        return flat[rank * self.layout.length : (rank + 1) * self.layout.length]

    def gather(self) -> None:
        """Begin to gather the whole tensor, unless already there. Does not block."""
        if self._gathered:
            return
        self._gathered = self._has_memory = True
        self.full.untyped_storage().resize_(self._bytes)
        self._held = self.shard.detach().to(self.dtype)
        work = self.group.all_gather_into_tensor(self.full, self._held, async_op=True)
        self._work = require_work(work)

    def wait(self) -> None:
        """Gather the whole tensor unless it is there, and block until it is."""
        self.gather()
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            self._held = None

    def free(self, keep: bool = False) -> None:
        """Free the whole tensor's memory; with `keep`, only gather anew at the next use."""
        if self._work is not None:
            self.wait()
        self._gathered = False
        if not keep and self._has_memory:
            self._has_memory = False
            self.full.untyped_storage().resize_(0)

    def set_views(self, use: Use) -> None:
        """Let views of the whole tensor stand for the parameters, with autograd's history."""
        if use is Use.FORWARD:
            self.uses += torch.is_grad_enabled() and self.shard.requires_grad
        self._viewed = True
        self.place(self.layout.split(_Whole.apply(self.shard, self, use)))

    def place(self, values: dict[str, torch.Tensor]) -> None:
        """Set the modules' attributes to values."""
        for entry in self.layout.entries:
            for module, name in entry.places:
                module.__dict__[name] = values[entry.name]  # nn.Module's setattr is slow

    def remove_views(self) -> None:
        """Let tensors without memory, in the same shapes, stand for the parameters."""
        if self._viewed:
            self._viewed = False
            self.place(self._empty)

    def accumulate(self, gradient: torch.Tensor) -> None:
        """Add a whole gradient to those in this backward pass, in the reductions' precision."""
        self._current = _sum(self._current, gradient.detach().to(self._reduce_dtype))

    def forget(self) -> None:
        """Drop the gradients from a backward pass that was left."""
        self._current = None

    def keep(self) -> None:
        """Add this backward pass's gradient to that of earlier passes, without a reduction."""
        self._earlier, self._current = _sum(self._earlier, self._current), None

    def reduce(self) -> tuple[torch.Tensor, Work, torch.Tensor] | None:
        """Begin to average the whole gradient over the group; None if there is none.

        Returns this rank's part, the Work, and the memory that has to stay until that has ended.
        """
        self.keep()
        gradient, self._earlier = self._earlier, None
        if gradient is None:
            return None
        whole = gradient / self.layout.size
        own = whole.new_empty(self.layout.length)
        work = self.group.reduce_scatter_tensor(own, whole, async_op=True)
        return own, require_work(work), whole

    def whole(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the flat tensor of which every rank has a shard, on every rank."""
        flat = shard.new_empty(self.layout.length * self.layout.size)
        self.group.all_gather_into_tensor(flat, shard.detach().contiguous())
        return flat


def _sum(x: torch.Tensor | None, y: torch.Tensor | None) -> torch.Tensor | None:
    return x + y if x is not None and y is not None else x if y is None else y


class _Whole(torch.autograd.Function):
    """From the shard to the whole tensor; the gradient goes to `Flat.on_gradient`."""

    @staticmethod
    def forward(ctx: FunctionCtx, _shard: torch.Tensor, flat: Flat, use: Use) -> torch.Tensor:
        ctx.flat, ctx.use = flat, use
        return flat.full.view(-1)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.flat.on_gradient(ctx.flat, gradient, ctx.use)
        return None, None, None
