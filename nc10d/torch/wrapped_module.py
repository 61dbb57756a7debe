"""The module that DDP wraps: its devices, its parameters and buffers, and rank 0's values for them.

Contract: parameters and buffers come in torch's order. A shared parameter is listed once, and names
that the module asks to ignore are left out. Devices follow torch's rules for `device_ids`; this
needs no GPU, since only the `device` attribute of tensors is read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from nc10d.cuda import ordinal
from nc10d.group.process_group import ProcessGroup
from nc10d.torch import in_backward

_KINDS = {"cpu", "cuda"}
_OPTIMIZERS, _TRAINS = methodcaller("get", in_backward.MARK, ()), attrgetter("requires_grad")
T = TypeVar("T")
Device: TypeAlias = int | str | torch.device
Tables = Sequence[dict[str, torch.Tensor | None]]
"""Layers' dicts, each with a layer's parts by name."""
SHARD = "_flat_shard_"
"""The names of fully_shard's parameters begin so: shards, which differ between ranks."""
_C_NAMES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
"""The names of dtypes in torch's DDP logging data: C++ types."""


class Placement(NamedTuple):
    """A module's devices, as in torch's attributes with the same names.

    Both are None for a module on the CPU or on several devices, and for a module whose caller moves
    the inputs.
    """

    device_ids: list[int] | None = None
    output_device: int | None = None

    def moved(self, value: T) -> T:
        """Return inputs on the module's device, or unchanged without `device_ids`; see `moved`."""
        if self.device_ids is None:
            return value
        return moved(value, torch.device("cuda", self.device_ids[0]))


def placement(
    params: Iterable[torch.Tensor],
    device_ids: Sequence[Device] | None,
    output_device: Device | None,
) -> Placement:
    """Return the placement for a module with these parameters; ValueError as torch's DDP."""
    devices = {x.device for x in params}
    names = ", ".join(sorted(map(str, devices)))
    kinds = {device.type for device in devices}
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids must be None or have one device, got {device_ids}")
    if len(kinds) != 1 or not kinds <= _KINDS:
        raise ValueError(f"a module must be on the CPU or on GPUs, all of it: it is on {names}")
    if device_ids and len(devices) == 1 and kinds == {"cuda"}:
        first = ordinal(device_ids[0])
        return Placement([first], first if output_device is None else ordinal(output_device))
    if device_ids or output_device:
        raise ValueError(
            "device_ids and output_device are for a module on one GPU, of one process: got "
            f"{device_ids} and {output_device} for a module on {names}"
        )
    return Placement()


def moved(value: T, device: torch.device) -> T:
    """Return a copy of nested tuples, lists and dicts with all tensors on a device."""
    return mapped(value, lambda x: x.to(device))


def mapped(value: Any, function: Callable[[Any], object], deep: bool = False) -> Any:
    """Return a copy of nested tuples, lists and dicts with function(x) for each tensor x.

    Other containers stay unchanged, as in torch; with `deep`, sets and dataclasses are copied, too.
    """
    if isinstance(value, (torch.Tensor, PackedSequence)):
        return function(value)
    if isinstance(value, dict) and value:  # first: transformers' outputs are dataclasses, too
        return type(value)((key, mapped(item, function, deep)) for key, item in value.items())
    if deep and is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in fields(value):
            if hasattr(value, field.name):
                item = mapped(getattr(value, field.name), function, deep)
                object.__setattr__(made, field.name, item)  # frozen ones, too
        return made
    if deep and isinstance(value, (set, frozenset)):
        return type(value)(mapped(item, function, deep) for item in value)
    if not isinstance(value, (list, tuple)) or not value:
        return value
    items = [mapped(item, function, deep) for item in value]
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return items if isinstance(value, list) else tuple(items)


