"""A fully sharded module's forward and backward passes: when units are gathered, freed and reduced.

Contract: a unit's parameters are whole during the unit's forward pass, and again during its
backward pass. The unit's gradients are reduced once all forward uses have theirs, or at the latest
when the backward pass ends. Every rank gathers and reduces units in the same order, since all ranks
make the same passes. phase.py has a module's states and events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from nc10d.group.process_group import ProcessGroup
from nc10d.reducer.left_pass import LeftPass
from nc10d.torch import in_backward
from nc10d.torch.autograd_bridge import at_end_of_backward, in_backward_pass, tensors_in
from nc10d.torch.sharded.flat import Flat, Use
from nc10d.torch.sharded.phase import PassState, Phase
from nc10d.torch.sharded.saved_views import saving_views
from nc10d.torch.sharded.units import Unit
from nc10d.torch.uncompiled import in_python
from nc10d.torch.wrapped_module import SHARD, mapped
from nc10d.work import Work

T = TypeVar("T")


class _Reduction(NamedTuple):
    """A reduction under way: this rank's part, and the memory that the reduction reads."""

    flat: Flat
    own: torch.Tensor
    work: Work
    whole: torch.Tensor


class ShardedPasses:
    """Gathers, frees and reduces the units of the module `root`; a unit's flats are in `flats_of`.

    Parameters outside all units belong to `root`. A forward pass that begins while `reduces` is
    false has a backward pass that accumulates whole gradients instead of reducing them.
    """

    def __init__(
        self, root: nn.Module, flats_of: Mapping[nn.Module, list[Flat]], group: ProcessGroup
    ) -> None:
        self._root, self._group = root, group
        self._units = {module: Unit(flats) for module, flats in flats_of.items()}
        self.flats = [flat for flats in flats_of.values() for flat in flats]
        self.reduces = True
        self._state = PassState()
        self._number = 0
        self._calls = 0
        """How many calls on the module are under way."""
        self._left: LeftPass | None = None
        self._order: list[Unit] = []
        """The units in the order that the first forward pass records."""
        self._recording = False
        self._pending: list[_Reduction] = []
        for module, unit in self._units.items():
            for flat in unit.flats:
                flat.on_gradient = partial(self._on_gradient, unit)
            if module is not root:
                # First: other hooks, such as weight_norm's, compute with the parameters.
                module.register_forward_pre_hook(self._before_unit, prepend=True)
                module.register_forward_hook(self._after_unit)

    def forward(self, inputs: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """Call the module."""
        if not in_backward_pass():
            self._check_shards()
            self._begin()
        elif torch.is_grad_enabled():
            self._state.recompute()
        self._calls += 1
        root = self._units[self._root]
        try:
            self._before_unit(self._root, ())
            with saving_views(self.flats):
                output = self._without_views(root, self._root(*inputs, **kwargs))
        except BaseException:
            self._state.leave(Phase.EXPECTED)
            self._tell()
            raise
        finally:
            self._calls -= 1
            root.remove_views()
        if torch.is_grad_enabled():
            self._hook_backward(root, output)
        else:
            self._free(self._units.values())
        return output

    def _check_shards(self) -> None:
        """Raise a RuntimeError if a shard has been replaced: nobody would train the other one."""
        for module, unit in self._units.items():
            for index, flat in enumerate(unit.flats):
                name = f"{SHARD}{index}"
                if module._parameters.get(name) is not flat.shard:
                    raise RuntimeError(
                        f"{name} of {type(module).__name__} has been replaced, so it would not be "
                        "trained: load states without assign=True"
                    )

    def _begin(self) -> None:
        """Begin a forward pass; wait until all ranks have left a pass that this rank has left."""
        if self._left is not None:
            self._left.wait()
            self._left = None
            self._pending.clear()
        self._number += 1
        for flat in self.flats:
            flat.forget()
            if in_backward.optimizers(flat.shard):  # they step at the end of the backward pass
                in_backward.take_over([flat.shard])
        # Gather anew: whole parameters have the values from before the last step.
        self._free(self._units.values())
        self._recording = not self._order
        self._state.forward(self.reduces, torch.is_grad_enabled())

    @in_python
    def _before_unit(self, module: nn.Module, inputs: object) -> None:
        unit, again = self._units[module], in_backward_pass()
        if self._recording and unit not in self._order:
            self._order.append(unit)
        if not (again or self._calls) and self._state.phase is Phase.IDLE:
            _refuse_gradients(module, unit)
        unit.gather()
        is_last = not unit.in_use
        if not (self._recording or again):
            self._prefetch(unit, 1)
        unit.show(Use.RECOMPUTED if again else Use.FORWARD)
        if torch.is_grad_enabled() and not again:
            unit.used = True
        # The backward pass reaches a unit's first use last.
        for x in tensors_in(inputs) if is_last and not again else ():
            if x.grad_fn is not None:  # a leaf would keep the hook for all passes
                x.register_hook(lambda _: self._free([unit]))

    @in_python
    def _after_unit(self, module: nn.Module, _inputs: object, output: T) -> T:
        unit = self._units[module]
        output = self._without_views(unit, output)
        self._hook_backward(unit, output)
        if not in_backward_pass():  # else a checkpoint has called, for the backward pass to come
            self._free([unit])
        return output

    def _without_views(self, unit: Unit, output: T) -> T:
        """Return an output with copies of the unit's parameters, whose memory will be freed."""
        owned = {flat.full.untyped_storage()._cdata for flat in unit.flats}

        def is_view(x: torch.Tensor) -> bool:
            return x.layout is torch.strided and x.untyped_storage()._cdata in owned

        if not any(map(is_view, tensors_in(output))):
            return output
        return mapped(output, lambda x: x.clone() if is_view(x) else x, deep=True)

    def _hook_backward(self, unit: Unit, output: object) -> None:
        for x in tensors_in(output):
            if x.requires_grad:
                x.register_hook(lambda _: self._before_backward(unit))

    def _before_backward(self, unit: Unit) -> None:
        """Gather a unit for its backward pass, and for the checkpoints inside the unit."""
        self._queue_end()
        unit.gather()
        self._prefetch(unit, -1)
        with torch.enable_grad():
            unit.show(Use.IN_BACKWARD)

    def _prefetch(self, unit: Unit, step: int) -> None:
        """Begin to gather the unit that comes next in the first forward pass's order."""
        place = self._order.index(unit) + step if unit in self._order else -1
        if 0 <= place < len(self._order):
            self._order[place].gather()

    def _free(self, units: Iterable[Unit]) -> None:
        """Free units; they keep their memory while a backward pass's graph may read it."""
        for unit in units:
            unit.free(keep=self._state.holds_memory)

    def _on_gradient(self, unit: Unit, flat: Flat, gradient: torch.Tensor, use: Use) -> None:
        self._queue_end()
        flat.accumulate(gradient)
        if use is Use.FORWARD:
            flat.uses -= 1
        if flat.uses > 0 or use is Use.IN_BACKWARD or unit is self._units[self._root]:
            return
        if all(other.uses <= 0 for other in unit.flats):
            self._free([unit])
        if self._state.reducing:
            self._reduce(flat)

    def _reduce(self, flat: Flat) -> None:
        if (reduced := flat.reduce()) is not None:
            self._pending.append(_Reduction(flat, *reduced))

    def _queue_end(self) -> None:
        # With create_graph, the new graph reads the units' memory, without a hook.
        if self._state.backward(torch.is_grad_enabled()):
            at_end_of_backward(self._end_backward, self._leave)

    def _leave(self) -> None:
        """Drop the state of a backward pass that an exception has ended on this rank."""
        self._state.leave(Phase.RUNNING)
        for unit in self._units.values():
            unit.drop_uses()
        self._tell()

    def _tell(self) -> None:
        """Let the other ranks know of an exception in a pass; see LeftPass."""
        if self._left is None:
            shard = self.flats[0].shard
            what = f"pass {self._number} of fully_shard({type(self._root).__name__})"
            self._left = LeftPass(self._group, what, None if shard.is_cpu else shard.new_empty(0))

    def _end_backward(self) -> None:
        """Set the shards' gradients to the means, and free what a pass has not used."""
        for unit in self._units.values():
            unit.drop_uses()
            for flat in unit.flats:
                if self._state.reducing:
                    self._reduce(flat)  # parameters that not all outputs in the pass have used
                else:
                    flat.keep()
        pending, self._pending = self._pending, []
        for flat, own, work, _ in pending:
            work.wait()
            mean = own.to(flat.shard.dtype)
            flat.shard.grad = mean if flat.shard.grad is None else flat.shard.grad + mean
            if in_backward.optimizers(flat.shard):
                in_backward.step(flat.shard)
        self._state.end()
        self._free(self._units.values())


def _refuse_gradients(module: nn.Module, unit: Unit) -> None:
    """Raise a RuntimeError if a unit, called outside any pass, would have gradients."""
    if torch.is_grad_enabled() and any(flat.shard.requires_grad for flat in unit.flats):
        raise RuntimeError(
            f"{type(module).__name__} was called past the module that fully_shard returned, which "
            "averages gradients: call that module, or use torch.no_grad()"
        )
