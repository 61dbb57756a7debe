"""torch.distributed's functional collectives on nc10d: traceable, compilable, differentiable.

    from nc10d.torch import functional

    @torch.compile(fullgraph=True)
    def layer(x, weight):
        return functional.all_reduce(x @ weight, "sum")

Names, arguments and group forms are those of `nc10d.functional`; results are tensors. The contents
of a graph are described in docs/compile.md.
"""

from nc10d.torch.functional.async_tensor import AsyncCollectiveTensor
from nc10d.torch.functional.in_place import (
    all_gather_inplace,
    all_gather_tensor_inplace,
    all_reduce_inplace,
    all_to_all_inplace,
    batch_p2p_inplace,
    broadcast_inplace,
    recv_inplace,
    reduce_scatter_tensor_inplace,
)
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
from nc10d.torch.functional.tensor_messages import (
    Ticket,
    barrier,
    batch_p2p,
    irecv,
    isend,
    recv,
    send,
    wait_tensor,
)

__all__ = [
    "AsyncCollectiveTensor",
    "Ticket",
    "all_gather_inplace",
    "all_gather_into_tensor_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_gather_tensor_inplace",
    "all_reduce",
    "all_reduce_autograd",
    "all_reduce_coalesced",
    "all_reduce_inplace",
    "all_to_all_inplace",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "barrier",
    "batch_p2p",
    "batch_p2p_inplace",
    "broadcast",
    "broadcast_autograd",
    "broadcast_inplace",
    "irecv",
    "isend",
    "permute_tensor",
    "recv",
    "recv_inplace",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_inplace",
    "send",
    "wait_tensor",
]
