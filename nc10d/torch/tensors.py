"""torch's tensors as nc10d's arrays: the same memory, under torch's type or under NumPy's.

Contract: nothing here copies or waits for a device. A tensor that requires a gradient is taken as
its memory, as c10d does: autograd learns nothing of what is written to it. Tensors whose memory
does not show their values (sparse, quantised, lazily conjugated or negated, FakeTensors) are
refused by a TypeError that says what to pass instead.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import torch

from nc10d.arrays import buffer, interop
from nc10d.arrays.buffer import Buffer
from nc10d.arrays.dtypes import DType, dtype_of
from nc10d.codec import register_type
from nc10d.errors import CodecError

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: dict[torch.dtype, DType] = {
    getattr(torch, dtype.label): dtype for dtype in DType if hasattr(torch, dtype.label)
}
"""Which element type each of torch's is."""
_TORCH = {dtype: kind for kind, dtype in DTYPES.items()}
# NumPy can't take these over from torch: they go as bits, and get their type on the other side.
_BITS = {DType.BFLOAT16: torch.uint16}
_BITS |= dict.fromkeys((DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2), torch.uint8)


def register() -> None:
    """Make tensors and parameters arrays for all of nc10d, and let objects contain them.

    In objects, values travel alone: no history, and to the CPU unless `map_location` says where to.
    """
    for kind in (torch.Tensor, torch.nn.Parameter):
        buffer.register(kind, as_buffer, lambda x: str(x.device.type))
        interop.register_view(kind, as_numpy, lend)
    register_type(torch.Tensor, _values, _from_values, "torch.Tensor", torch.Tensor.to)
    register_type(
        torch.nn.Parameter,
        _values,
        lambda state: torch.nn.Parameter(_from_values(state)),
        "torch.nn.Parameter",
        lambda x, device: torch.nn.Parameter(x.detach().to(device)),
    )


def as_numpy(x: torch.Tensor) -> Any:
    """Return the ndarray that is the memory of `x`; `x` itself where there can't be one.

    (Not x.numpy(): that makes the tensor's storage one that can't be resized any more.)
    """
    try:
        found = as_buffer(x)
    except (RuntimeError, TypeError):
        return x  # nothing that can be sent: who asks for its Buffer learns why
    return found.as_numpy() if found.device == "cpu" else x


def lend(x: torch.Tensor) -> Any:
    """Return an ndarray that is the memory of a contiguous tensor, but does not keep it alive.

    None where there is none yet and can't be one. Known ones are found by all that they depend on.
    """
    try:
        if x.is_contiguous() and not x.is_neg():
            found = _lent.get((x.data_ptr(), x.shape, x.dtype))
            return _new_lent(x) if found is None else found
    except RuntimeError:
        return None  # sparse, say
    return None


_lent: dict[tuple[int, torch.Size, torch.dtype], Array] = {}
_MOST_LENT = 1024


def _new_lent(x: torch.Tensor) -> Array | None:
    # A complex tensor may be a lazy conjugate; all others are what their memory says.
    if not x.is_cpu or x.is_complex() or x.dtype not in DTYPES or not x.numel():
        return None
    if len(_lent) >= _MOST_LENT:
        _lent.clear()
    found = replace(as_buffer(x), owner=None).as_numpy()
    _lent[x.data_ptr(), x.shape, x.dtype] = found
    return found


def as_buffer(x: torch.Tensor) -> Buffer:
    """Return the memory of a strided tensor; TypeError for any other, and for dtypes not known."""
    dtype = _check(x)
    step = dtype.itemsize
    return Buffer(
        x.data_ptr(),
        x.numel(),
        dtype,
        x.device.type,
        x,
        True,
        x.is_contiguous(),
        tuple(x.shape),
        tuple(step * n for n in x.stride()),
    )


def _check(x: torch.Tensor) -> DType:
    dtype = DTYPES.get(x.dtype)
    if x.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {x.layout} has several arrays: send each of them")
    if dtype is None:
        raise TypeError(f"tensors of {x.dtype} can't be communicated: nc10d has no such type")
    if x.is_conj() or x.is_neg():
        kind = "conjugate" if x.is_conj() else "negative"
        undo = "resolve_conj" if x.is_conj() else "resolve_neg"
        raise TypeError(f"the tensor is a lazy {kind}, its memory is not: pass x.{undo}()")
    return dtype


def as_tensor(x: Any) -> torch.Tensor:
    """Return the tensor that is the memory of an array; TypeError for dtypes torch has not.

    A tensor is itself; what is neither that nor an ndarray is asked by torch (arrays on devices).
    """
    if type(x) is not np.ndarray:
        return torch.as_tensor(x)
    dtype = dtype_of(x.dtype)
    if dtype not in _BITS:
        return torch.from_numpy(x)
    return torch.from_numpy(x.view(f"u{dtype.itemsize}")).view(_TORCH[dtype])


def zeros(count: int, dtype: np.dtype[Any], device: torch.device) -> torch.Tensor:
    """Return a flat tensor of zeros on a device."""
    return torch.zeros(count, dtype=_TORCH[dtype_of(dtype)], device=device)


def _values(x: torch.Tensor) -> Any:
    return as_numpy(x.detach().cpu().resolve_conj().resolve_neg())


def _from_values(state: Any) -> torch.Tensor:
    if type(state) is not np.ndarray:
        raise CodecError(f"a tensor's values are an array, not a {type(state).__name__}")
    return as_tensor(state)


def is_dense(x: torch.Tensor) -> bool:
    """Say whether the elements of `x` fill its memory, in whatever order of the dimensions."""
    sides = sorted((step, n) for step, n in zip(x.stride(), x.shape, strict=True) if n != 1)
    expected = 1
    for step, n in sides:
        if step != expected:
            return not prod(x.shape)
        expected *= n
    return True


def like(flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return `flat`, of as many elements, in the shape and, if that is dense, strides of `x`."""
    return flat.as_strided(x.shape, x.stride()) if is_dense(x) else flat.view(x.shape)
