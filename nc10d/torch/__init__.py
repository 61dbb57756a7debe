"""torch's tensors in every call of nc10d, and training with them.

    import nc10d.torch

makes `torch.Tensor` and `torch.nn.Parameter` arrays like any other: memory is shared, nothing is
copied. `DistributedDataParallel` is torch's, on nc10d's Reducer.
"""

from nc10d.torch import tensors
from nc10d.torch.ddp import DistributedDataParallel

__all__ = ["DistributedDataParallel"]

tensors.register()
