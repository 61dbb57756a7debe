"""The backend of torch 2.14: a Backend in Python, which torch registers in a group for devices."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nc10d.base.callable_values import CallableInt
from nc10d.base.torch_entry import NAME
from nc10d.errors import DistError
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import World
from nc10d.torch.backend.group_calls import TorchCalls
from nc10d.torch.backend.works import TorchWork

c10d: Any = torch._C._distributed_c10d

SUPPORTED = hasattr(c10d.Backend, "register_abort_hook")
"""Whether this torch takes a Backend that is written in Python."""

# torch's C++ code may keep the C++ part alone, whose methods are the base's.
_alive: set[PythonBackend] = set()


class _Messages(threading.local):
    started: list[TorchWork] | None = None


class PythonBackend(TorchCalls, c10d.Backend):
    """A backend of a torch group, whose calls run on a group of nc10d."""

    def __init__(self, group: ProcessGroup, world: World) -> None:
        c10d.Backend.__init__(self, group.rank(), group.size())
        self._open(group, world)
        self._abort_hooks: dict[int, Callable[[], None]] | None = None
        self.hooked = False  # whether a torch group above has pre or post hooks
        self._messages = _Messages()
        _alive.add(self)

    def shutdown(self) -> None:
        """Close the group; operations in flight fail."""
        super().shutdown()
        _alive.discard(self)

    def name(self) -> str:
        """Return "nc10d"."""
        return NAME

    getBackendName = _backend_name = name

    # torch's C++ code calls these three where hooks, modes or a tensor have to see a message.

    def send(self, tensors: Any, dst: int, tag: int = 0) -> TorchWork:
        """Start to send a tensor to a rank."""
        return self._noted(super().send(tensors, dst, tag))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> TorchWork:
        """Start to receive a tensor from a rank."""
        return self._noted(super().recv(tensors, src, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> TorchWork:
        """Start to receive a tensor from any rank."""
        return self._noted(super().recv_anysource(tensors, tag))

    def _noted(self, work: TorchWork) -> TorchWork:
        if self._messages.started is not None:
            self._messages.started.append(work)
        return work

    @contextlib.contextmanager
    def noting_messages(self) -> Iterator[list[TorchWork]]:
        """Collect the Works of the messages that torch's C++ code starts here on this thread."""
        outer, self._messages.started = self._messages.started, []
        try:
            yield self._messages.started
        finally:
            self._messages.started = outer

    # torch reads these as attributes, and its C++ code calls them.
    supports_coalescing = CallableInt(True)
    supports_splitting = CallableInt(False)
    supports_shrinking = supports_time_estimate = CallableInt(False)
    supports_reconfigure = supports_window = CallableInt(False)

    def registerAbortHook(self, number: int, hook: Callable[[], None]) -> None:
        """Have `hook` called when the group fails, before any call raises the error."""
        if self._abort_hooks is None:
            hooks = self._abort_hooks = {}

            def call_hooks(_: DistError) -> None:
                for each in [*hooks.values()]:
                    each()

            records = self.nc10d_group.backend("cpu").call_records
            assert records is not None, "the CPU's backend keeps records"
            records.observe_failure(call_hooks)
        self._abort_hooks[number] = hook

    def unregisterAbortHook(self, number: int) -> None:
        """Call a hook no more."""
        (self._abort_hooks or {}).pop(number, None)

    register_abort_hook, unregister_abort_hook = registerAbortHook, unregisterAbortHook

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return False: torch allocates tensors itself."""
        return False
