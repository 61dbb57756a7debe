"""Invalid operations of rank RANK of SIZE ranks, with the error and a pattern of its message."""

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


def floats(n: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.zeros(n, dtype)


def float_lists(*counts: int) -> list[np.ndarray[Any, Any]]:
    return [floats(n) for n in counts]


def frozen(n: int) -> np.ndarray[Any, Any]:
    x = floats(n)
    x.flags.writeable = False
    return x


def broadcast_view() -> np.ndarray[Any, Any]:
    return np.lib.stride_tricks.as_strided(floats(1), (4,), (0,))


shared = floats(12)
WRONG: list[tuple[Any, type[Exception], str]] = [
    (AllReduce([1.0]), TypeError, "all_reduce: tensor"),
    (AllReduce(frozen(4)), ValueError, "all_reduce: tensor .* read-only"),
    (AllReduce(broadcast_view()), ValueError, "tensor .* share memory"),
    (AllReduce(floats(4), "sum"), TypeError, "op must be a ReduceOp"),
    (AllReduce(floats(4), BAND), TypeError, "all_reduce: BAND of float32"),
    (AllReduce(floats(4, bool), AVG), TypeError, "AVG of bool"),
    (AllReduce(floats(4, complex), MAX), TypeError, "MAX of complex128"),
    (AllReduce(floats(4, np.longdouble)), TypeError, "all_reduce: tensor: .*float64"),
    (Reduce(floats(4), 3), ValueError, "reduce: dst .* 0 to 2, got 3"),
    (Reduce(floats(4), -1), ValueError, "dst"),
    (Reduce(frozen(4), RANK), ValueError, "read-only"),
    (Reduce(floats(4), 0, BAND), TypeError, "BAND"),
    (Broadcast(floats(4), 5), ValueError, "broadcast: src .* got 5"),
    (Broadcast(floats(4), "0"), TypeError, "src must be an integer"),
    (Broadcast(frozen(4), 0), ValueError, "read-only"),
    (AllGather(floats(11), floats(4)), ValueError, "output_tensor must have 12 elements.* got 11"),
    (AllGather(floats(12, np.int32), floats(4)), TypeError, "output_tensor must have the dtype of"),
    (AllGather(shared, shared[3:7]), ValueError, "must not share memory"),
    (AllGather(shared, shared[0:4]), ValueError, "must not share memory"),
    (
        AllGather(float_lists(4, 4), floats(4)),
        ValueError,
        "all_gather: tensor_list .* 3 in this group, got 2",
    ),
    (AllGather([], floats(4)), ValueError, "got 0"),
    (
        AllGather(float_lists(4, 5, 4), floats(4)),
        ValueError,
        r"tensor_list\[1\] must have 4 elements.* got 5",
    ),
    (
        AllGather([floats(4), floats(4), frozen(4)], floats(4)),
        ValueError,
        r"tensor_list\[2\] .* read-only",
    ),
    (
        AllGather([shared[:4], floats(4), shared[2:6]], floats(4)),
        ValueError,
        "must not share memory",
    ),
    (
        AllGather([shared[:8:2], shared[:4], floats(4)], floats(4)),
        ValueError,
        "must not share memory",
    ),
    (
        AllGather([floats(4), floats(4), floats(4, int)], floats(4)),
        TypeError,
        r"tensor_list\[2\] .* dtype",
    ),
    (
        AllGather([floats(4), floats(4), None], floats(4)),
        TypeError,
        r"all_gather: tensor_list\[2\]",
    ),
    (
        ReduceScatter(floats(4), floats(11)),
        ValueError,
        "reduce_scatter_tensor: input .* 12 elements",
    ),
    (ReduceScatter(shared[:4], shared), ValueError, "must not share memory"),
    (ReduceScatter(frozen(4), floats(12)), ValueError, "output .* read-only"),
    (ReduceScatter(floats(4), floats(12), BAND), TypeError, "BAND"),
    (ReduceScatter(floats(4), float_lists(4, 4)), ValueError, "input_list"),
    (ReduceScatter(floats(4), float_lists(4, 3, 4)), ValueError, r"input_list\[1\] must have 4"),
    (ReduceScatter(shared[:4], [shared[2:6], floats(4), floats(4)]), ValueError, "share memory"),
    (AllToAll(float_lists(1, 1, 1), floats(3)), TypeError, "both be lists"),
    (AllToAll(floats(4), floats(6)), ValueError, "output_split_sizes.* got 4"),
    (
        AllToAll(floats(6), floats(6), [2, 2, 1]),
        ValueError,
        r"output_split_sizes .* sum .*\[2, 2, 1\]",
    ),
    (AllToAll(floats(6), floats(6), [2, 4]), ValueError, "output_split_sizes must be 3 numbers"),
    (AllToAll(floats(6), floats(6), None, [7, -2, 1]), ValueError, "input_split_sizes"),
    (AllToAll(floats(6), floats(6), None, [1.5, 2, 3]), TypeError, "must be an integer"),
    (AllToAll(floats(6), floats(6), [2, 2, 2], [2, 3, 1]), ValueError, "sends itself"),
    (AllToAll(floats(6), floats(6, int)), TypeError, "dtype"),
    (AllToAll(np.array(0, np.float32), floats(3)), ValueError, "0-d"),
    (AllToAll(shared, shared), ValueError, "must not share memory"),
    (
        AllToAll(float_lists(1, 2, 3), float_lists(3, 3, 0)),
        ValueError,
        r"output_tensor_list\[1\] must have 3",
    ),
    (AllToAll(float_lists(1, 1, 1), float_lists(1, 1)), ValueError, "input_tensor_list"),
    (Gather(float_lists(4, 4, 4), floats(4), 0), ValueError, "gather_list must be None .* rank 0"),
    (Gather(None, floats(4), RANK), ValueError, "gather_list must be given on dst"),
    (Gather(float_lists(4, 4), floats(4), RANK), ValueError, "gather_list"),
    (Gather(float_lists(4, 3, 4), floats(4), RANK), ValueError, r"gather_list\[1\]"),
    (Gather(None, floats(4), 9), ValueError, "dst"),
    (Scatter(floats(4), float_lists(4, 4, 4), 0), ValueError, "scatter_list must be None"),
    (Scatter(floats(4), None, RANK), ValueError, "scatter_list must be given on src"),
    (Scatter(floats(4), float_lists(4, 3, 4), RANK), ValueError, r"scatter_list\[1\]"),
    (Scatter(floats(4), float_lists(4, 4, 4, 4), RANK), ValueError, "got 4"),
    (Scatter(floats(4), None, 9), ValueError, "got 9"),
    (Scatter(frozen(4), None, 0), ValueError, "tensor .* read-only"),
    (Send(floats(4), RANK), ValueError, "send: dst must be another rank"),
    (Send(floats(4), 3), ValueError, "send: dst"),
    (Send(floats(4), 0, -1), ValueError, "send: tag .* got -1"),
    (Send(floats(4), 0, LARGEST_TAG + 1), ValueError, r"send: tag .* below 2\*\*63"),
    (Recv(floats(4), 0, LARGEST_TAG + 1), ValueError, "recv: tag"),
    (Send(floats(4), None), TypeError, "dst must be an integer"),
    (Recv(floats(4), RANK), ValueError, "recv: src must be another rank"),
    (Recv(frozen(4), 0), ValueError, "read-only"),
    (Recv(floats(4), 0, 0.5), TypeError, "tag must be an integer"),
    (Recv(floats(4), 0, "a"), TypeError, "tag must be an integer"),
    (Send(floats(4), 0, None), TypeError, "tag must be an integer"),
    (Send(5, 0), TypeError, "send: tensor"),
]
