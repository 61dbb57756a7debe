"""The layer over CUDA's driver: device memory, streams and events by cuda.bindings.

    from nc10d import cuda

    x = cuda.to_device(np.ones(1000, np.float32))
    with cuda.stream(my_stream):        # an int, or CuPy's, Numba's, torch's, __cuda_stream__
        dist.all_reduce(x)

It needs no framework, and importing it imports nothing of CUDA. The first call that needs the
driver loads it; UnsupportedPlatform names the missing part.
"""

from __future__ import annotations

from nc10d.cuda.driver import (
    available,
    current_device,
    device_count,
    on_device,
    ordinal,
    synchronize,
)
from nc10d.cuda.memory import DeviceArray, copy_to, empty, to_device, to_host, zeros
from nc10d.cuda.streams import Stream, stream, stream_handle, stream_of

__all__ = [
    "DeviceArray",
    "Stream",
    "available",
    "copy_to",
    "current_device",
    "device_count",
    "empty",
    "on_device",
    "ordinal",
    "stream",
    "stream_handle",
    "stream_of",
    "synchronize",
    "to_device",
    "to_host",
    "zeros",
]
