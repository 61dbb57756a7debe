"""Determine the devices of a module, and move its inputs: torch's rules for `device_ids`.

Contract: this module needs no GPU; it reads only the `device` attribute of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from nc10d.cuda import ordinal

_KINDS = {"cpu", "cuda"}


class Placement(NamedTuple):
    """The devices of a module, as in torch's attributes of the same names.

    Both are None for a module on the CPU or on several devices, and for a module whose caller moves
    the inputs.
    """

    device_ids: list[int] | None = None
    output_device: int | None = None

    def moved(self, value: Any) -> Any:
        """Return inputs on the module's device, or unchanged without `device_ids`; see `moved`."""
        if self.device_ids is None:
            return value
        return moved(value, torch.device("cuda", self.device_ids[0]))


def placement(
    params: Iterable[torch.Tensor], device_ids: Sequence[Any] | None, output_device: Any
) -> Placement:
    """Return the placement of a module with these parameters; ValueError as torch's DDP."""
    devices = {x.device for x in params}
    names = ", ".join(sorted(map(str, devices)))
    kinds = {device.type for device in devices}
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids must be None or have one device, got {device_ids}")
    if len(kinds) != 1 or not kinds <= _KINDS:
        raise ValueError(f"a module must be on the CPU or on GPUs, all of it: it is on {names}")
    if device_ids and len(devices) == 1 and kinds == {"cuda"}:
        first = ordinal(device_ids[0])
        return Placement([first], first if output_device is None else ordinal(output_device))
    if device_ids or output_device:
        raise ValueError(
            "device_ids and output_device are for a module on one GPU, of one process: got "
            f"{device_ids} and {output_device} for a module on {names}"
        )
    return Placement()


def moved(value: Any, device: torch.device) -> Any:
    """Return a copy of nested tuples, lists and dicts with all tensors on a device.

    Other containers stay unchanged, as in torch.
    """
    if isinstance(value, (torch.Tensor, PackedSequence)):
        return value.to(device)
    if not isinstance(value, (list, tuple, dict)) or not value:
        return value
    if isinstance(value, dict):
        return type(value)((key, moved(item, device)) for key, item in value.items())
    items = [moved(item, device) for item in value]
    if hasattr(value, "_fields"):
        return type(value)(*items)
    return items if isinstance(value, list) else tuple(items)
