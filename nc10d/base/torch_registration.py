"""The registration of the backend "nc10d" with torch.distributed, without an import of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable

NAME = "nc10d"


def register(create: Callable[..., object]) -> None:
    """Register the backend "nc10d", whose groups `create` makes; again: no change.

    It serves the CPU, and CUDA where torch finds a GPU. Nothing happens where torch.distributed has
    not been imported, or is not available.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if NAME.upper() not in distributed.Backend._plugins:
        # torch allocates tensors on a device other than the CPU if a backend claims to serve one.
        found = sys.modules["torch"].cuda.device_count()
        devices = ["cpu", "cuda"] if found else ["cpu"]
        distributed.Backend.register_backend(NAME, create, extended_api=True, devices=devices)
