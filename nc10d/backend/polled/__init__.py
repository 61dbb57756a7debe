"""The common part of the backends over a polled library, MPI or UCC.

- `flat_buffers`: an operation's arrays as contiguous memory, and nc10d's kernels on that memory;
- `device_arrays`: a launch's device arrays;
- `polled_collectives`: each collective's steps, over a library's requests;
- `block_order`: the dependencies between a block's operations;
- `launches`: a launch's Work, and the launch's parts as steps;
- `polled_group`: a group's calls, messages and failure;
- `polled_backend`: launches that block or not, an interrupt, an abort, the end;
- `progress_thread`: polling, by waiting threads, and by a thread if none waits.
"""
