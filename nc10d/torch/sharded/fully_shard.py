"""fully_shard: a module whose parameters are whole only while they are used (ZeRO-3).

    model = nc10d.torch.fully_shard(model, units=torch.nn.TransformerEncoderLayer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)     # of this rank's shards
    loss(model(x)).backward()
    optimizer.step()

Contract: a unit is a submodule. Its parameters are gathered before its forward and its backward
pass, and freed behind each; the gradients are averaged and divided while the backward pass goes on.
Ranks gather and reduce in the same order, since all make the same passes. Parameters outside all
units belong to the module as a whole and stay gathered until the backward pass ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self

import torch
from torch import nn

from nc10d.ops import MAX, SUM
from nc10d.torch import in_backward
from nc10d.torch.backend.groups import AnyGroup, meant_group, own_group
from nc10d.torch.sharded.flat import Flat, check_shapes
from nc10d.torch.sharded.passes import ShardedPasses
from nc10d.torch.sharded.units import Members, Units, members_of
from nc10d.torch.wrapped_module import SHARD, mapped, refuse_shards, same_everywhere


def fully_shard(
    module: nn.Module,
    units: Units | None = None,
    process_group: AnyGroup | None = None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> FullyShardedModule:
    """Divide the parameters of `module`, in place, over a group; return the module to train.

    `units` are types of submodules, or a function that returns whether a submodule is a unit. A
    parameter belongs to the innermost unit around it. Every rank gets rank 0's values. Whole
    parameters have `param_dtype`, and gradients are averaged in `reduce_dtype`; by default both
    are the parameters' own. Floating-point inputs are cast, also in tuples, lists and dicts.

    Blocks until all ranks call. ValueError for a module without parameters, or with a part that is
    divided already, for embeddings with sparse gradients or `max_norm`, and for parameters with an
    optimizer in the backward pass.
    """
    return FullyShardedModule(
        module, units, meant_group(process_group), (param_dtype, reduce_dtype)
    )


def _refuse_undividable(module: nn.Module) -> None:
    """Raise a ValueError for what needs whole parameters: some embeddings and optimizers."""
    for name, x in module.named_modules():
        if isinstance(x, (nn.Embedding, nn.EmbeddingBag)) and (x.sparse or x.max_norm is not None):
            raise ValueError(
                f"{name or type(x).__name__} has sparse=True or max_norm, which fully_shard does "
                "not support: use DistributedDataParallel, or an embedding without them"
            )
    for name, parameter in module.named_parameters():
        if in_backward.optimizers(parameter):
            raise ValueError(
                f"{name} has an optimizer that steps in the backward pass, of the whole parameter: "
                "call apply_optimizer_in_backward on the shards, after fully_shard"
            )


def _wide(x: torch.Tensor) -> torch.dtype | None:
    """Return the precision in which a norm is taken, at least float32; None: the tensor's own."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None


class FullyShardedModule(nn.Module):
    """A module with divided parameters; `parameters()` are this rank's shards."""

    def __init__(
        self,
        module: nn.Module,
        units: Units | None,
        process_group: AnyGroup | None,
        dtypes: tuple[torch.dtype | None, torch.dtype | None],
    ) -> None:
        super().__init__()
        group = self._group = own_group(process_group)
        self.process_group, self._dtypes = process_group, dtypes
        self.param_names = [name for name, _ in module.named_parameters()]
        if not self.param_names:
            raise ValueError(
                f"{type(module).__name__} has no parameters: there is nothing to divide"
            )
        refuse_shards(self.param_names)
        _refuse_undividable(module)
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
        flats_of = {
            unit: self._divided(unit, rows) for unit, rows in members_of(module, units).items()
        }
        self._passes = ShardedPasses(module, flats_of, group)

    def _divided(self, unit: nn.Module, rows: Members) -> list[Flat]:
        kinds: dict[object, list[torch.Tensor]] = {}
        for x in rows:
            kinds.setdefault((x.dtype, x.device, x.requires_grad), []).append(x)
        flats = []
        for index, params in enumerate(kinds.values()):
            entries = [rows[x] for x in params]
            for entry in entries:
                for owner, name in entry.places:
                    del owner._parameters[name]
            flat = Flat(entries, params, self._group, self._dtypes)
            unit.register_parameter(f"{SHARD}{index}", flat.shard)
            flats.append(flat)
        return flats

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Of `to`, `double`, `cuda` and kin. Flat tensors keep the dtype and device they began with.
        for flat in self.flats():
            shard = flat.shard
            new = fn(torch.zeros(1, dtype=shard.dtype, device=shard.device))
            if (new.dtype, new.device) != (shard.dtype, shard.device):
                raise RuntimeError(
                    f"a module of fully_shard stays {shard.dtype} on {shard.device}: convert or "
                    "move the plain module before fully_shard"
                )
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a module of fully_shard can't be copied or pickled, since each rank has a part of it: "
            "use its full_state_dict()"
        )

    def flats(self) -> list[Flat]:
        """Return all flat tensors, in the same order on every rank."""
        return self._passes.flats

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Call the module, on all ranks."""
        if self._dtypes[0] is not None:
            inputs, kwargs = mapped((inputs, kwargs), self._cast)
        return self._passes.forward(inputs, kwargs)

    def _cast(self, x: torch.Tensor) -> torch.Tensor:
        floating = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(self._dtypes[0]) if floating else x

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on this rank, for forward passes inside the block.

        The next pass outside the block reduces the sums. They take the module's memory.
        """
        before, self._passes.reduces = self._passes.reduces, False
        try:
            yield
        finally:
            self._passes.reduces = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; return the norm before.

        The norm is over all gradients of all ranks' shards, as a float32 tensor. A shard without a
        gradient counts as zeros. All ranks call. Blocks.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type must be positive, got {norm_type}")
        found = [x.grad for x in self.parameters() if x.grad is not None]
        norms = [torch.linalg.vector_norm(x, norm_type, dtype=_wide(x)) for x in found]
        total = torch.zeros(1, dtype=torch.float64, device=self.flats()[0].shard.device)
        largest = norm_type == float("inf")
        for norm in (each.to(total) for each in norms):
            total = torch.maximum(total, norm) if largest else total + norm**norm_type
        self._group.all_reduce(total, MAX if largest else SUM)
        norm = total[0] if largest else total[0] ** (1.0 / norm_type)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for x in found:
            x.mul_(scale.to(x.device))
        return norm.float()

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors in the plain module's state_dict, by the same names.

        State that is not a parameter or buffer is left out. All ranks call. Blocks.
        """
        found = {name: x.detach().clone() for name, x in self.module.named_buffers()}
        for flat in self.flats():
            found.update(flat.layout.split(flat.whole(flat.shard)))
        return {name: found[first] for name, first in self._state_names.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Take this rank's shards, and buffers, from a whole module's state.

        For a parameter with several names, the last name's value counts. ValueError, before
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
