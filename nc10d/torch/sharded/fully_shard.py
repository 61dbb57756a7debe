"""fully_shard: a module whose parameters are whole only while they are used (ZeRO-3).

    model = nc10d.torch.fully_shard(model, units=torch.nn.TransformerEncoderLayer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)     # of this rank's shards
    loss(model(x)).backward()
    optimizer.step()

Contract: a unit is a submodule. Its parameters are gathered before its forward and its backward
pass, and freed behind each; its gradients are averaged and divided while the backward pass goes on.
Ranks gather and reduce in the same order, since all make the same passes. The parameters of no unit
belong to the module as a whole and stay gathered until the end of the backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from nc10d.group.process_group import ProcessGroup
from nc10d.torch.autograd_bridge import in_backward_pass, tensors_in
from nc10d.torch.backend.groups import own_group
from nc10d.torch.sharded.flat import Flat, ParamEntry, Use
from nc10d.torch.sharded.saved_views import saving_views
from nc10d.torch.wrapped_module import mapped, same_everywhere
from nc10d.work import Work

Units = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]
Members = dict[torch.Tensor, ParamEntry]
SHARD = "_flat_shard_"
"""The names of shards begin so; a unit has a shard for each dtype and kind of its parameters."""


def fully_shard(
    module: nn.Module,
    units: Units | None = None,
    process_group: Any = None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> FullyShardedModule:
    """Divide the parameters of `module`, in place, over a group; return the module to train.

    `units` are types of submodules, or a function that returns whether a submodule is a unit. A
    parameter belongs to the innermost unit around it. Every rank gets rank 0's values. Whole
    parameters have `param_dtype`, and gradients are averaged in `reduce_dtype`; by default both
    are the parameters' own. Floating-point inputs are cast.

    Blocks until all ranks call. ValueError if a submodule is shared by units, or nothing is there.
    """
    return FullyShardedModule(module, units, own_group(process_group), (param_dtype, reduce_dtype))


class FullyShardedModule(nn.Module):
    """A module with divided parameters; `parameters()` are this rank's shards."""

    def __init__(
        self,
        module: nn.Module,
        units: Units | None,
        group: ProcessGroup,
        dtypes: tuple[torch.dtype | None, torch.dtype | None],
    ) -> None:
        super().__init__()
        self.process_group, self._dtypes = group, dtypes
        self.param_names = [name for name, _ in module.named_parameters()]
        if not self.param_names:
            raise ValueError(
                f"{type(module).__name__} has no parameters: there is nothing to divide"
            )
        same_everywhere(group, {**dict(module.named_parameters()), **dict(module.named_buffers())})
        self.module = module
        # A shared tensor has several names in a state; some buffers have none.
        tensors = (*module.named_parameters(), *module.named_buffers())
        first_names = {x: name for name, x in tensors}
        kept = module.state_dict(keep_vars=True)
        self._state_names = {
            name: first_names[x]
            for name, x in kept.items()
            if torch.is_tensor(x) and x in first_names
        }
        self._order: list[nn.Module] = []
        self._recording = self._reducing = self._announced = self._end_queued = False
        self._reduces = True
        self._postponed: bool | None = None
        """Whether a pass without a graph reduces, if a checkpoint calls it again with one."""
        self._holding = self._creating = False
        """Whether a graph of create_graph may read the units' memory, and this pass makes one."""
        self._pending: list[tuple[Flat, torch.Tensor, Work, torch.Tensor]] = []
        self._flats: dict[nn.Module, list[Flat]] = {}
        for unit, rows in _members(module, units).items():
            self._flats[unit] = self._divided(unit, rows)
            if unit is not module:
                # First: other hooks, such as weight_norm's, compute with the parameters.
                unit.register_forward_pre_hook(self._before_unit, prepend=True)
                unit.register_forward_hook(self._after_unit)
        self._unit_of = {flat: unit for unit, flats in self._flats.items() for flat in flats}

    def _divided(self, unit: nn.Module, rows: Members) -> list[Flat]:
        kinds: dict[Any, list[torch.Tensor]] = {}
        for x in rows:
            kinds.setdefault((x.dtype, x.device, x.requires_grad), []).append(x)
        flats = []
        for index, params in enumerate(kinds.values()):
            entries = [rows[x] for x in params]
            for entry in entries:
                for owner, name in entry.places:
                    del owner._parameters[name]
            flat = Flat(entries, params, self.process_group, self._dtypes, self._on_gradient)
            unit.register_parameter(f"{SHARD}{index}", flat.shard)
            flats.append(flat)
        return flats

    def flats(self) -> list[Flat]:
        """Return all flat tensors, in the same order on every rank."""
        return [flat for flats in self._flats.values() for flat in flats]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, on all ranks."""
        if not in_backward_pass():
            self._begin()
        elif torch.is_grad_enabled() and self._postponed is not None:
            # A checkpoint around the module calls it again, this time with a graph.
            self._announce(self._postponed)
        if self._dtypes[0] is not None:
            inputs, kwargs = mapped((inputs, kwargs), self._cast)
        self._before_unit(self.module, ())
        try:
            with saving_views(self.flats()):
                output = self._without_views(self.module, self.module(*inputs, **kwargs))
        finally:
            for flat in self._flats.get(self.module, ()):
                flat.remove_views()
        if torch.is_grad_enabled():
            self._hook_backward(self.module, output)
        else:
            self._free(*self._flats)
        return output

    def _begin(self) -> None:
        """Begin a forward pass; drop what a backward pass has left that an exception ended."""
        left, self._end_queued = self._end_queued, False
        self._announced = self._announced and not left
        self._pending.clear()
        for flat in self.flats():
            flat.forget()
            flat.uses = 0 if left else flat.uses
        self._free(*self._flats)  # the values are from before the last step
        self._recording = not self._order
        if torch.is_grad_enabled():
            self._announce(self._reduces)
        else:
            self._postponed = self._reduces

    def _announce(self, reducing: bool) -> None:
        """Announce a backward pass; one in no_sync does not take an earlier announcement back."""
        self._postponed = None
        self._reducing = self._announced = reducing or self._announced

    def _cast(self, x: Any) -> Any:
        floating = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(self._dtypes[0]) if floating else x

    def _before_unit(self, unit: nn.Module, inputs: Any) -> None:
        if self._recording and unit not in self._order:
            self._order.append(unit)
        flats = self._flats.get(unit, ())
        for flat in flats:
            flat.gather()
        again, is_last = in_backward_pass(), not any(flat.uses for flat in flats)
        if not (self._recording or again):
            self._prefetch(unit, 1)
        for flat in flats:
            flat.wait()
            flat.set_views(Use.RECOMPUTED if again else Use.FORWARD)
        # Of several uses, the backward pass comes to the first one last.
        for x in tensors_in(inputs) if is_last and not again else ():
            if x.grad_fn is not None:  # a leaf would keep the hook for all passes
                x.register_hook(lambda _: self._free(unit))

    def _after_unit(self, unit: nn.Module, _inputs: Any, output: Any) -> Any:
        output = self._without_views(unit, output)
        self._hook_backward(unit, output)
        if not in_backward_pass():  # else a checkpoint has called, for the backward pass to come
            self._free(unit)
        return output

    def _without_views(self, unit: nn.Module, output: Any) -> Any:
        """Return an output with copies of the unit's parameters, whose memory will be freed."""
        owned = {flat.full.untyped_storage()._cdata for flat in self._flats.get(unit, ())}

        def is_view(x: torch.Tensor) -> bool:
            return x.layout is torch.strided and x.untyped_storage()._cdata in owned

        if not any(map(is_view, tensors_in(output))):
            return output
        return mapped(output, lambda x: x.clone() if is_view(x) else x)

    def _hook_backward(self, unit: nn.Module, output: Any) -> None:
        for x in tensors_in(output):
            if x.requires_grad:
                x.register_hook(lambda _: self._before_backward(unit))

    def _before_backward(self, unit: nn.Module) -> None:
        """Gather a unit for its backward pass, and for the checkpoints inside of it."""
        self._queue_end()
        flats = self._flats.get(unit, ())
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
            for flat in self._flats.get(self._order[place], ()):
                flat.gather()

    def _free(self, *units: nn.Module) -> None:
        """Free units, unless the graph of a backward pass reads their memory."""
        for unit in units:
            for flat in self._flats.get(unit, ()):
                flat.remove_views()
                flat.free(keep=self._holding)

    def _on_gradient(self, flat: Flat, gradient: torch.Tensor, use: Use) -> None:
        self._queue_end()
        flat.accumulate(gradient)
        if use is Use.FORWARD:
            flat.uses -= 1
        unit = self._unit_of[flat]
        if flat.uses > 0 or use is Use.IN_BACKWARD or unit is self.module:
            return
        if all(other.uses <= 0 for other in self._flats[unit]):
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
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """Set the shards' gradients to the means, and free what a pass has not used."""
        self._end_queued = self._announced = False
        for flat in self.flats():
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
        self._holding = self._creating
        self._free(*self._flats)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on this rank, for forward passes inside of the block.

        The next pass outside of the block reduces the sums. They take the memory of the module.
        """
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the plain module's state_dict, by the same names.

        State that is not a parameter or buffer is left out. All ranks call. Blocks.
        """
        found = {name: x.detach().clone() for name, x in self.module.named_buffers()}
        for flat in self.flats():
            found.update(flat.layout.split(flat.whole(flat.shard)))
        return {name: found[first] for name, first in self._state_names.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Take this rank's shards, and buffers, from the state of a whole module.

        Of a parameter with several names, the value of the last name counts. ValueError, before
        anything changes, if names or shapes differ.
        """
        shapes = {e.name: e.shape for flat in self.flats() for e in flat.layout.entries}
        buffers = dict(self.module.named_buffers())
        shapes.update({name: x.shape for name, x in buffers.items()})
        expected = {name: shapes[first] for name, first in self._state_names.items()}
        check_shapes(expected, {name: x.shape for name, x in state_dict.items()})
        values = {first: state_dict[name] for name, first in self._state_names.items()}
        for flat in self.flats():
            flat.shard.copy_(flat.own(flat.layout.joined(values, flat.shard)))
        for name in buffers.keys() & values.keys():
            buffers[name].copy_(values[name])


def check_shapes(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Raise a ValueError that names the first difference between names and shapes."""
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"{name}: the module has {_in_words(expected.get(name))}, the state "
                f"{_in_words(found.get(name))}: a state fits modules with the same parameters only"
            )


def _in_words(shape: Any) -> str:
    return "no such parameter" if shape is None else f"the shape {tuple(shape)}"


def _is_instance(kinds: Any, module: nn.Module) -> bool:
    return isinstance(module, kinds)


def _members(root: nn.Module, units: Units | None) -> dict[nn.Module, Members]:
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
