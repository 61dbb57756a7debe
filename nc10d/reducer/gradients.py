"""The two kinds of gradients: an array like its parameter, or some rows of such an array.

Contract: pure functions that check arrays and copy between them. Embeddings have sparse gradients:
`values[k]` belongs to place `indices[:, k]` of the parameter, and places may repeat.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nc10d.arrays.buffer import as_buffer, device_type
from nc10d.arrays.dtypes import DType, scalar
from nc10d.cuda.memory import (
    copy_to,
    current_stream_key,
    device_of,
    synchronize_stream,
    to_device,
    to_host,
)
from nc10d.ops import Array
from nc10d.reducer.plan import Spec


@dataclass(slots=True, eq=False)
class SparseGradient:
    """Rows of a gradient: torch's COO layout.

    For n rows of a parameter of `shape`, addressed by its first d dimensions, `indices` is an
    int64 array (d, n), and `values` an array (n, *shape[d:]) of the parameter's dtype. Values of a
    repeated place are added up. Both are NumPy arrays, CPU arrays with a NumPy view, or for a
    parameter on a device arrays on that device.
    """

    indices: Array
    values: Array

    def dense(self, shape: tuple[int, ...]) -> Array:
        """Return the whole gradient, with zeros where there are no rows."""
        whole = np.zeros(shape, self.values.dtype)
        np.add.at(whole, tuple(self.indices), self.values)
        return whole


@dataclass(slots=True, eq=False)
class DeviceRows(SparseGradient):
    """Rows on a device as rows on the host; `assign` writes to `given` on the device too."""

    given: SparseGradient
    device: int


def rows_on_host(gradient: SparseGradient) -> SparseGradient:
    """Return the rows themselves, or copies of rows on a device; blocks for what computes them."""
    if device_type(gradient.values) == "cpu" and device_type(gradient.indices) == "cpu":
        return gradient
    indices, values = _on_host(gradient.indices), _on_host(gradient.values)
    return DeviceRows(indices, values, gradient, device_of(gradient.values))


def _on_host(x: Array) -> Array:
    if device_type(x) == "cpu":
        return x
    synchronize_stream(current_stream_key(x))
    return to_host(x)


def no_rows(spec: Spec) -> SparseGradient:
    """Return a sparse gradient without rows."""
    rows = (0, *spec.shape[1:])
    return SparseGradient(np.zeros((1, 0), np.int64), np.zeros(rows, spec.dtype.numpy))


def assign(target: Array, source: Array) -> None:
    """Copy the values in `source` to `target`, a gradient of the same kind."""
    if isinstance(target, SparseGradient):
        target.indices, target.values = source.indices, source.values
        if isinstance(target, DeviceRows):
            given = target.given
            given.indices = to_device(np.ascontiguousarray(source.indices), target.device)
            given.values = to_device(np.ascontiguousarray(source.values), target.device)
    elif type(target) is not np.ndarray and device_type(target) == "cuda":
        copy_to(target, source)
    else:
        target[...] = source


def copy_of(gradient: Array) -> Array:
    """Return a copy that the gradient's reduction does not change."""
    if isinstance(gradient, SparseGradient):
        return SparseGradient(gradient.indices, gradient.values)
    return gradient.clone() if hasattr(gradient, "clone") else gradient.copy()


def fits(gradient: Array, view: Array) -> bool:
    """Return whether both are plain ndarrays with one shape and dtype; else only `check` knows."""
    return (
        type(gradient) is np.ndarray is type(view)
        and gradient.dtype is view.dtype
        and gradient.shape == view.shape
        and gradient.flags.writeable
    )


def check(gradient: Array, spec: Spec, sparse: bool, name: str) -> None:
    """Raise a ValueError or TypeError if this is no valid gradient for the parameter."""
    if isinstance(gradient, SparseGradient) is not sparse:
        expected = "a SparseGradient" if sparse else "an array"
        raise TypeError(f"the gradient of {name} must be {expected}, got {type(gradient).__name__}")
    if sparse:
        _check_rows(gradient, spec, name)
    else:
        _check_array(gradient, spec, name)


def _check_array(gradient: Array, spec: Spec, name: str) -> None:
    buffer = as_buffer(gradient)
    _same(tuple(buffer.shape), spec.shape, name)
    _same_dtype(scalar(buffer.dtype), spec, name)
    if buffer.device != spec.device.partition(":")[0]:
        raise TypeError(f"{name} is on {spec.device}, its gradient on {buffer.device}")
    if buffer.device == "cuda" and not buffer.contiguous:
        raise ValueError(f"the gradient of {name} must be contiguous: kernels move it as a whole")
    if not buffer.writable:
        raise ValueError(f"the gradient of {name} is read-only: the mean can't be put there")


def _check_rows(gradient: SparseGradient, spec: Spec, name: str) -> None:
    places, values = as_buffer(gradient.indices), as_buffer(gradient.values)
    if places.dtype is not DType.INT64 or len(places.shape) != 2 or not places.shape[0]:
        raise TypeError(f"the indices of {name}'s gradient must be int64 of shape (d, n)")
    depth, rows = places.shape
    _same(tuple(values.shape), (rows, *spec.shape[depth:]), name)
    _same_dtype(scalar(values.dtype), spec, name)
    where = places.as_numpy()
    sides = np.array(spec.shape[:depth]).reshape(-1, 1)
    if len(sides) != depth or ((where < 0) | (where >= sides)).any():
        raise ValueError(f"an index of {name}'s gradient is outside of its shape {spec.shape}")


def _same(got: tuple[int, ...], wanted: tuple[int, ...], name: str) -> None:
    if got != wanted:
        raise ValueError(f"the gradient of {name} must have shape {wanted}, it has {got}")


def _same_dtype(got: DType, spec: Spec, name: str) -> None:
    if got is not spec.dtype:
        raise TypeError(f"{name} is of {spec.dtype.label}, its gradient of {got.label}")
