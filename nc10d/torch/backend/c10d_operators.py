"""torch's operators for collectives, `torch.ops.c10d`, on nc10d's groups in torch 2.13.

The methods of torch's own groups call these operators. So a dispatch mode such as CommDebugMode
sees the call, and a tensor that wraps others, such as TwoTensor, takes the call apart. torch 2.13
calls a Python group's methods directly. Here, a method calls its operator if there is such a mode
or tensor. The operator's kernel here, on the CPU and on CUDA, calls the group. All other groups'
calls go on to torch's kernel.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nc10d.torch.backend.group_calls import TorchCalls
from nc10d.torch.backend.launching import as_torchs
from nc10d.torch.backend.works import TorchWork
from nc10d.torch.tensors import WrapperTensorError

c10d = torch._C._distributed_c10d
_modes = torch._C._len_torch_dispatch_stack

_DEVICES = "CPU", "CUDA"
Method = Callable[..., TorchWork | None]


class _Operator(NamedTuple):
    name: str
    arguments: int
    """How many arguments of the group's method are tensors, or lists of them. They come first."""


_GATHER = _Operator("_allgather_base_", 2)
OPERATORS = {
    "allreduce": _Operator("allreduce_", 1),
    "allreduce_coalesced": _Operator("allreduce_coalesced_", 1),
    "broadcast": _Operator("broadcast_", 1),
    "reduce": _Operator("reduce_", 1),
    "allgather": _Operator("allgather_", 2),
    "_allgather_base": _GATHER,
    "all_gather_single": _GATHER,
    "allgather_coalesced": _Operator("allgather_coalesced_", 2),
    "allgather_into_tensor_coalesced": _Operator("allgather_into_tensor_coalesced_", 2),
    "all_gather_single_coalesced": _Operator("allgather_into_tensor_coalesced_", 2),
    "reduce_scatter": _Operator("reduce_scatter_", 2),
    "_reduce_scatter_base": _Operator("_reduce_scatter_base_", 2),
    "reduce_scatter_single": _Operator("_reduce_scatter_base_", 2),
    "reduce_scatter_tensor_coalesced": _Operator("reduce_scatter_tensor_coalesced_", 2),
    "reduce_scatter_single_coalesced": _Operator("reduce_scatter_tensor_coalesced_", 2),
    "gather": _Operator("gather_", 2),
    "scatter": _Operator("scatter_", 2),
    "alltoall": _Operator("alltoall_", 2),
    "alltoall_base": _Operator("alltoall_base_", 2),
    "all_to_all_single": _Operator("alltoall_base_", 2),
    "barrier": _Operator("barrier", 0),
    "send": _Operator("send", 1),
    "recv": _Operator("recv_", 1),
    "recv_anysource": _Operator("recv_any_source_", 1),
}
"""The operators by the group's method."""


@dataclass
class _Call:
    """A method's call that is on its way through the operator.

    The kernel gets the reduction as an object that Python cannot read. So the call keeps what came
    with the tensors.
    """

    group: TorchCalls
    method: Method
    rest: tuple[object, ...]
    options: dict[str, object]
    works: list[TorchWork | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The operators see a separate torch group: from a class in Python, C++ calls Python's
        # methods, which would call the operator again.
        group = self.group.nc10d_group
        self.carrier = dist.ProcessGroup(group.rank(), group.size())

    def run(self, tensors: tuple[object, ...]) -> TorchWork | None:
        work = self.method(self.group, *tensors, *self.rest, **self.options)
        self.works.append(work)
        return work


class _Calls(threading.local):
    call: _Call | None = None


_calls = _Calls()
"""`call` is the method's call on this thread, from the start until the operator has ended."""


def through_operators(cls: type[TorchCalls]) -> type[TorchCalls]:
    """Let a class's methods call torch's operators where a mode or a tensor has to see the call."""
    for name, operator in OPERATORS.items():
        setattr(cls, name, _method(name, operator, getattr(cls, name)))
    return cls


def _method(name: str, operator: _Operator, own: Method) -> Method:
    @functools.wraps(own)
    def method(self: TorchCalls, *arguments: object, **options: object) -> TorchWork | None:
        refusal: WrapperTensorError | None = None
        if not _modes():
            try:
                return own(self, *arguments, **options)
            except WrapperTensorError as error:
                refusal = error
        return as_torchs(refusal, self.nc10d_group, lambda: by_operator(self, arguments, options))

    def by_operator(
        self: TorchCalls, arguments: tuple[object, ...], options: dict[str, object]
    ) -> TorchWork | None:
        _install(operator.name)
        call = _Call(self, own, arguments[operator.arguments :], options)
        outer, _calls.call = _calls.call, call
        try:
            returned = getattr(call.carrier, name)(*arguments, **options)
        finally:
            _calls.call = outer
        return self._joined(call.works) if call.works else returned

    return method


_libraries: dict[str, torch.library.Library] = {}
"""The replaced kernels, by operator: a library's end would undo the replacement."""
_installing = threading.Lock()


def install_gather() -> None:
    """Replace the operator's kernels behind `all_gather_into_tensor_out`.

    They call a group's method that torch 2.13 does not let Python override.
    """
    _install(_GATHER.name)


def _install(name: str) -> None:
    """Replace an operator's kernels; again: no change."""
    with _installing, warnings.catch_warnings():
        if name in _libraries:
            return
        library = torch.library.Library("c10d", "IMPL")
        warnings.simplefilter("ignore")  # the kernels that these replace are torch's
        for device in _DEVICES:
            library.impl(name, _kernel(name, device), device, with_keyset=True)
        _libraries[name] = library


def _kernel(name: str, device: str) -> Callable[..., object]:
    torchs = torch.library.get_kernel(f"c10d::{name}", device)
    schema = getattr(torch.ops.c10d, name).default._schema
    place = [argument.name for argument in schema.arguments].index("process_group")

    def kernel(keys: torch._C.DispatchKeySet, *arguments: Any) -> object:
        group = dist.ProcessGroup.unbox(arguments[place])
        call = _calls.call
        if call is not None and call.carrier is group:
            work = call.run(arguments[: place if name != "barrier" else 0])
        elif name == _GATHER.name and isinstance(group, TorchCalls):
            work = group.all_gather_single(*arguments[:place])
        elif name == _GATHER.name:
            return arguments[0], _gathered_by_backend(group, device, arguments).boxed()
        else:
            return torchs.call_boxed(keys, *arguments)
        boxed = _boxed(work)
        return boxed if len(schema.returns) == 1 else (arguments[0], boxed)

    return kernel


def _gathered_by_backend(
    group: dist.ProcessGroup, device: str, arguments: tuple[Any, ...]
) -> dist.Work:
    """Do as torch's gather kernel: launch on the group's backend; return the Work."""
    # This method lets go of the GIL, `call_boxed` does not. A gloo thread ends a Work under the
    # lock that a launch takes, and needs the GIL there to drop the Work's tensors.
    out, own, _, *given = arguments
    options = c10d.AllgatherOptions()
    if given:  # torch leaves out defaults
        options.asyncOp = given[0]
    if given[1:]:
        options.timeout = timedelta(milliseconds=given[1])
    return group._get_backend(torch.device(device.lower()))._allgather_base(out, own, options)


def _boxed(work: TorchWork | None) -> torch.ScriptObject:
    """Return a Work for torch's C++ code."""
    # A Work made by C++: a TorchWork's C++ part alone would never end.
    future = torch.futures.Future() if work is None else work.get_future()
    if work is None:
        future.set_result([])
    return c10d._create_work_from_future(future).boxed()
