"""Which backend serves which kind of device: "cpu", "cpu:cpu,cuda:nccl", "gloo", or None."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nc10d.backend.protocol import Meeting
from nc10d.backend.registry import find_backend, load_meeting
from nc10d.errors import UnsupportedPlatform

DEFAULT = "nc10d"
UNNAMED = "gloo"
"""The name of the default configuration. Programs ask a group for its backend to choose between
"gloo", arrays in host memory, and "nccl", arrays on a GPU. Only the former work on every machine.
"""

TOGETHER: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        # c10d scripts that ask for gloo mean a backend for the CPU that also takes device arrays.
        "gloo": {"cpu": "cpu", "cuda": "staged"},
        "nc10d": {"cpu": "cpu", "cuda": "nccl"},  # as in torch.distributed
    }
)
"""Names that stand for a backend on each device."""

FAILURE_DETECTOR = "failure_detector"
"""The place of a failure detector in a group without a backend for CPU arrays."""


class BackendConfig:
    """A table from device type to backend name, parsed from the user's string."""

    __slots__ = ("asked", "devices", "places")

    def __init__(self, asked: str | None = None) -> None:
        """Read `asked`; ValueError if it is malformed or names an unknown backend."""
        self.asked = (asked or UNNAMED).lower()
        self.devices: Mapping[str, str] = MappingProxyType(_parse((asked or DEFAULT).lower()))
        entries = map(find_backend, self.devices.values())
        wanted = [entry.failure_detector for entry in entries if entry.failure_detector]
        needed = wanted and "cpu" not in self.devices
        failure_detector = {FAILURE_DETECTOR: wanted[0]} if needed else {}
        # With the failure detector that a backend asks for, unless a CPU backend is there.
        self.places: Mapping[str, str] = MappingProxyType(failure_detector | dict(self.devices))

    @property
    def first(self) -> str:
        """The device that serves operations without an array: the CPU if there is one."""
        return "cpu" if "cpu" in self.devices else next(iter(self.devices))

    @property
    def failure_detector(self) -> str:
        """The place of the failure detector, if the group has any."""
        return FAILURE_DETECTOR if FAILURE_DETECTOR in self.places else "cpu"

    def backend_for(self, device: str) -> str:
        """Return the backend's name for a device type; ValueError if there is none."""
        name = self.places.get(device)
        if name is None:
            known = " and ".join(self.devices)
            raise ValueError(f"no backend for {device} arrays: the group has backends for {known}")
        return name

    def get_device_backend_map(self) -> dict[str, str]:
        """Return the backend's name for each device."""
        return dict(self.devices)

    def require(self) -> None:
        """Raise UnsupportedPlatform unless the backend that every group needs can work here.

        That is the backend for CPU arrays, or the first in a configuration for devices alone. A
        further backend, for devices, may be missing, as in the default configuration.
        """
        reason = find_backend(self.backend_for(self.first)).why_unavailable()
        if reason is not None:
            message = f"the backend {self.asked!r} can't work on this machine: {reason}"
            raise UnsupportedPlatform(
                f'{message}; for arrays in host memory pass "gloo" or nothing'
            )

    def meeting(self) -> Meeting | None:
        """Return how ranks meet by default: by their only backend, None if it has no way."""
        names = set(self.devices.values())
        return load_meeting(find_backend(names.pop())) if len(names) == 1 else None

    def options(self, given: object) -> dict[str, Any]:
        """Return a caller's `pg_options` by backend name; TypeError if a backend refuses them.

        A single backend takes them as they are. For several backends they are a mapping from
        backend name to options.
        """
        names = set(self.devices.values())
        if given is None:
            return {}
        if len(names) == 1:
            given = dict.fromkeys(names, given)
        elif not isinstance(given, Mapping) or not names.issuperset(given):
            wanted = f"a dict from backend name ({', '.join(sorted(names))}) to options"
            raise TypeError(f"pg_options of {self} must be {wanted}, got {reprlib.repr(given)}")
        for name, options in given.items():
            find_backend(name).check_options(options)
        return dict(given)

    def __repr__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.devices.items())


def _parse(text: str) -> dict[str, str]:
    if ":" not in text:
        return dict(TOGETHER.get(text) or dict.fromkeys(find_backend(text).devices, text))
    devices: dict[str, str] = {}
    for pair in text.split(","):
        device, colon, name = (part.strip() for part in pair.partition(":"))
        if not (device and colon and name) or ":" in name:
            raise ValueError(f'backend {text!r}: expected "device:backend" pairs, got {pair!r}')
        if device in devices:
            raise ValueError(f"backend {text!r}: device {device!r} is given twice")
        whole = TOGETHER.get(name)
        devices[device] = whole.get(device, "cpu") if whole else find_backend(name).name
    return devices
