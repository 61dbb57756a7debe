"""The staged backend: device arrays through pinned host memory and a backend for host memory.

    init_process_group("cuda:staged")                # or "gloo", which is "cpu:cpu,cuda:staged"
    init_process_group("cuda:staged", pg_options=StagedOptions(inner="mpi"))

For ranks that share a GPU, and for machines where NCCL can't run. The copies over the host make
this backend slower than NCCL. Results are those of the inner backend. Streams have the same meaning
as with NCCL: an operation begins after the work that is queued on the current stream, and `wait()`
makes that stream wait for the operation. But the host waits, too, until the other ranks' data has
arrived. The backend never writes arrays that an operation only reads, or those of a failed
operation.

Operations can't be captured into a CUDA graph, because the host takes part.
"""
