"""Operations and reductions as data: classes, and the facts that every layer looks up.

| file | contents |
|---|---|
| `operations` | a class for each operation: arrays and options as data |
| `reductions` | the kinds of reduction: pairwise steps, and the work before and after |
| `facts` | the facts about each kind of operation: one record for each class |
"""

from nc10d.ops.operations import (
    AllGather,
    AllReduce,
    AllReduces,
    AllToAll,
    Array,
    Arrays,
    Barrier,
    Broadcast,
    Gather,
    MessageInfo,
    Op,
    Recv,
    Reduce,
    ReduceScatter,
    RepeatedOps,
    Scatter,
    Send,
)
from nc10d.ops.reductions import (
    AVG,
    BAND,
    BOR,
    BXOR,
    MAX,
    MIN,
    PRODUCT,
    SUM,
    ReduceOp,
    ReductionKind,
    premul_sum,
)

__all__ = [
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "AllGather",
    "AllReduce",
    "AllReduces",
    "AllToAll",
    "Array",
    "Arrays",
    "Barrier",
    "Broadcast",
    "Gather",
    "MessageInfo",
    "Op",
    "Recv",
    "Reduce",
    "ReduceOp",
    "ReduceScatter",
    "ReductionKind",
    "RepeatedOps",
    "Scatter",
    "Send",
    "premul_sum",
]
