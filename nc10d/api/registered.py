"""Registered arrays: NumPy arrays in memory that the other ranks of the host can read.

    x = nc10d.zeros(1 << 20, np.float32)
    nc10d.all_reduce(x)

A collective copies and reduces registered arrays in place. From 1 MiB on, reducing them is about
twice as fast as reducing other arrays. Otherwise they are ordinary arrays; their memory is freed
when nothing refers to them or a part of them any more. They come from the `cpu` backend of a group;
a backend without such memory gives plain arrays.

If a call fails in which peers write into a registered array (an all_reduce, a broadcast, two ranks'
all_gather or all_to_all), all registered memory of this rank becomes ordinary memory, so that no
late peer can write there. Arrays made afterwards are registered again. Address and contents of the
old arrays stay, but their pages are new: a program that pinned or shared the pages by other means
(cudaHostRegister, RDMA, a forked child) must do so again.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nc10d.group.world import get_default_group

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

Array = np.ndarray[Any, np.dtype[Any]]


def empty(
    shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64, group: ProcessGroup | None = None
) -> Array:
    """Return a registered array with arbitrary contents, C-contiguous and page-aligned.

    MemoryError if it does not fit into the address space that the rank has reserved, as the
    machine's memory, `ulimit -v` and `ulimit -f` permit. Beyond the limit of a memory cgroup (a
    container's) the kernel kills a process instead, as for any memory. ValueError for a negative
    size, TypeError for a dtype with references. May block to make the group's `cpu` backend, as the
    group's first collective would: then all ranks must call.
    """
    wanted = np.dtype(dtype)
    lengths = (shape,) if isinstance(shape, (int, np.integer)) else shape
    shape = tuple(index(n) for n in lengths)
    if any(n < 0 for n in shape):
        raise ValueError(f"an array can't have a negative size, got the shape {shape}")
    if wanted.hasobject:
        raise TypeError(f"an array of {wanted} holds references, which mean nothing to other ranks")
    nbytes = prod(shape) * wanted.itemsize
    owner = get_default_group() if group is None else group
    backend = owner.backend("cpu")
    memory: Array | None = backend.allocate(nbytes) if nbytes else None
    if memory is None:
        return np.empty(shape, wanted)
    return memory.view(wanted).reshape(shape)


def zeros(
    shape: int | Sequence[int], dtype: npt.DTypeLike = np.float64, group: ProcessGroup | None = None
) -> Array:
    """Return a registered array of zeros; see `empty`."""
    x = empty(shape, dtype, group)
    x[...] = 0
    return x


def from_numpy(x: npt.ArrayLike, group: ProcessGroup | None = None) -> Array:
    """Return a registered copy of an array; see `empty`."""
    source = np.asarray(x)
    copy = empty(source.shape, source.dtype, group)
    copy[...] = source
    return copy
