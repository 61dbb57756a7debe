"""Call kernels on memory with guard bytes around it, at any alignment."""

import ctypes

import numpy as np

from nc10d.dtypes import DType, Family, check_reduce
from nc10d.ops import RedOp, ReduceOp

GUARD = 64
KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
DTYPES = list(DType)


def allowed(kind, dtype):
    try:
        check_reduce(dtype, ReduceOp(kind, 1.0 if kind is RedOp.PREMUL_SUM else None))
    except TypeError:
        return False
    return True


KINDS = [k for k in RedOp if k not in (RedOp.AVG, RedOp.PREMUL_SUM)]
PAIRS = [(kind, dtype) for dtype in DTYPES for kind in KINDS if allowed(kind, dtype)]


class Memory:
    """A copy of an array at an address that is `offset` past a multiple of 64."""

    def __init__(self, x, offset=0):
        self.dtype, self.nbytes = x.dtype, x.nbytes
        self._room = np.full(x.nbytes + 3 * GUARD + offset, 0xA5, np.uint8)
        self._at = GUARD + (-self._room.ctypes.data) % GUARD + offset
        self.address = self._room.ctypes.data + self._at
        self._bytes = self._room[self._at : self._at + x.nbytes]
        self._bytes[:] = np.frombuffer(x.tobytes(), np.uint8)

    def array(self):
        return np.frombuffer(self._bytes.tobytes(), self.dtype)

    def guards_hold(self):
        before, after = self._room[: self._at], self._room[self._at + self.nbytes :]
        return bool(np.all(before == 0xA5) and np.all(after == 0xA5))


def special_values(dtype):
    if dtype.family is Family.BOOL:
        return np.array([False, True])
    if dtype.family in (Family.INT, Family.UINT):
        info = np.iinfo(dtype.numpy)
        return np.array([0, 1, 2, 3, info.max, info.min, info.max // 2], dtype.numpy)
    real = [0.0, -0.0, 1.0, -1.0, 1.5, 3.0, np.nan, np.inf, -np.inf, 1e-7, 448.0, 6e4, 1e38]
    with np.errstate(all="ignore"):
        return np.array(real).astype(dtype.numpy)


def values(dtype, count, seed):
    """Return special values, ordinary ones, and random bits (so also subnormals and NaNs)."""
    rng = np.random.default_rng(seed)
    if dtype.family is Family.BOOL:
        return rng.integers(0, 2, count).astype(bool)
    bits = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype.numpy)
    with np.errstate(all="ignore"):
        ordinary = (rng.standard_normal(count) * 100).astype(np.float32).astype(dtype.numpy)
    choice = rng.integers(0, 3, count)
    special = rng.choice(special_values(dtype), count)
    return np.where(choice == 0, special, np.where(choice == 1, ordinary, bits)).astype(dtype.numpy)
