"""The staged backend: device arrays through pinned host memory and a backend for host memory.

    init_process_group("cuda:staged")                # or "gloo", which is "cpu:cpu,cuda:staged"
    init_process_group("cuda:staged", pg_options=StagedOptions(inner="mpi"))

For ranks that share one GPU, and for machines where NCCL can't run: slower than NCCL by the way
over the host, with the results of the backend that it takes. Streams mean what they mean with NCCL:
an operation begins behind what is queued on the current stream, and `wait()` puts it in front of
what is queued next; but the host waits, too, until the other ranks' part is there. What an
operation only reads, or a failed one was to write, is never written.

It can't be captured into a CUDA graph, because the host takes part.
"""
