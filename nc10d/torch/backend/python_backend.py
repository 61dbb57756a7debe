"""The backend for torch 2.14 and newer: a Backend in Python, which torch registers for devices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C import _distributed_c10d as c10d

from nc10d.base.callable_values import CallableInt
from nc10d.base.torch_registration import GLOO, NAME
from nc10d.errors import CollectiveTimeout, DistError, PeerLost
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import World
from nc10d.torch.backend.group_calls import TorchCalls

_ERRORS = {PeerLost: c10d.ErrorType.REMOTE_ERROR, CollectiveTimeout: c10d.ErrorType.TIMEOUT}

# torch's C++ code may keep the C++ part alone, whose methods are the base's.
_alive: dict[PythonBackend, None] = {}


def living() -> list[PythonBackend]:
    """Return the backends that have not been shut down, in the order in which they were made."""
    return [*_alive]


class PythonBackend(TorchCalls, c10d.Backend):
    """A torch group's backend, whose calls run on an nc10d group."""

    def __init__(self, group: ProcessGroup, world: World, name: str = NAME) -> None:
        c10d.Backend.__init__(self, group.rank(), group.size())
        self._open(group, world, name)
        self._abort_hooks: dict[int, Callable[[], None]] | None = None
        # Whether torch's methods on the group above make all calls: for hooks, or for backends on
        # other devices.
        self.seen_by_torch = False
        _alive[self] = None

    def shutdown(self) -> None:
        """Close the group; operations in flight fail."""
        super().shutdown()
        _alive.pop(self, None)

    def name(self) -> str:
        """Return "nc10d", or "gloo" in gloo's place."""
        return self.torch_name

    getBackendName = name

    def name_for_torch(self, group: c10d.ProcessGroup, name: str) -> None:
        """Have the torch group above name the kind of its backend: gloo, or custom."""
        kinds = c10d.ProcessGroup.BackendType
        kind = kinds.GLOO if name == GLOO else kinds.CUSTOM
        for device in group._device_types:
            if group._get_backend(device) is self:
                group._register_backend(device, kind, self)
        group._set_default_backend(kind)

    def hook(self) -> None:
        """Let every call pass through torch's methods, which call hooks."""
        self.seen_by_torch = True
        self._over = self._ended  # for a hook, no Work would mean that the operation has not ended

    def observe_failure(self, observer: Callable[[DistError], None]) -> None:
        """Have `observer` called when the group fails, before any call raises the error."""
        records = self.nc10d_group.backend("cpu").call_records
        assert records is not None, "the CPU's backend keeps records"
        records.observe_failure(observer)

    def registerAbortHook(self, number: int, hook: Callable[[], None]) -> None:
        """Have `hook` called when the group fails, before any call raises the error."""
        if self._abort_hooks is None:
            hooks = self._abort_hooks = {}

            def call_hooks(_: DistError) -> None:
                for each in [*hooks.values()]:
                    each()

            self.observe_failure(call_hooks)
        self._abort_hooks[number] = hook

    def unregisterAbortHook(self, number: int) -> None:
        """Call a hook no more."""
        (self._abort_hooks or {}).pop(number, None)

    register_abort_hook, unregister_abort_hook = registerAbortHook, unregisterAbortHook

    def get_error(self) -> c10d.ErrorType:
        """Return torch's kind of the error with which the group has failed, or SUCCESS."""
        error = self.nc10d_group._backends.known_failure()
        if error is None:
            return c10d.ErrorType.SUCCESS
        for kind, found in _ERRORS.items():
            if isinstance(error, kind):
                return found
        return c10d.ErrorType.COMM_ERROR

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: torch allocates tensors itself."""
        return False


# torch reads these as attributes, and its C++ code calls them. One that is not overridden calls
# itself without an end.
for _name in dir(c10d.Backend):
    if "supports_" in _name and _name not in vars(PythonBackend):
        setattr(PythonBackend, _name, CallableInt(_name == "supports_coalescing"))
