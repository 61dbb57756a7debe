"""The forward and backward passes of a fully sharded module: what is gathered, freed and reduced.

Contract: a unit's whole parameters are there from its forward pass's begin to its end, and again in
its backward pass. Its gradients are reduced once all forward uses have theirs, or at the end of the
backward pass. Units are gathered and reduced in the same order on every rank, since all ranks make
the same passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nc10d.group.process_group import ProcessGroup
from nc10d.reducer.left_pass import LeftPass
from nc10d.torch import in_backward
from nc10d.torch.autograd_bridge import at_end_of_backward, in_backward_pass, tensors_in
from nc10d.torch.sharded.flat import Flat, Use
from nc10d.torch.sharded.saved_views import saving_views
from nc10d.torch.uncompiled import in_python
from nc10d.torch.wrapped_module import SHARD, mapped
from nc10d.work import Work


class ShardedPasses:
    """The state of the passes of the module `root`, whose units have the flat tensors `flats_of`.

    The parameters of no unit are those of `root`.
    """

    def __init__(
        self, root: nn.Module, flats_of: Mapping[nn.Module, list[Flat]], group: ProcessGroup
    ) -> None:
        self._root, self._flats_of, self._group = root, flats_of, group
        self._number = 0
        self._left: LeftPass | None = None
        self.flats = [flat for flats in flats_of.values() for flat in flats]
        self._unit_of = {flat: unit for unit, flats in flats_of.items() for flat in flats}
        self.reduces = True
        """Whether backward passes of the next forward passes are reduced."""
        self._reducing = self._announced = self._end_queued = False
        self._inside = 0
        """The number of calls of the module that go on."""
        self._expected = False
        """Whether a forward pass has begun since the latest backward pass has ended."""
        self._postponed: bool | None = None
        """Whether a pass without a graph reduces, if a checkpoint calls it again with one."""
        self._holding = self._creating = False
        """Whether a graph of create_graph may read the units' memory, and this pass makes one."""
        self._order: list[nn.Module] = []
        self._used: set[nn.Module] = set()
        """The units with a use whose backward pass has not ended."""
        self._recording = False
        self._pending: list[tuple[Flat, torch.Tensor, Work, torch.Tensor]] = []
        for unit, flats in flats_of.items():
            for flat in flats:
                flat.on_gradient = self._on_gradient
            if unit is not root:
                # First: other hooks, such as weight_norm's, compute with the parameters.
                unit.register_forward_pre_hook(self._before_unit, prepend=True)
                unit.register_forward_hook(self._after_unit)

    def forward(self, inputs: Any, kwargs: Any) -> Any:
        """Call the module."""
        if not in_backward_pass():
            self._check_shards()
            self._begin()
        elif torch.is_grad_enabled() and self._postponed is not None:
            # A checkpoint around the module calls it again, this time with a graph.
            self._announce(self._postponed)
        self._inside += 1
        try:
            self._before_unit(self._root, ())
            with saving_views(self.flats):
                output = self._without_views(self._root, self._root(*inputs, **kwargs))
        except BaseException:
            self._tell()
            raise
        finally:
            self._inside -= 1
            for flat in self._flats_of.get(self._root, ()):
                flat.remove_views()
        if torch.is_grad_enabled():
            self._hook_backward(self._root, output)
        else:
            self._free(*self._flats_of)
        return output

    def _check_shards(self) -> None:
        """Raise a RuntimeError if a shard has been replaced: nobody would train the other one."""
        for unit, flats in self._flats_of.items():
            for index, flat in enumerate(flats):
                name = f"{SHARD}{index}"
                if unit._parameters.get(name) is not flat.shard:
                    raise RuntimeError(
                        f"{name} of {type(unit).__name__} has been replaced, so it would not be "
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
        self._free(*self._flats_of)  # the values are from before the last step
        self._recording = not self._order
        if torch.is_grad_enabled():
            self._announce(self.reduces)
        else:
            self._postponed = self.reduces

    def _announce(self, reducing: bool) -> None:
        """Announce a backward pass; one in no_sync does not take an earlier announcement back."""
        self._postponed, self._expected = None, True
        self._reducing = self._announced = reducing or self._announced

    @in_python
    def _before_unit(self, unit: nn.Module, inputs: Any) -> None:
        if self._recording and unit not in self._order:
            self._order.append(unit)
        again = in_backward_pass()
        flats = self._flats_of.get(unit, ())
        if not (again or self._inside or self._expected):
            _refuse_gradients(unit, flats)
        for flat in flats:
            flat.gather()
        # Frozen parameters have no gradients to count by.
        is_last = unit not in self._used and not any(flat.uses for flat in flats)
        if not (self._recording or again):
            self._prefetch(unit, 1)
        for flat in flats:
            flat.wait()
            flat.set_views(Use.RECOMPUTED if again else Use.FORWARD)
        if torch.is_grad_enabled() and not again:
            self._used.add(unit)
        # Of several uses, the backward pass comes to the first one last.
        for x in tensors_in(inputs) if is_last and not again else ():
            if x.grad_fn is not None:  # a leaf would keep the hook for all passes
                x.register_hook(lambda _: self._free(unit))

    @in_python
    def _after_unit(self, unit: nn.Module, _inputs: Any, output: Any) -> Any:
        output = self._without_views(unit, output)
        self._hook_backward(unit, output)
        if not in_backward_pass():  # else a checkpoint has called, for the backward pass to come
            self._free(unit)
        return output

    def _without_views(self, unit: nn.Module, output: Any) -> Any:
        """Return an output with copies of the unit's parameters, whose memory will be freed."""
        owned = {flat.full.untyped_storage()._cdata for flat in self._flats_of.get(unit, ())}

        def is_view(x: torch.Tensor) -> bool:
            return x.layout is torch.strided and x.untyped_storage()._cdata in owned

        if not any(map(is_view, tensors_in(output))):
            return output
        return mapped(output, lambda x: x.clone() if is_view(x) else x, deep=True)

    def _hook_backward(self, unit: nn.Module, output: Any) -> None:
        for x in tensors_in(output):
            if x.requires_grad:
                x.register_hook(lambda _: self._before_backward(unit))

    def _before_backward(self, unit: nn.Module) -> None:
        """Gather a unit for its backward pass, and for the checkpoints inside of it."""
        self._queue_end()
        flats = self._flats_of.get(unit, ())
        for flat in flats:
            flat.gather()
        self._prefetch(unit, -1)
        for flat in flats:
            flat.wait()
            with torch.enable_grad():
                flat.set_views(Use.IN_BACKWARD)

    def _prefetch(self, unit: nn.Module, step: int) -> None:
        """Begin to gather the unit that comes next, in the order of the first forward pass."""
        place = self._order.index(unit) + step if unit in self._order else -1
        if 0 <= place < len(self._order):
            for flat in self._flats_of.get(self._order[place], ()):
                flat.gather()

    def _free(self, *units: nn.Module) -> None:
        """Free units, unless the graph of a backward pass reads their memory."""
        for unit in units:
            for flat in self._flats_of.get(unit, ()):
                flat.remove_views()
                flat.free(keep=self._holding)

    def _on_gradient(self, flat: Flat, gradient: torch.Tensor, use: Use) -> None:
        self._queue_end()
        flat.accumulate(gradient)
        if use is Use.FORWARD:
            flat.uses -= 1
        unit = self._unit_of[flat]
        if flat.uses > 0 or use is Use.IN_BACKWARD or unit is self._root:
            return
        if all(other.uses <= 0 for other in self._flats_of[unit]):
            self._free(unit)
        if self._reducing:
            self._reduce(flat)

    def _reduce(self, flat: Flat) -> None:
        if (reduced := flat.reduce()) is not None:
            self._pending.append((flat, *reduced))

    def _queue_end(self) -> None:
        if not self._end_queued:
            self._end_queued = True
            # With create_graph, the new graph reads the memory of the units, without a hook.
            self._creating = torch.is_grad_enabled()
            self._holding |= self._creating
            at_end_of_backward(self._end_backward, self._leave)

    def _leave(self) -> None:
        """Drop the state of a backward pass that an exception has ended on this rank."""
        self._end_queued = self._announced = False
        self._used.clear()
        for flat in self.flats:
            flat.uses = 0
        self._tell()

    def _tell(self) -> None:
        """Let the other ranks know of an exception in a pass; see LeftPass."""
        if self._left is None:
            shard = self.flats[0].shard
            what = f"pass {self._number} of fully_shard({type(self._root).__name__})"
            self._left = LeftPass(self._group, what, None if shard.is_cpu else shard.new_empty(0))

    def _end_backward(self) -> None:
        """Set the shards' gradients to the means, and free what a pass has not used."""
        self._end_queued = self._announced = self._expected = False
        self._used.clear()
        for flat in self.flats:
            if self._reducing:
                self._reduce(flat)  # parameters that not all outputs of the pass have used
            else:
                flat.keep()
            flat.uses = 0
        pending, self._pending = self._pending, []
        for flat, own, work, _ in pending:
            work.wait()
            mean = own.to(flat.shard.dtype)
            flat.shard.grad = mean if flat.shard.grad is None else flat.shard.grad + mean
            if in_backward.optimizers(flat.shard):
                in_backward.step(flat.shard)
        self._holding = self._creating
        self._free(*self._flats_of)


def _refuse_gradients(unit: nn.Module, flats: Sequence[Flat]) -> None:
    """Raise a RuntimeError if a unit, called outside of any pass, would have gradients."""
    if torch.is_grad_enabled() and any(flat.shard.requires_grad for flat in flats):
        raise RuntimeError(
            f"{type(unit).__name__} was called past the module that fully_shard returned, which "
            "averages gradients: call that module, or use torch.no_grad()"
        )
