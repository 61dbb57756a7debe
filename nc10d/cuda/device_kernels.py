"""Kernels from PTX, loaded on a device for good."""

from __future__ import annotations

import functools
import re

from nc10d.cuda.driver import call, driver, on_device
from nc10d.cuda.streams import relaxed_capture_mode
from nc10d.errors import CudaError

_UNSUPPORTED_PTX = 222
"""CUDA_ERROR_UNSUPPORTED_PTX_VERSION (cuda.h)."""
_VERSIONS = [f"{major}.{minor}" for major in (9, 8, 7) for minor in range(9, -1, -1)]


@functools.cache
def capability(device: int) -> tuple[int, int]:
    """Return a device's compute capability, such as (9, 0)."""
    kinds = driver().CUdevice_attribute
    major, minor = (
        int(call("cuDeviceGetAttribute", kind, call("cuDeviceGet", device)))
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return major, minor


@functools.cache
def load_kernel(device: int, ptx: str) -> int:
    """Return the driver's handle of the kernel in a PTX text, which stays loaded.

    May be called amid a capture in any mode, although loading may allocate memory. CudaError, for
    the text as given, if the driver refuses all versions.
    """
    name = re.search(r"\.visible \.entry (\w+)\(", ptx)
    assert name, "NVVM made no kernel"
    with relaxed_capture_mode(), on_device(device):
        return int(call("cuModuleGetFunction", _loaded(ptx), name[1].encode()))


def _loaded(ptx: str) -> object:
    """Return the driver's module for a PTX text."""
    # A driver rejects PTX that states a newer version than the driver knows. These kernels use only
    # old instructions, so the text is loaded again with earlier versions.
    stated = re.search(r"\.version (\d\.\d)", ptx)
    assert stated, "PTX begins with its version (PTX ISA, .version)"
    refused: CudaError | None = None
    for version in [stated[1], *(earlier for earlier in _VERSIONS if earlier < stated[1])]:
        text = ptx.replace(stated[0], f".version {version}", 1)
        try:
            return call("cuModuleLoadData", text.encode() + b"\0")
        except CudaError as error:
            refused = refused or error
            if error.code != _UNSUPPORTED_PTX:
                break
    assert refused is not None, "at least one version has been tried"
    raise refused
