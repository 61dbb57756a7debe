"""Mixed precision for DistributedDataParallel: compute and reduce in fewer bits, train in all.

    model = DistributedDataParallel(module, mixed_precision=MixedPrecision(torch.bfloat16))

Contract: the module's parameters keep their dtype, values and place; optimizers and state_dict see
these alone. During a forward pass the module has low-precision copies instead, leaves in the graph,
which each forward pass fills anew. The Reducer reduces the copies' gradients; a gradient is cast
back when its mean is known. PR 92882 of pytorch has the fields' meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from nc10d.torch.wrapped_module import mapped

T = TypeVar("T")
Places = Sequence[tuple[dict[str, torch.nn.Parameter | None], str, torch.Tensor, torch.Tensor]]
"""A layer's parameter table, a name there, the parameter, and its copy."""

_OWN, _COPY = 2, 3


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes in a forward pass and in the reduction; None: the parameters' own.

    `reduce_dtype` None is `param_dtype`. `buffer_dtype` is given to floating-point buffers when the
    module is wrapped. With `keep_low_precision_grads`, gradients have `reduce_dtype` after the
    backward pass, for an optimizer that takes them. `cast_root_forward_inputs` casts the arguments
    of the whole module to `param_dtype`, `cast_forward_inputs` each layer's. Layers in
    `modules_to_keep` (and the layers inside them) keep their dtypes; their inputs are cast to
    these, and their outputs to `param_dtype`.

    TypeError for a dtype without fractions.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    modules_to_keep: tuple[type[torch.nn.Module], ...] = (_BatchNorm,)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise TypeError(f"{name} must be a floating-point dtype of torch's, got {dtype!r}")

    @classmethod
    def of(cls, other: object) -> MixedPrecision:
        """Return these settings, or those in torch's MixedPrecision for FSDP or DDP."""
        if isinstance(other, cls):
            return other
        names = ("param_dtype", "reduce_dtype", "buffer_dtype")
        if not all(hasattr(other, name) for name in names):
            raise TypeError(f"mixed_precision must be a MixedPrecision, got {type(other)}")
        flags = ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs")
        given = {name: getattr(other, name) for name in (*names, *flags) if hasattr(other, name)}
        return cls(
            **given,
            modules_to_keep=tuple(getattr(other, "_module_classes_to_ignore", (_BatchNorm,))),
        )


