"""What a training program takes beside DistributedDataParallel, under torch's names.

`comm_hooks` has the hooks in torch.distributed.algorithms.ddp_comm_hooks, `model_averaging` the
parameter averagers and PostLocalSGDOptimizer, `saving` the checkpoints for a job whose ranks have
the same state.
"""
