"""Methods of torch's ProcessGroup that call nc10d's backend directly, on torch 2.14 and newer.

torch's own method goes through a dispatcher that costs more than a small call. Its Work knows no
end, outputs or sender for an operation on a Python backend. A method here calls the backend and
returns the backend's Work. torch's method still makes other backends' calls, and calls that
hooks, dispatch modes or a tensor's class have to see. Then the returned Work stands for the
operations which the backend has launched meanwhile on this thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as _c10d
from torch.distributed import ProcessGroup as Group

from nc10d.torch.backend.c10d_operators import OPERATORS
from nc10d.torch.backend.group_calls import TorchCalls
from nc10d.torch.backend.groups import calls_of
from nc10d.torch.backend.launching import as_torchs, blocking
from nc10d.torch.backend.python_backend import PythonBackend
from nc10d.torch.tensors import WrapperTensorError

_modes = torch._C._len_torch_dispatch_stack
Function = Callable[..., Any]
_OPTIONS = {"opts"}
"""The argument names that are the same in torch's methods and nc10d's."""

_backends: dict[int, PythonBackend | None] = {}
"""nc10d's backend by a torch group's id, as long as the group's object lives."""


def _backend_of(group: Group) -> PythonBackend | None:
    """Return a torch group's nc10d backend, and remember it."""
    found = calls_of(group)
    backend = _backends[id(group)] = found if isinstance(found, PythonBackend) else None
    weakref.finalize(group, _backends.pop, id(group), None).atexit = False
    if backend is not None and any(
        group._get_backend(device) is not backend for device in group._device_types
    ):
        backend.seen_by_torch = True  # torch chooses a backend by the tensors' device
    return backend


def _direct(name: str, theirs: Function) -> Function:
    """Return a method that passes a call on to nc10d's backend."""
    own = getattr(TorchCalls, name)

    def method(group: Group, *arguments: object, **options: object) -> object:
        try:
            backend = _backends[id(group)]
        except KeyError:
            backend = _backend_of(group)
        if backend is None:
            return theirs(group, *arguments, **options)
        refusal: WrapperTensorError | None = None
        if not (backend.seen_by_torch or _modes() or (options and options.keys() - _OPTIONS)):
            try:
                return own(backend, *arguments, **options)
            except WrapperTensorError as error:
                refusal = error
        blocking.here = False  # a hook may start other messages
        with backend.noting_works() as works:
            returned = as_torchs(
                refusal, backend.nc10d_group, lambda: theirs(group, *arguments, **options)
            )
        return backend._joined(works) if works else returned

    return method


def _gather_single(_: str, theirs: Function) -> Function:
    """Return a method that gathers into a tensor's rows, for which Backends have no method."""

    def gather_single(
        group: Group, output: Tensor, input: Tensor, opts: _c10d.GatherOptions | None = None
    ) -> object:
        backend = calls_of(group)
        if backend is None:
            return theirs(group, output, input, *([] if opts is None else [opts]))
        opts = opts or _c10d.GatherOptions()
        root = backend.nc10d_group.rank() == opts.rootRank
        return group.gather([_rows(output, input, group.size())] if root else [], [input], opts)

    return gather_single


def _rows(output: Tensor, input: Tensor, size: int) -> Sequence[Tensor]:
    """Return the parts of an output for each rank's input."""
    if not output.is_contiguous() or output.numel() != size * input.numel():
        raise ValueError(
            f"the output must be contiguous, with {size} times the {input.numel()} elements of "
            f"the input, it has {output.numel()}"
        )
    return output.view(size, *input.shape).unbind()


def _hook(_: str, theirs: Function) -> Function:
    """Return a function that adds a hook to a torch group, whose calls pass it from then on."""

    def add(group: Group, *arguments: object, **options: object) -> object:
        backend = calls_of(group)
        if isinstance(backend, PythonBackend):
            backend.hook()
        return theirs(group, *arguments, **options)

    return add


Maker = Callable[[str, Function], Function]
METHODS: dict[str, Maker] = {
    **dict.fromkeys(OPERATORS, _direct),
    "_end_coalescing": _direct,
    "gather_single": _gather_single,
    "gather_into_tensor": _gather_single,
    "register_pre_hook": _hook,
    "register_post_hook": _hook,
}
"""Makers of nc10d's methods for torch groups, from a name and torch's method."""

HOOKS = [
    getattr(_c10d, name) for name in ("FlightRecorderHook", "NanCheckHook") if hasattr(_c10d, name)
]
"""torch's classes whose `attach` adds hooks to a group; none on torch 2.13."""


def install(marked: Function) -> None:
    """Put the methods into torch's classes; again: no change. `marked` marks our functions."""
    for name, make in METHODS.items():
        theirs = getattr(Group, name, None)
        if theirs is not None and not hasattr(theirs, "nc10d"):
            setattr(Group, name, marked(make(name, theirs), theirs))
    for hook in HOOKS:
        if not hasattr(hook.attach, "nc10d"):
            hook.attach = staticmethod(marked(_hook("attach", hook.attach), hook.attach))
