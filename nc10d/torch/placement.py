"""Which devices a module is trained on, and where its inputs go: torch's rules for `device_ids`.

Contract: nothing here needs a GPU, or looks at more than what devices tensors say they are on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from nc10d.cuda import ordinal

_KINDS = {"cpu", "cuda"}


class Placement(NamedTuple):
    """The devices of a module, as torch's attributes of the same names have them.

    Both are None for a module on the CPU, one on several devices, and one that gets its inputs
    where it needs them.
    """

    device_ids: list[int] | None = None
    output_device: int | None = None

    def moved(self, value: Any) -> Any:
        """Return inputs on the module's device, if that is known; see `moved`."""
        if self.device_ids is None:
            return value
        return moved(value, torch.device("cuda", self.device_ids[0]))


def placement(
    params: Iterable[torch.Tensor], device_ids: Sequence[Any] | None, output_device: Any
) -> Placement:
    """Return where a module of these parameters is; ValueError where torch's DDP raises one."""
    devices = {x.device for x in params}
    told = ", ".join(sorted(map(str, devices)))
    kinds = {device.type for device in devices}
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids must be None or have one device, got {device_ids}")
    if len(kinds) != 1 or not kinds <= _KINDS:
        raise ValueError(f"a module must be on the CPU or on GPUs, all of it: it is on {told}")
    if device_ids and len(devices) == 1 and kinds == {"cuda"}:
        first = ordinal(device_ids[0])
        return Placement([first], first if output_device is None else ordinal(output_device))
    if device_ids or output_device:
        raise ValueError(
            "device_ids and output_device are for a module on one GPU, of one process: got "
            f"{device_ids} and {output_device} for a module on {told}"
        )
    return Placement()


def moved(value: Any, device: torch.device) -> Any:
    """Return a value with the tensors in it on a device: in tuples, lists and dicts, nested.

    What else may contain tensors is left as it is; as torch does it.
    """
    if isinstance(value, (torch.Tensor, PackedSequence)):
        return value.to(device)
    if not isinstance(value, (list, tuple, dict)) or not value:
        return value
    if isinstance(value, dict):
        return type(value)((key, moved(one, device)) for key, one in value.items())
    each = [moved(one, device) for one in value]
    if hasattr(value, "_fields"):
        return type(value)(*each)
    return each if isinstance(value, list) else tuple(each)
