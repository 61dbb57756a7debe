"""AsyncCollectiveTensor: a tensor that is still being received, and waits when it is first used.

Contract: a torch.Tensor without a gradient. Shape, dtype and device are known at once. Every
operator waits, and so does every way to its memory but an assignment to another tensor's `.data`,
of which torch tells nobody; results are plain tensors, and so are copies, pickles and saved
tensors. Waiting blocks on the CPU, and orders streams on a GPU. A tensor that is dropped unused
waits for nothing: the memory lives until the collective has ended. A graph has no such tensors:
torch.compile reads one from outside as the plain tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nc10d.api.async_array import AsyncCollectiveArray
from nc10d.arrays import buffer
from nc10d.codec import register_type


class AsyncCollectiveTensor(Tensor):
    """The result of a functional collective; `wait` returns the plain tensor.

    `x.data = result` crashes in torch, which asks no operator there: assign `result.wait()`.
    """

    _pending: AsyncCollectiveArray
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, pending: AsyncCollectiveArray) -> AsyncCollectiveTensor:
        """Make the tensor for a result whose array is a plain tensor."""
        x = pending.unfinished
        self: AsyncCollectiveTensor = Tensor._make_wrapper_subclass(
            cls,
            x.size(),
            strides=x.stride(),
            storage_offset=x.storage_offset(),
            dtype=x.dtype,
            layout=x.layout,
            device=x.device,
            requires_grad=False,
        )
        self._pending = pending
        return self

    def wait(self) -> Tensor:
        """Block until the tensor is complete and return it, plain; raise the collective's error."""
        return self._pending.wait()

    trigger_wait = wait  # torch's name

    @property
    def completed(self) -> bool:
        """Whether the tensor is complete; never blocks."""
        return self._pending.completed

    @classmethod
    def __torch_dispatch__(
        cls, function: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        args, kwargs = pytree.tree_map_only(cls, cls.wait, (args, kwargs or {}))
        return function(*args, **kwargs)

    @property
    def plain(self) -> Tensor:
        """The complete tensor: what a compiled function reads."""
        return self.wait()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: object, outer_size: object, outer_stride: object
    ) -> Tensor:
        return inner["plain"]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"AsyncCollectiveTensor({self.wait()!r})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.wait().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return copy.deepcopy(self.wait(), memo)


def _forward(name: str) -> None:
    def method(self: AsyncCollectiveTensor, *args: object, **kwargs: object) -> object:
        return getattr(self.wait(), name)(*args, **kwargs)

    method.__name__ = method.__qualname__ = name
    setattr(AsyncCollectiveTensor, name, method)


# These read the memory without an operator.
_MEMORY = [
    "numpy",
    "tolist",
    "data_ptr",
    "const_data_ptr",
    "untyped_storage",
    "storage",
    "share_memory_",
    "is_shared",
    "__array__",
    "__dlpack__",
    "__dlpack_device__",
    "__format__",
]
for _name in _MEMORY:
    if hasattr(Tensor, _name):
        _forward(_name)

buffer.register(
    AsyncCollectiveTensor, lambda x: buffer.as_buffer(x.wait()), lambda x: str(x.device.type)
)
register_type(AsyncCollectiveTensor, lambda x: x.wait(), lambda x: x, "nc10d.AsyncCollectiveTensor")
