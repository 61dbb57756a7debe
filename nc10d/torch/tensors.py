"""torch's tensors as nc10d's arrays, and back: the same memory with torch's type or NumPy's.

Contract: no function copies tensors or waits for a device, except to encode objects. A tensor that
requires a gradient is accepted, as in c10d: autograd does not record writes to its memory. Tensors
whose memory does not contain their values (sparse, nested, quantised, lazily conjugated or negated,
FakeTensors and other wrappers, freed storage) raise a TypeError that names an alternative. A
subclass is a tensor like any other; torch's AsyncCollectiveTensor is waited for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NoReturn

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from nc10d.arrays import buffer, interop
from nc10d.arrays.buffer import Buffer
from nc10d.arrays.dtypes import DType, dtype_of
from nc10d.codec import register_type
from nc10d.errors import CodecError

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: dict[torch.dtype, DType] = {
    getattr(torch, dtype.label): dtype for dtype in DType if hasattr(torch, dtype.label)
}
"""nc10d's dtype for each of torch's dtypes."""
_TORCH = {dtype: kind for kind, dtype in DTYPES.items()}
# torch and NumPy share no such types: these tensors are passed as integers, then viewed again.
_BITS = {DType.BFLOAT16: torch.uint16}
_BITS |= dict.fromkeys((DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2), torch.uint8)

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types whose attributes are torch's own. Subclasses may redefine theirs."""


def register() -> None:
    """Register tensors and parameters as array types, and as parts of objects that nc10d sends.

    Objects contain only values, without autograd history; a parameter stays frozen, or trainable.
    They are loaded on the CPU, or on the device of `map_location`.
    """
    for kind in _PLAIN:
        buffer.register(kind, as_buffer, lambda x: str(x.device.type), subclasses=True)
        interop.register_unowned_view(
            kind, unowned_view, torch.Tensor.data_ptr, torch.Tensor.untyped_storage
        )
    buffer.register(torch.fx.Proxy, _refuse_proxy, _refuse_proxy, subclasses=True)
    register_type(torch.Tensor, _values, _from_values, "torch.Tensor", torch.Tensor.to)
    register_type(
        torch.nn.Parameter,
        lambda x: _values(x) if x.requires_grad else (_values(x),),
        _parameter,
        "torch.nn.Parameter",
        lambda x, device: torch.nn.Parameter(x.detach().to(device), x.requires_grad),
    )
    register_type(torch.Size, tuple, torch.Size, "torch.Size")
    register_type(torch.device, str, torch.device, "torch.device")
    for constant in (torch.dtype, torch.layout, torch.memory_format):
        name = f"torch.{constant.__name__}"
        register_type(constant, str, partial(_constant, constant), name)


def _constant(kind: type, name: object) -> object:
    """Return torch's constant of a type by its full name, "torch.float32"."""
    if type(name) is not str:  # another value may be too long to put into words
        raise CodecError(f"torch's constants come by their names, not as a {type(name).__name__}")
    found = vars(torch).get(name.removeprefix("torch."))
    if type(found) is not kind:
        raise CodecError(f"torch has no {kind.__name__} {name!r}")
    return found


def as_numpy(x: torch.Tensor) -> Array | torch.Tensor:
    """Return an ndarray in the memory of `x`, or `x` itself if no ndarray can be made.

    (Not x.numpy(): after that call the tensor's storage can't be resized.)
    """
    try:
        memory = as_buffer(x)
    except TypeError:
        return x  # `as_buffer` reports the reason to callers that need a Buffer
    return memory.as_numpy() if memory.device == "cpu" else x


def unowned_view(x: torch.Tensor) -> Array | None:
    """Return an ndarray in the memory of a contiguous tensor, without keeping the tensor alive.

    None if no ndarray can be made. Arrays are cached by address, shape and dtype.
    """
    try:
        if x.is_contiguous() and not x.is_neg() and not _modes():
            cached = _views.get((x.data_ptr(), x.shape, x.dtype))
            if cached is None:
                return _new_view(x)
            view, end = cached
            storage = x.untyped_storage()  # an earlier one at this address may have been longer
            return view if end <= storage.data_ptr() + storage.nbytes() else None
    except (RuntimeError, TypeError):
        return None  # for example a sparse tensor
    return None


