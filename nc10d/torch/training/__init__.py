"""What a training program takes beside DistributedDataParallel, under torch's names.

`comm_hooks` has the hooks of torch.distributed.algorithms.ddp_comm_hooks, `model_averaging` the
averagers of parameters and PostLocalSGDOptimizer, `saving` the checkpoints of a job whose ranks
have the same state.
"""
