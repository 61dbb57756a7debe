"""The layer over CUDA's driver: device memory, streams and events by cuda.bindings.

    from nc10d import cuda

    x = cuda.to_device(np.ones(1000, np.float32))
    with cuda.stream(my_stream):        # an int, or CuPy's, Numba's, torch's, __cuda_stream__
        dist.all_reduce(x)

The layer needs no framework, and importing it imports nothing of CUDA. The first call that needs
the driver loads the driver; UnsupportedPlatform names a missing part.
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