class LowPrecision:
    """The low-precision copies of a module's parameters, and their place in the layers.

    `trained` are the parameters to train and `ignored` the names that DDP ignores. `leaves` has the
    trained parameters' copies by name; a parameter that keeps its dtype is its own leaf.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        trained: Mapping[str, torch.Tensor],
        ignored: frozenset[str],
        options: MixedPrecision,
    ) -> None:
        self._options, self._active, self._depth = options, False, 0
        self._handles: list[RemovableHandle] = []
        kept = [x for x in module.modules() if isinstance(x, options.modules_to_keep)]
        inside = {id(x) for layer in kept for x in layer.modules()}
        own = {id(x) for layer in kept for x in (*layer.parameters(), *layer.buffers())}
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        own.update(id(x) for name, x in named.items() if name in ignored)
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._places: list[
            tuple[dict[str, torch.nn.Parameter | None], str, torch.Tensor, torch.Tensor]
        ] = []
        layers = [x for x in module.modules() if id(x) not in inside]
        taken = {id(x): self._take(x, own) for x in layers}
        cast = options.param_dtype if options.cast_forward_inputs else None
        for layer in layers:
            places = [place for x in layer.modules() for place in taken.get(id(x), ())]
            if places or cast:
                self._hook(layer, cast, None, places)
        for layer in kept:
            self._hook(layer, _dtype(layer), options.param_dtype)
        self._versions: list[int] = []
        self._released = False
        self._idle: list[int] = []
        self.leaves = {name: self._copies.get(id(x), (x, x))[1] for name, x in trained.items()}
        self._trained = [self._copies[id(x)] for x in trained.values() if id(x) in self._copies]
        self.dtypes = {
            name: x.dtype if id(x) in own or not x.is_floating_point() else self._reduced(x)
            for name, x in trained.items()
        }
        if options.keep_low_precision_grads:
            for name, x in trained.items():
                x.grad_dtype = self.dtypes[name]

    def _reduced(self, x: torch.Tensor) -> torch.dtype:
        return self._options.reduce_dtype or self._options.param_dtype or x.dtype

    def _take(self, layer: torch.nn.Module, own: set[int]) -> Places:
        """Copy a layer's parameters, and cast the layer's buffers; return the places."""
        options = self._options
        for name, x in layer._buffers.items():
            if options.buffer_dtype and _castable(x) and id(x) not in own:
                layer._buffers[name] = x.to(options.buffer_dtype)
        found = [(n, x) for n, x in layer._parameters.items() if _castable(x) and id(x) not in own]
        if options.param_dtype is None:
            return ()
        before = len(self._places)
        for name, x in found:
            if x.dtype != options.param_dtype:
                if id(x) not in self._copies:
                    low = x.detach().to(options.param_dtype)
                    copy = torch.nn.Parameter(low, requires_grad=x.requires_grad)
                    self._copies[id(x)] = (x, copy)
                self._places.append((layer._parameters, name, *self._copies[id(x)]))
        return self._places[before:]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Give the module the copies, with the parameters' current values, for a forward pass."""
        self._refresh()
        self._idle = self._idle or self._names()
        self._exchange(self._places, _COPY)
        self._active = True
        try:
            yield
        finally:
            self._active = False
            self._exchange(self._places, _OWN)

    def repair(self) -> None:
        """Give the module its parameters back, if Ctrl-C left a layer in a backward pass."""
        if self._depth and not self._used():
            self._depth = 0
            self._exchange(self._places, _OWN)

    def inputs(self, value: T) -> T:
        """Return a forward pass's arguments with floating-point tensors cast."""
        dtype = self._options.param_dtype
        if dtype is None or not self._options.cast_root_forward_inputs:
            return value
        return mapped(value, lambda x: _cast(x, dtype))

    @torch.no_grad()
    def _refresh(self) -> None:
        for x, copy in self._trained:
            if copy.requires_grad != x.requires_grad:  # frozen since, or no longer
                copy.requires_grad_(x.requires_grad)
        sources = [x for x, _ in self._copies.values()]
        copies = [copy for _, copy in self._copies.values()]
        versions = [x._version for x in sources]
        if self._released:
            self._released = False
            for x in copies:
                x.untyped_storage().resize_(x.nbytes)
        if versions == self._versions:
            # An earlier forward pass's graph may hold the copies. Their values are the same, but
            # for what nc10d has written, which torch does not count as a change either.
            copies = [x.data for x in copies]
        self._versions = versions
        if copies:
            torch._foreach_copy_(copies, sources)

    def release(self) -> None:
        """Free the copies' memory when a backward pass ends, unless any is in use."""
        # Memory peaks in an optimizer's step. A graph that waits for its own backward pass, or is
        # retained, holds the copies that it reads.
        names = self._names()
        copies = [copy for _, copy in self._copies.values()]
        if self._active or any(map(_is_read, copies, names, self._idle)):
            return
        self._released = True
        for x in copies:
            x.untyped_storage().resize_(0)

    def _names(self) -> list[int]:
        """Return how often Python refers to each copy."""
        return [sys.getrefcount(copy) for _, copy in self._copies.values()]

    @staticmethod
    def _exchange(places: Places, which: int) -> None:
        for place in places:
            place[0][place[1]] = place[which]

    def _hook(
        self,
        layer: torch.nn.Module,
        given: torch.dtype | None,
        result: torch.dtype | None,
        places: Places = (),
    ) -> None:
        """Cast a layer's inputs and outputs; a layer that a backward pass calls gets its copies.

        `places` are those in the layer and in the layers inside.
        """
        # Checkpointing calls a layer again in the backward pass, outside `forward`. A layer may
        # read an inner layer's parameters without calling that layer, so the outermost call
        # exchanges all of them. A recurrent layer also holds its parameters in a separate list.
        names: list[str] = getattr(layer, "_flat_weights_names", []) if places else []

        def exchange(which: int) -> None:
            if not self._active and not self._depth:
                if self._released:
                    self._refresh()
                self._exchange(places, which)
            if names:
                own = [place for place in places if place[0] is layer._parameters]
                cast = {place[1]: place[which] for place in own}
                layer._flat_weights = [cast.get(name, layer._parameters[name]) for name in names]

        def before(_: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            if not self._used():
                return None
            exchange(_COPY)
            if not self._active:
                self._depth += 1
            return None if given is None else mapped((args, kwargs), lambda x: _cast(x, given))

        def after(_: object, _args: object, output: object) -> object:
            if not self._used():
                return None
            if not self._active:
                self._depth -= 1
            exchange(_OWN)
            return None if result is None else mapped(output, lambda x: _cast(x, result))

        self._handles += [
            # First: weight_norm's hooks compute with the parameters.
            layer.register_forward_pre_hook(_Hook(before), prepend=True, with_kwargs=True),
            layer.register_forward_hook(_Hook(after), always_call=True),
        ]

    def close(self) -> None:
        """Remove the layers' hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _used(self) -> bool:
        return self._active or torch._C._current_graph_task_id() != -1


def _is_read(x: torch.Tensor, names: int, idle: int) -> bool:
    """Return whether a graph, a view, or a name more than those in `idle` holds a leaf's values."""
    # A leaf's use count includes its Python object, and the node that accumulates the gradient,
    # which does no harm. The storage's count includes the leaf, and the object that asks.
    node = x._use_count() - 1
    storage = torch._C._storage_Use_Count(x.untyped_storage()._cdata)
    return bool(node > x.requires_grad or storage > 2 or names > idle + node * _names_of_node())


@cache
def _names_of_node() -> int:
    """Return how many references to a leaf Python counts for the node: 0 or 1, as torch does it."""
    x = torch.ones(1, requires_grad=True)
    before = sys.getrefcount(x)
    with torch.enable_grad():
        graph = x.exp()
    assert graph.requires_grad
    return sys.getrefcount(x) - before


class _Hook:
    """A layer's hook; a copied layer has a hook without effect."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *values: object) -> object:
        return self._function(*values)

    def __reduce__(self) -> tuple[object, ...]:
        return _Hook, (_nothing,)


def _nothing(*_: object) -> None:
    """Leave a layer's inputs and outputs alone."""


def _castable(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _cast(x: torch.Tensor | PackedSequence, dtype: torch.dtype) -> torch.Tensor | PackedSequence:
    whole = x.data if isinstance(x, PackedSequence) else x
    return x.to(dtype) if whole.is_floating_point() else x


def _dtype(layer: torch.nn.Module) -> torch.dtype:
    held = (*layer.parameters(), *layer.buffers())
    return next((x.dtype for x in held if x.is_floating_point()), torch.float32)
