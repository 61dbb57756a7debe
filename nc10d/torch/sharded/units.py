"""A module's parameters divided into units, each of which is gathered on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from nc10d.torch.sharded.flat import Flat, ParamEntry, Use

Units = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]
Members = dict[torch.Tensor, ParamEntry]


def _is_instance(kinds: type | tuple[type, ...], module: nn.Module) -> bool:
    return isinstance(module, kinds)


def members_of(root: nn.Module, units: Units | None) -> dict[nn.Module, Members]:
    """Return the parameters of each unit, with their names and places.

    A parameter that several units share belongs to the root, which is gathered all the time.
    """
    is_unit: Any = units
    if units is None or isinstance(units, (type, tuple)):
        is_unit = partial(_is_instance, units or ())
    homes: dict[torch.Tensor, set[nn.Module]] = {}
    entries: Members = {}

    def visit(module: nn.Module, path: str, unit: nn.Module) -> None:
        for name, x in module._parameters.items():
            if x is not None:
                entry = entries.setdefault(x, ParamEntry(f"{path}{name}", x.shape, []))
                if (module, name) not in entry.places:
                    entry.places.append((module, name))
                homes.setdefault(x, set()).add(unit)
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{path}{name}.", child if is_unit(child) else unit)

    visit(root, "", root)
    found: dict[nn.Module, Members] = {root: {}}
    for x, entry in entries.items():
        unit = next(iter(homes[x])) if len(homes[x]) == 1 else root
        found.setdefault(unit, {})[x] = entry
    return found


class Unit:
    """A unit's flat tensors, which are gathered, read and freed together."""

    def __init__(self, flats: Sequence[Flat]) -> None:
        self.flats = flats
        self.used = False
        """Whether a forward pass with a graph has used the unit, whose backward pass is not over.

        Frozen parameters have no gradients to count by.
        """

    @property
    def in_use(self) -> bool:
        """Whether the unit's backward pass is still to come, or not over."""
        return self.used or any(flat.uses for flat in self.flats)

    def drop_uses(self) -> None:
        """Expect no gradient from earlier uses any more."""
        self.used = False
        for flat in self.flats:
            flat.uses = 0

    def gather(self) -> None:
        """Begin to gather the flat tensors. Does not block."""
        for flat in self.flats:
            flat.gather()

    def show(self, use: Use) -> None:
        """Block until the flat tensors are whole, and let views of them stand for parameters."""
        for flat in self.flats:
            flat.wait()
            flat.set_views(use)

    def remove_views(self) -> None:
        """Let tensors without memory stand for the parameters."""
        for flat in self.flats:
            flat.remove_views()

    def free(self, keep: bool) -> None:
        """Free the flat tensors' memory; with `keep`, only gather anew at the next use."""
        for flat in self.flats:
            flat.remove_views()
            flat.free(keep)
