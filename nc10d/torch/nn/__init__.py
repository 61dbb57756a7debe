"""The collectives of torch.distributed.nn."""

from nc10d.torch.nn import functional

__all__ = ["functional"]
