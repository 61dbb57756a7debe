"""Optimizer state divided over ranks (ZeRO), for arrays and groups; knows no framework.

    owners = partition([x.size for x in params], group.size)
    shares = Shares(params, owners, group)
    for ... in batches:
        for x, owner in zip(params, owners):
            if owner == group.rank:
                step(x)                     # only this rank has the optimizer's state of x
        shares.share()                      # every rank has every owner's values

`partition` and `bucket_pieces` are pure: every rank computes the same owners without messages.
"""

from nc10d.optim.owners import BucketPiece, bucket_pieces, partition
from nc10d.optim.shares import Shares

__all__ = ["BucketPiece", "Shares", "bucket_pieces", "partition"]
