"""Parts that backends over a polled library (MPI, UCC) share: arrays, sizes, order, progress.

- `flat_buffers`: an operation's arrays as contiguous memory, and nc10d's kernels on it;
- `announced_sizes`: sizes that each rank has for itself, and their comparison;
- `block_order`: the dependencies between the operations of a block;
- `launches`: the Work of a launch, and what of it runs side by side or must follow;
- `progress_thread`: polling, by waiting threads, and by a thread if none waits.
"""
