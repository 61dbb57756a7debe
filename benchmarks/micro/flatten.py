"""Measure packing and unpacking a bucket of 25 MiB, beside torch and memcpy.

160 float32 tensors of a network's sizes are copied into a flat array and back: by nc10d, with the
division by the number of ranks and without, by torch._foreach_copy_ on the same memory, and by a
memcpy of as many bytes. All take turns in each round, in random order, each with a single thread.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.background_load import BackgroundLoad
from benchmarks.estimates import Estimate, Times, estimate
from nc10d.arrays.dtypes import DType
from nc10d.kernels.pack import copy_address, move_all
from nc10d.reducer.packing import kernel_for, memory_of, move, only_dtype, places_in

NBYTES = 25 << 20
TENSORS = 160
MEMCPY = "memcpy"
Call = Callable[[], object]
Array = np.ndarray[Any, np.dtype[np.float32]]
Addresses = np.ndarray[Any, np.dtype[np.int64]]


def pack(arrays: Sequence[Array], flat: Array, offsets: Sequence[int], scale: float = 1.0) -> None:
    """Write `arrays[i] * scale` to `flat` from element `offsets[i]` on, in the dtype of `flat`.

    ValueError for an array that is not contiguous or does not fit. TypeError for dtypes that differ
    and are not both floating. Both are raised before the first write.
    """
    whole, sources = memory_of(flat, True), [memory_of(x, False) for x in arrays]
    places = places_in(whole, sources, offsets)
    rows = [(place, x.address, x.nbytes) for place, x in zip(places, sources, strict=True)]
    move(rows, only_dtype([x.dtype for x in sources]), whole.dtype, scale)


def unpack(
    flat: Array, arrays: Sequence[Array], offsets: Sequence[int], scale: float = 1.0
) -> None:
    """Write `flat * scale`, from element `offsets[i]` on, to `arrays[i]`; errors as for `pack`."""
    whole, targets = memory_of(flat, False), [memory_of(x, True) for x in arrays]
    places = places_in(whole, targets, offsets)
    size = whole.dtype.itemsize
    rows = [(x.address, place, x.count * size) for place, x in zip(places, targets, strict=True)]
    move(rows, whole.dtype, only_dtype([x.dtype for x in targets]), scale)


class Packer:
    """Packs the same NumPy arrays into a flat array, and unpacks them, many times.

    The constructor checks the arrays; errors as for `pack`. Each call reads the addresses from the
    array objects by compiled code, since a resize may have moved an array. A call raises ValueError
    if the number of bytes of an array has changed.
    """

    def __init__(self, arrays: Sequence[Array], flat: Array, offsets: Sequence[int]) -> None:
        if any(type(x) is not np.ndarray for x in (flat, *arrays)):
            raise TypeError("a Packer is for plain NumPy arrays")
        self._arrays, self._flat = list(arrays), flat
        whole, buffers = memory_of(flat, True), [memory_of(x, True) for x in arrays]
        places_in(whole, buffers, offsets)
        self._dtypes = only_dtype([x.dtype for x in buffers]), whole.dtype
        self._nbytes = [x.nbytes for x in (flat, *arrays)]
        sizes = [[x.nbytes, x.count * whole.dtype.itemsize] for x in buffers]
        self._sizes = np.array(sizes, np.int64).reshape(-1, 2)
        self._offsets = np.array(offsets, np.int64) * whole.dtype.itemsize
        self._addresses = np.zeros(1 + len(buffers), np.int64)
        table = self._addresses.ctypes.data
        rows = [(table + 8 * i, id(x) + _DATA, 8) for i, x in enumerate((flat, *arrays))]
        self._address_rows = np.array(rows, np.int64)

    def pack(self, scale: float = 1.0) -> None:
        """Write the arrays, times `scale`, to the flat array."""
        arrays, places = self._current_addresses()
        src, dst = self._dtypes
        self._move(np.column_stack([places, arrays, self._sizes[:, 0]]), src, dst, scale)

    def unpack(self, scale: float = 1.0) -> None:
        """Write the flat array, times `scale`, to the arrays."""
        arrays, places = self._current_addresses()
        dst, src = self._dtypes
        self._move(np.column_stack([arrays, places, self._sizes[:, 1]]), src, dst, scale)

    def _current_addresses(self) -> tuple[Addresses, Addresses]:
        """Return the current addresses of the arrays, and of their places in the flat array."""
        if [x.nbytes for x in (self._flat, *self._arrays)] != self._nbytes:
            raise ValueError("an array was resized since the Packer was made")
        move_all(self._address_rows.ctypes.data, len(self._address_rows), copy_address(), 0)
        return self._addresses[1:], self._addresses[0] + self._offsets

    def _move(self, table: Addresses, src: DType | None, dst: DType | None, scale: float) -> None:
        if src is not None and dst is not None:
            factor = np.array(scale, np.float64)
            kernel = kernel_for(src, dst, scale, int(table[:, 2].sum()))
            move_all(table.ctypes.data, len(table), kernel, factor.ctypes.data)


_DATA = object.__basicsize__
"""Offset of an ndarray's data pointer: right behind the object header (NumPy's C API)."""


def counts(tensors: int = TENSORS, total: int = NBYTES // 4) -> list[int]:
    """Return the tensors' numbers of elements: large, medium and two small, in turn."""
    small = [64 + 16 * (i % 7) for i in range(tensors)]
    weights = [(16, 4, 0, 0)[i % 4] for i in range(tensors)]
    rest = total - sum(small)
    shared = [rest * weight // sum(weights) for weight in weights]
    shared[0] += rest - sum(shared)
    return [a + b for a, b in zip(small, shared, strict=True)]


def calls(sizes: Sequence[int], ranks: int) -> dict[str, Call]:
    """Return the timed calls by name; torch's where torch is installed."""
    arrays = [np.full(count, index % 7 + 1, np.float32) for index, count in enumerate(sizes)]
    offsets = np.cumsum([0, *sizes[:-1]]).tolist()
    flat, other = np.zeros(sum(sizes), np.float32), np.ones(sum(sizes), np.float32)
    packer, scale = Packer(arrays, flat, offsets), 1 / ranks
    found: dict[str, Call] = {
        MEMCPY: lambda: ctypes.memmove(flat.ctypes.data, other.ctypes.data, flat.nbytes),
        "memcpy back": lambda: ctypes.memmove(other.ctypes.data, flat.ctypes.data, flat.nbytes),
        "pack": packer.pack,
        "pack, scaled": lambda: packer.pack(scale),
        "unpack": packer.unpack,
        "unpack, scaled": lambda: packer.unpack(scale),
    }
    return found | torch_calls(arrays, flat, sizes)


def torch_calls(arrays: Sequence[Array], flat: Array, sizes: Sequence[int]) -> dict[str, Call]:
    """Return torch's calls on the same memory; empty where it is not installed."""
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(1)
    tensors = [torch.from_numpy(x) for x in arrays]
    views = list(torch.from_numpy(flat).split(list(sizes)))
    return {
        "torch._foreach_copy_ into": lambda: torch._foreach_copy_(views, tensors),
        "torch._foreach_copy_ back": lambda: torch._foreach_copy_(tensors, views),
    }


def measure(calls_by_name: Mapping[str, Call], rounds: int, repeats: int) -> Times:
    """Return the seconds of each call in each round, without the first round.

    Each round has a random order, because a call depends on its predecessor's use of the caches.
    """
    chance = random.Random(TENSORS)
    found: Times = {name: [] for name in calls_by_name}
    for number in range(rounds + 1):
        for name in chance.sample([*calls_by_name], len(calls_by_name)):
            start = time.perf_counter()
            for _ in range(repeats):
                calls_by_name[name]()
            if number:
                found[name].append((time.perf_counter() - start) / repeats)
    return found


def report(found: Mapping[str, Estimate], nbytes: int) -> list[str]:
    """Return lines: µs, GB/s read and written, and the ratio to memcpy's speed."""
    whole = found[MEMCPY].median
    lines = [f"{'':<28}{'µs (interval)':>26}{'GB/s':>8}{'of memcpy':>11}"]
    for name, time_ in found.items():
        speed = 2 * nbytes / time_.median / 1e9
        lines.append(f"{name:<28}{time_!s:>26}{speed:>8.2f}{whole / time_.median:>11.2f}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Blocks for all rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks flatten", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="divisor of gradients")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--repeats", type=int, default=3, help="in each round")
    options = parser.parse_args(arguments)
    sizes = counts()
    with BackgroundLoad() as others:
        found = measure(calls(sizes, options.ranks), options.rounds, options.repeats)
    print(f"# {len(sizes)} tensors, {4 * sum(sizes)} bytes; others used {others.cores:.2f} cores")
    estimates = {name: estimate(times) for name, times in found.items()}
    print(*report(estimates, 4 * sum(sizes)), sep="\n")
    return 0
