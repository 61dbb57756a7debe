"""Operations and reductions as data: classes, and the facts that every layer looks up.

| file | contents |
|---|---|
| `operations` | a class for each operation: arrays and options as data |
| `reductions` | the kinds of reduction: pairwise steps, and the work before and after |
| `facts` | the facts about each kind of operation: a record for each class |
"""

from nc10d.ops.operations import *  # noqa: F403  (every class, as it is added)
from nc10d.ops.reductions import AVG as AVG
from nc10d.ops.reductions import BAND as BAND
from nc10d.ops.reductions import BOR as BOR
from nc10d.ops.reductions import BXOR as BXOR
from nc10d.ops.reductions import MAX as MAX
from nc10d.ops.reductions import MIN as MIN
from nc10d.ops.reductions import PRODUCT as PRODUCT
from nc10d.ops.reductions import SUM as SUM
from nc10d.ops.reductions import ReduceOp as ReduceOp
from nc10d.ops.reductions import ReductionKind as ReductionKind
from nc10d.ops.reductions import premul_sum as premul_sum
