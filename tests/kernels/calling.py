"""Call kernels on memory with guard bytes around it, at any alignment."""

import ctypes

import numpy as np

from nc10d.arrays.dtypes import DType, allows
from nc10d.ops import ReduceOp
from nc10d.ops.reductions import PAIRWISE, kind_named

GUARD = 64
KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
DTYPES = list(DType)


def allowed(name, dtype):
    return allows(dtype, ReduceOp(kind_named(name)))


PAIRS = [(step, dtype) for dtype in DTYPES for step in PAIRWISE if allowed(step, dtype)]
"""Names of pairwise steps, with the types that have them."""


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
