"""Use torch's tensors in every call of nc10d, and train with them.

    import nc10d.torch

registers `torch.Tensor` and `torch.nn.Parameter` as array types: calls use their memory without a
copy. `DistributedDataParallel` has torch's interface, and reduces with nc10d's Reducer. A function
that torch.compile compiles may make all calls; they stay uncompiled.
"""

from nc10d.torch import compiling, tensors, torch_calls
from nc10d.torch.ddp import DistributedDataParallel

__all__ = ["DistributedDataParallel"]

tensors.register()
torch_calls.register()
compiling.mark_public_calls()
