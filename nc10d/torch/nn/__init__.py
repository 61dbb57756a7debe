"""torch.distributed.nn's collectives; see `functional`."""

from nc10d.torch.nn import functional
from nc10d.torch.nn.functional import *  # noqa: F403

__all__ = ["functional"]
__all__ += functional.__all__
