"""The layer over CUDA's driver: device memory, streams and events by cuda.bindings.

    import numpy as np
    import nc10d as dist
    from nc10d import cuda

    dist.init_process_group("nccl")
    x = cuda.to_device(np.ones(1000, np.float32))    # on device LOCAL_RANK, if that is set
    dist.all_reduce(x)
    print(x.to_host())

Calls go to the current stream, and `stream` chooses another. So a call becomes part of a CUDA graph
that a stream captures, by cuda.bindings or a framework. The group must have been used before,
because its communicator can't be formed amid a capture:

    stream = cuda.Stream()
    with cuda.stream(stream):            # or CuPy's, Numba's, torch's, an int, __cuda_stream__
        dist.all_reduce(x)
        driver.cuStreamBeginCapture(stream.handle, mode)
        dist.all_reduce(x)
        _, graph = driver.cuStreamEndCapture(stream.handle)

The layer needs no framework, and importing it imports nothing of CUDA. The first call that needs
the driver loads the driver; UnsupportedPlatform names a missing part. A process that is forked from
one that has used CUDA can't use CUDA (UnsupportedPlatform), and frees nothing of its parent's.
"""

from nc10d.cuda.driver import available as available
from nc10d.cuda.driver import current_device as current_device
from nc10d.cuda.driver import device_count as device_count
from nc10d.cuda.driver import on_device as on_device
from nc10d.cuda.driver import ordinal as ordinal
from nc10d.cuda.driver import synchronize as synchronize
from nc10d.cuda.memory import DeviceArray as DeviceArray
from nc10d.cuda.memory import copy_to as copy_to
from nc10d.cuda.memory import empty as empty
from nc10d.cuda.memory import to_device as to_device
from nc10d.cuda.memory import to_host as to_host
from nc10d.cuda.memory import zeros as zeros
from nc10d.cuda.streams import Stream as Stream
from nc10d.cuda.streams import stream as stream
from nc10d.cuda.streams import stream_handle as stream_handle
from nc10d.cuda.streams import stream_of as stream_of
