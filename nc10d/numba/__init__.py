"""Communication inside functions that Numba compiles, without the GIL: on the default group.

    from numba import njit
    from nc10d import numba as nb

    @njit(nogil=True)
    def step(x):
        nb.all_reduce(x, nb.MAX)

The calls are all_reduce, broadcast, send, recv and barrier. They take C-contiguous arrays of
nc10d's dtypes that Numba has, so not float16, bfloat16 and float8; ranks are global. A function
that uses them may be cached (`cache=True`); its program imports this package before it calls the
function. Outside compiled code they are nc10d's own calls.

Errors are those of nc10d's calls, raised from the compiled function, which can't catch them. A
thread that Python does not know, such as those of `prange`, gets a RuntimeError. Inside a
coalescing block a compiled call is a ValueError.
"""

from nc10d.numba.compiled_calls import Reductions, all_reduce, barrier, broadcast, recv, send

SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR = Reductions

__all__ = [
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "all_reduce",
    "barrier",
    "broadcast",
    "recv",
    "send",
]