_modes = torch._C._len_torch_dispatch_stack


def _refuse_tracers() -> None:
    """Raise a TypeError if a tracer is active; other modes only watch what torch does."""
    keys = torch._C._TorchDispatchModeKey
    tracers = {"make_fx": keys.PROXY, "FakeTensorMode": keys.FAKE, "functionalize": keys.FUNCTIONAL}
    found = [name for name, key in tracers.items() if torch._C._get_dispatch_mode(key) is not None]
    if torch._C._get_tracing_state() is not None:
        found.append("torch.jit.trace")
    if found:
        raise TypeError(
            f"{found[0]} is tracing, and would not record this call: take the call of the same "
            "name in nc10d.torch.functional, which is an operator"
        )


def _refuse_proxy(_: object) -> NoReturn:
    raise TypeError(
        "torch.fx.symbolic_trace is tracing, and would not record this call: use make_fx, and the "
        "call of the same name in nc10d.torch.functional, which is an operator"
    )


_views: dict[tuple[int, torch.Size, torch.dtype], tuple[Array, int]] = {}
"""By address, shape and dtype: a view, and the address behind it."""
_MOST_VIEWS = 1024


def _new_view(x: torch.Tensor) -> Array | None:
    if torch._C._get_tracing_state() is not None:
        return None
    # A complex tensor may be a lazy conjugate: then the memory does not contain the values.
    if not x.is_cpu or x.is_complex() or x.dtype not in DTYPES or not x.numel():
        return None
    if len(_views) >= _MOST_VIEWS:
        _views.clear()
    view = replace(as_buffer(x), owner=None).as_numpy()
    _views[x.data_ptr(), x.shape, x.dtype] = view, x.data_ptr() + view.nbytes
    return view


def as_buffer(x: torch.Tensor) -> Buffer:
    """Return the memory of a strided tensor; TypeError if no memory contains its values.

    TypeError, too, while torch traces: a graph would not have what is done with the memory.
    """
    if _modes() or torch._C._get_tracing_state() is not None:
        _refuse_tracers()
    try:
        if type(x) in _PLAIN:
            return _memory(x)
        if hasattr(type(x), "trigger_wait"):
            return as_buffer(x.trigger_wait())
        with torch._C.DisableTorchFunctionSubclass():  # a subclass may redefine attributes
            if x.untyped_storage().device == x.device:  # not so for a FakeTensor
                return _memory(x)
            raise _no_memory(x)
    except RuntimeError as error:  # torch's own words for tensors without storage
        raise _no_memory(x) from error


def _memory(x: torch.Tensor) -> Buffer:
    dtype = _check(x)
    step, count, storage = dtype.itemsize, x.numel(), x.untyped_storage()
    address, shape, contiguous = x.data_ptr(), tuple(x.shape), x.is_contiguous()
    strides = tuple([step * n for n in x.stride()])
    owner = x, storage  # x.data = y gives a tensor other storage
    found = Buffer(address, count, dtype, x.device.type, owner, True, contiguous, shape, strides)
    if count:
        first, end = storage.data_ptr(), address + count * step if contiguous else found.span[1]
        if not first or end > first + storage.nbytes():
            raise _no_memory(x)
    return found


class WrapperTensorError(TypeError):
    """The tensor wraps others, and has no memory itself."""


def _no_memory(x: torch.Tensor) -> TypeError:
    if x.is_nested:
        return TypeError("a nested tensor is several: pass each part of x.unbind(), or its values")
    if type(x) in _PLAIN:
        return TypeError(
            "the tensor belongs to a transform such as vmap, which nc10d.torch.functional can see, "
            "or its storage does not hold its elements: it has been freed or cut"
        )
    kind = type(x).__name__
    if isinstance(x, FakeTensor):
        return TypeError(
            f"a {kind} has no memory: pass a tensor that is made outside of FakeTensorMode"
        )
    return WrapperTensorError(
        f"a {kind} has no memory of its own: pass the tensor that it wraps (of a DTensor, "
        "x.to_local()), or give its storage back if that was freed"
    )