class Contents:
    """The parameters and buffers of `module` by name, except those in `ignored`.

    RuntimeError if a parameter has no shape yet. ValueError for SyncBatchNorm on the CPU, and for
    fully_shard's shards.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._module = module
        self._params = {n: x for n, x in module.named_parameters() if n not in self.ignored}
        refuse_shards(self._params)
        self._known: dict[int, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._buffer_tables: Tables = ()
        self._buffer_ids: list[int] | None = None
        for name, x in self._params.items():
            if torch.nn.parameter.is_lazy(x):
                raise RuntimeError(f"{name} has no shape yet: run a forward pass before wrapping")
        torchs = any(
            getattr(type(x), "forward", None) is torch.nn.SyncBatchNorm.forward
            for x in module.modules()
        )
        on_cpu = all(x.is_cpu for x in self._params.values())
        if torchs and (on_cpu or not torch.distributed.is_initialized()):
            raise ValueError(
                "torch's SyncBatchNorm works on GPUs alone, on a group of torch.distributed: take "
                "nc10d.torch.SyncBatchNorm.convert_sync_batchnorm(module)"
            )

    def has_sync_bn(self) -> bool:
        """Return whether the module has a SyncBatchNorm layer."""
        return any(isinstance(x, torch.nn.SyncBatchNorm) for x in self._module.modules())

    def fields(self) -> dict[str, int | str]:
        """Return the fields about the module in DDP logging data, with torch's values."""
        params = self._params.values()
        trained = {x.dtype for x in params if x.requires_grad}
        return {
            "module_name": type(self._module).__name__,
            "dtypes": ", ".join(sorted(_C_NAMES.get(x, str(x)) for x in trained)),
            "has_sync_bn": int(self.has_sync_bn()),
            "is_multi_device_module": int(len({x.device for x in params}) > 1),
        }

    def parameters(self) -> list[torch.Tensor]:
        """Return all parameters."""
        return list(self._params.values())

    def trained(self) -> dict[str, torch.Tensor]:
        """Return the parameters that require gradients; RuntimeError if there are none."""
        found = {name: x for name, x in self._params.items() if x.requires_grad}
        if not found:
            kind, none = type(self._module).__name__, not self._params
            what = "has no parameters" if none else "has no parameter that requires a gradient"
            raise RuntimeError(f"{kind} {what}: there is nothing to reduce, do not wrap it")
        self._known = {id(x): x for x in found.values()}
        in_backward.take_over(found.values())
        self._steps = self._count_steps()
        self._look()
        return found

    def _count_steps(self) -> int:
        return sum(map(len, map(_OPTIMIZERS, map(vars, self._known.values()))))

    def has_new_steps(self) -> bool:
        """Return whether an optimizer has been made to step in backward passes since `trained`."""
        return self._count_steps() != self._steps

    def check_trained(self) -> None:
        """Raise a RuntimeError if a parameter gets gradients that nobody reduces.

        That is: if it was thawed, added or replaced after `trained`, or if an optimizer has been
        made to step in the parameter's backward pass since.
        """
        # Only steps in C for each layer: every forward pass takes them.
        same = _ids(self._tables) == self._ids and not any(map(_TRAINS, self._frozen))
        if self.has_new_steps():
            raise RuntimeError(
                "apply_optimizer_in_backward came after the first pass, so the optimizer would "
                "step by this rank's gradient, before any mean is there: call it before"
            )
        if same:
            return
        for name, x in self._module.named_parameters():
            if name in self.ignored or not isinstance(x, torch.nn.Parameter):
                continue  # a tensor that stands for a parameter, as in torch.func
            if x.requires_grad and id(x) not in self._known:
                raise RuntimeError(
                    f"{name} requires a gradient, but was frozen or not there when the module was "
                    "wrapped, so it would get this rank's gradient alone: wrap the module again, "
                    "or wrap it first when all parameters to train are there"
                )
        self._look()

    def _look(self) -> None:
        """Remember all layers' parts, which stay alive so that each has a unique id."""
        layers = list(self._module.modules())
        self._tables = [table for x in layers for table in (x._parameters, x._modules)]
        self._parts = list(_parts(self._tables))
        self._ids = _ids(self._tables)
        named = self._module.named_parameters()
        self._frozen = [x for n, x in named if n not in self.ignored and id(x) not in self._known]

    def sparse(self) -> set[str]:
        """Return the names of parameters with sparse gradients: sparse embeddings' parameters."""
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        found = {
            id(layer.weight)
            for layer in self._module.modules()
            if isinstance(layer, kinds) and layer.sparse
        }
        return {name for name, x in self._params.items() if id(x) in found}

    def states(self, buffers: bool) -> dict[str, torch.Tensor]:
        """Return all parameters, and with `buffers` also the buffers."""
        return {**self._params, **(self.buffers() if buffers else {})}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the current buffers; a module may replace them at any time."""
        # As in check_trained: only steps in C for each layer, if nothing has changed.
        if _ids(self._buffer_tables) != self._buffer_ids:
            layers = list(self._module.modules())
            self._buffer_tables = [table for x in layers for table in (x._buffers, x._modules)]
            self._buffer_parts = list(_parts(self._buffer_tables))
            self._buffer_ids = _ids(self._buffer_tables)
            named = self._module.named_buffers()
            self._buffers = {name: x for name, x in named if name not in self.ignored}
        return self._buffers


def refuse_shards(names: Iterable[str]) -> None:
    """Raise a ValueError if any parameter name is that of a fully_shard shard."""
    for name in names:
        if name.rpartition(".")[2].startswith(SHARD):
            raise ValueError(
                f"the module has {name}: fully_shard has divided this part already, and each rank "
                "has other values. Divide the whole module by a single call, with `units`"
            )


def _parts(tables: Tables) -> Iterator[torch.Tensor | None]:
    return chain.from_iterable(map(dict.values, tables))


def _ids(tables: Tables) -> list[int]:
    return list(map(id, _parts(tables)))


def same_everywhere(group: ProcessGroup, tensors: Mapping[str, torch.Tensor], src: int = 0) -> None:
    """Broadcast `tensors` from rank `src`, coalesced into a submission per device type.

    Blocks for tensors on the CPU. ValueError, on every rank, if a tensor's elements share memory.
    """
    whole = [_own(name, x.detach()) for name, x in tensors.items() if x.numel()]
    for kind in sorted({x.device.type for x in whole}):
        with getattr(group, "coalescing_manager", nullcontext)():
            for x in whole:
                if x.device.type == kind:
                    group.broadcast(x, src)


def _own(name: str, x: torch.Tensor) -> torch.Tensor:
    # The source only reads the tensor and would not notice the problem, but wait for the others.
    if any(step == 0 and side > 1 for step, side in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(f"elements of {name} share memory (an expanded tensor): clone it")
    return x
