"""The common part of the backends over a polled library, MPI or UCC.

- `flat_buffers`: an operation's arrays as contiguous memory, and nc10d's kernels on it;
- `device_arrays`: the device arrays of a launch;
- `polled_collectives`: the steps of each collective, over a library's requests;
- `block_order`: the dependencies between the operations of a block;
- `launches`: the Work of a launch, and its parts as steps;
- `polled_group`: a group's calls, messages and failure;
- `polled_backend`: launches that block or not, an interrupt, an abort, the end;
- `progress_thread`: polling, by waiting threads, and by a thread if none waits.
"""