def _check(x: torch.Tensor) -> DType:
    dtype = DTYPES.get(x.dtype)
    if x.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {x.layout} has several arrays: send each of them")
    if dtype is None:
        raise TypeError(f"tensors of {x.dtype} can't be communicated: nc10d has no such type")
    if x.is_neg() or (x.is_complex() and x.is_conj()):
        kind = "conjugate" if x.is_conj() else "negative"
        undo = "resolve_conj" if x.is_conj() else "resolve_neg"
        raise TypeError(f"the tensor is a lazy {kind}, its memory is not: pass x.{undo}()")
    return dtype


def as_tensor(x: object) -> torch.Tensor:
    """Return a tensor in the memory of an array; TypeError for dtypes that torch does not have.

    A tensor is returned unchanged. torch.as_tensor converts other arrays, such as device arrays.
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


_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
"""The methods that return the index tensors of compressed sparse layouts."""


def _values(x: torch.Tensor) -> Array | tuple[object, ...]:
    """Return an array for a strided tensor, a tuple of arrays, shape and layout for a sparse."""
    try:
        if x.layout is torch.sparse_coo:
            parts = x._indices(), x._values(), x.is_coalesced()
            return (str(x.layout), tuple(x.shape), *map(_part, parts))
        if x.layout in _COMPRESSED:
            names = (*_COMPRESSED[x.layout], "values")
            arrays = [_part(getattr(x.detach(), name)()) for name in names]
            return (str(x.layout), tuple(x.shape), *arrays)
        return as_buffer(x.detach().cpu().resolve_conj().resolve_neg()).as_numpy()
    except (RuntimeError, TypeError) as error:
        raise CodecError(f"a tensor can't be part of an object: {error}") from error


def _from_values(state: object) -> torch.Tensor:
    if type(state) is tuple and len(state) == 5:
        return _sparse(*state)
    if type(state) is not np.ndarray:
        raise CodecError(f"a tensor's values are an array, not a {type(state).__name__}")
    return as_tensor(state)


def _parameter(state: Any) -> torch.nn.Parameter:
    """Return a parameter; the state of a frozen one is a tuple with its values."""
    frozen = type(state) is tuple and len(state) == 1
    values = _from_values(state[0] if frozen else state)
    if not (frozen or values.is_floating_point() or values.is_complex()):
        raise CodecError(f"a parameter of {values.dtype} is frozen")
    return torch.nn.Parameter(values, not frozen)


def _part(x: object) -> object:
    return _values(x.contiguous()) if isinstance(x, torch.Tensor) else x


def _sparse(
    name: object, shape: object, first: object, second: object, third: object
) -> torch.Tensor:
    """Return a sparse tensor from its parts, which a peer has sent; CodecError if they are not."""
    layout = _constant(torch.layout, name)
    try:
        if layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(
                _from_values(first),
                _from_values(second),
                shape,
                is_coalesced=bool(third),
                check_invariants=True,
            )
        parts = map(_from_values, (first, second, third))
        return torch.sparse_compressed_tensor(*parts, shape, layout=layout, check_invariants=True)
    except (RuntimeError, TypeError, ValueError) as error:
        raise CodecError(f"these are no parts of a tensor of layout {name}: {error}") from error


def is_dense(x: torch.Tensor) -> bool:
    """Return whether the elements of `x` fill the memory without gaps, in any dimension order."""
    sides = sorted((step, n) for step, n in zip(x.stride(), x.shape, strict=True) if n != 1)
    expected = 1
    for step, n in sides:
        if step != expected:
            return not prod(x.shape)
        expected *= n
    return True


def like(flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return `flat` with the shape of `x`, and with its strides if `x` is dense."""
    return flat.as_strided(x.shape, x.stride()) if is_dense(x) else flat.view(x.shape)
