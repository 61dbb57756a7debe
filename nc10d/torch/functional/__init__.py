"""torch.distributed's functional collectives on nc10d: traceable, compilable, differentiable.

    from nc10d.torch import functional

    @torch.compile(fullgraph=True)
    def layer(x, weight):
        return functional.all_reduce(x @ weight, "sum")

Names, arguments and group forms are those of `nc10d.functional`; results are tensors. The contents
of a graph are described in docs/compile.md.
"""

from nc10d.torch.functional.async_tensor import AsyncCollectiveTensor
from nc10d.torch.functional.tensor_calls import (
    all_gather_into_tensor_coalesced,
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    all_reduce_autograd,
    all_reduce_coalesced,
    all_to_all_single,
    all_to_all_single_autograd,
    broadcast,
    broadcast_autograd,
    permute_tensor,
    reduce_scatter_tensor,
    reduce_scatter_tensor_autograd,
    reduce_scatter_tensor_coalesced,
)

__all__ = [
    "AsyncCollectiveTensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_reduce",
    "all_reduce_autograd",
    "all_reduce_coalesced",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "broadcast_autograd",
    "permute_tensor",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
]
