"""Operations that a caller can't make, with the error and a pattern of its message.

They are those of rank RANK of SIZE ranks.
"""

from typing import Any

import numpy as np

from nc10d.arrays.arguments import LARGEST_TAG
from nc10d.ops import (
    AVG,
    BAND,
    MAX,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Gather,
    Recv,
    Reduce,
    ReduceScatter,
    Scatter,
    Send,
)

RANK, SIZE = 1, 3


def f(n: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.zeros(n, dtype)


def fs(*counts: int) -> list[np.ndarray[Any, Any]]:
    return [f(n) for n in counts]


def frozen(n: int) -> np.ndarray[Any, Any]:
    x = f(n)
    x.flags.writeable = False
    return x


def broadcast_view() -> np.ndarray[Any, Any]:
    return np.lib.stride_tricks.as_strided(f(1), (4,), (0,))


base = f(12)
WRONG: list[tuple[Any, type[Exception], str]] = [
    (AllReduce([1.0]), TypeError, "all_reduce: tensor"),
    (AllReduce(frozen(4)), ValueError, "all_reduce: tensor .* read-only"),
    (AllReduce(broadcast_view()), ValueError, "tensor .* share memory"),
    (AllReduce(f(4), "sum"), TypeError, "op must be a ReduceOp"),
    (AllReduce(f(4), BAND), TypeError, "all_reduce: BAND of float32"),
    (AllReduce(f(4, bool), AVG), TypeError, "AVG of bool"),
    (AllReduce(f(4, complex), MAX), TypeError, "MAX of complex128"),
    (AllReduce(f(4, np.longdouble)), TypeError, "all_reduce: tensor: .*float64"),
    (Reduce(f(4), 3), ValueError, "reduce: dst .* 0 to 2, got 3"),
    (Reduce(f(4), -1), ValueError, "dst"),
    (Reduce(frozen(4), RANK), ValueError, "read-only"),
    (Reduce(f(4), 0, BAND), TypeError, "BAND"),
    (Broadcast(f(4), 5), ValueError, "broadcast: src .* got 5"),
    (Broadcast(f(4), "0"), TypeError, "src must be an integer"),
    (Broadcast(frozen(4), 0), ValueError, "read-only"),
    (AllGather(f(11), f(4)), ValueError, "output_tensor must have 12 elements.* got 11"),
    (AllGather(f(12, np.int32), f(4)), TypeError, "output_tensor must have the dtype of"),
    (AllGather(base, base[3:7]), ValueError, "must not share memory"),
    (AllGather(base, base[0:4]), ValueError, "must not share memory"),
    (AllGather(fs(4, 4), f(4)), ValueError, "all_gather: tensor_list .* 3 in this group, got 2"),
    (AllGather([], f(4)), ValueError, "got 0"),
    (AllGather(fs(4, 5, 4), f(4)), ValueError, r"tensor_list\[1\] must have 4 elements.* got 5"),
    (AllGather([f(4), f(4), frozen(4)], f(4)), ValueError, r"tensor_list\[2\] .* read-only"),
    (AllGather([base[:4], f(4), base[2:6]], f(4)), ValueError, "must not share memory"),
    (AllGather([base[:8:2], base[:4], f(4)], f(4)), ValueError, "must not share memory"),
    (AllGather([f(4), f(4), f(4, int)], f(4)), TypeError, r"tensor_list\[2\] .* dtype"),
    (AllGather([f(4), f(4), None], f(4)), TypeError, r"all_gather: tensor_list\[2\]"),
    (ReduceScatter(f(4), f(11)), ValueError, "reduce_scatter_tensor: input .* 12 elements"),
    (ReduceScatter(base[:4], base), ValueError, "must not share memory"),
    (ReduceScatter(frozen(4), f(12)), ValueError, "output .* read-only"),
    (ReduceScatter(f(4), f(12), BAND), TypeError, "BAND"),
    (ReduceScatter(f(4), fs(4, 4)), ValueError, "input_list"),
    (ReduceScatter(f(4), fs(4, 3, 4)), ValueError, r"input_list\[1\] must have 4"),
    (ReduceScatter(base[:4], [base[2:6], f(4), f(4)]), ValueError, "share memory"),
    (AllToAll(fs(1, 1, 1), f(3)), TypeError, "both be lists"),
    (AllToAll(f(4), f(6)), ValueError, "output_split_sizes.* got 4"),
    (AllToAll(f(6), f(6), [2, 2, 1]), ValueError, r"output_split_sizes .* sum .*\[2, 2, 1\]"),
    (AllToAll(f(6), f(6), [2, 4]), ValueError, "output_split_sizes must be 3 numbers"),
    (AllToAll(f(6), f(6), None, [7, -2, 1]), ValueError, "input_split_sizes"),
    (AllToAll(f(6), f(6), None, [1.5, 2, 3]), TypeError, "must be an integer"),
    (AllToAll(f(6), f(6), [2, 2, 2], [2, 3, 1]), ValueError, "sends itself"),
    (AllToAll(f(6), f(6, int)), TypeError, "dtype"),
    (AllToAll(np.array(0, np.float32), f(3)), ValueError, "0-d"),
    (AllToAll(base, base), ValueError, "must not share memory"),
    (AllToAll(fs(1, 2, 3), fs(3, 3, 0)), ValueError, r"output_tensor_list\[1\] must have 3"),
    (AllToAll(fs(1, 1, 1), fs(1, 1)), ValueError, "input_tensor_list"),
    (Gather(fs(4, 4, 4), f(4), 0), ValueError, "gather_list must be None .* rank 0"),
    (Gather(None, f(4), RANK), ValueError, "gather_list must be given on dst"),
    (Gather(fs(4, 4), f(4), RANK), ValueError, "gather_list"),
    (Gather(fs(4, 3, 4), f(4), RANK), ValueError, r"gather_list\[1\]"),
    (Gather(None, f(4), 9), ValueError, "dst"),
    (Scatter(f(4), fs(4, 4, 4), 0), ValueError, "scatter_list must be None"),
    (Scatter(f(4), None, RANK), ValueError, "scatter_list must be given on src"),
    (Scatter(f(4), fs(4, 3, 4), RANK), ValueError, r"scatter_list\[1\]"),
    (Scatter(f(4), fs(4, 4, 4, 4), RANK), ValueError, "got 4"),
    (Scatter(f(4), None, 9), ValueError, "got 9"),
    (Scatter(frozen(4), None, 0), ValueError, "tensor .* read-only"),
    (Send(f(4), RANK), ValueError, "send: dst must be another rank"),
    (Send(f(4), 3), ValueError, "send: dst"),
    (Send(f(4), 0, -1), ValueError, "send: tag .* got -1"),
    (Send(f(4), 0, LARGEST_TAG + 1), ValueError, r"send: tag .* below 2\*\*63"),
    (Recv(f(4), 0, LARGEST_TAG + 1), ValueError, "recv: tag"),
    (Send(f(4), None), TypeError, "dst must be an integer"),
    (Recv(f(4), RANK), ValueError, "recv: src must be another rank"),
    (Recv(frozen(4), 0), ValueError, "read-only"),
    (Recv(f(4), 0, 0.5), TypeError, "tag must be an integer"),
    (Recv(f(4), 0, "a"), TypeError, "tag must be an integer"),
    (Send(f(4), 0, None), TypeError, "tag must be an integer"),
    (Send(5, 0), TypeError, "send: tensor"),
]
