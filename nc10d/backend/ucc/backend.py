"""The UCC backend: hands validated collectives to a UccGroup, and messages to a CPU backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nc10d.arrays.access import arrays_of
from nc10d.arrays.buffer import device_type
from nc10d.arrays.validate import validate
from nc10d.backend.abilities import FailureDetector, cause_of
from nc10d.backend.polled.polled_backend import PolledBackend
from nc10d.backend.protocol import Backend, BackendSetup
from nc10d.backend.registry import find_backend, load_factory
from nc10d.backend.ucc.datatypes import check_devices
from nc10d.backend.ucc.library import library
from nc10d.backend.ucc.team import UccContext, UccTeam
from nc10d.backend.ucc.ucc_group import UccGroup, engine
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise
from nc10d.base.run_to_end import import_to_end
from nc10d.ops import MessageInfo, Op, Recv, Send
from nc10d.store.base import Store
from nc10d.store.prefix import PrefixStore
from nc10d.work import Work


@dataclass(frozen=True, slots=True)
class UccOptions:
    """`pg_options` of a group on UCC.

    With `any_order`, UCC's own algorithms may choose the order in which floats are summed. Results
    are then equal on all ranks only if UCC makes them so, and may differ from those of other
    backends in the last bits. For many ranks on a fast network such algorithms are faster.
    """

    any_order: bool = False


def make(setup: BackendSetup) -> UccBackend:
    """Make the backend for a job's first group; blocks until all ranks have arrived.

    UnsupportedPlatform if there is no libucc, or the CPU backend can't work here.
    """
    options, found = setup.options or UccOptions(), library()
    # A group has a backend for host arrays and another for device arrays, made in this order.
    store = PrefixStore("ucc", setup.store)
    store = PrefixStore(str(store.add(f"made/{setup.rank}", 1)), store)
    place = setup.group_name, setup.rank, setup.size
    # The CPU backend comes first, and reports a rank that does not come, or dies meanwhile.
    inner = load_factory(find_backend("cpu"))(
        BackendSetup(*place, PrefixStore("cpu", store), setup.deadline)
    )
    try:
        shared = PrefixStore("context", store)
        check = _checker(inner)
        context = UccContext(found, shared, setup.rank, setup.size, setup.deadline, check)
        return UccBackend(setup.group_name, context, inner, store, setup.deadline, options)
    except BaseException as error:
        _give_up(inner, error)
        raise


def _give_up(inner: Backend, error: BaseException) -> None:
    """Close the CPU backend of a group that UCC could not form; the other ranks get the error."""
    if inner.failure_detector is not None:
        inner.failure_detector.abort(error)
    inner.close()


def _checker(inner: Backend) -> Callable[[], None]:
    """Return a function that raises the CPU backend's error, if any."""

    def check() -> None:
        detector = inner.failure_detector
        found = None if detector is None else cause_of(detector)
        if found is not None:
            raise copy_to_raise(found)

    return check


class UccBackend(PolledBackend):
    """A group's operations by UCC; a method's docstring states if it blocks."""

    name = "ucc"
    device_type = "any"
    _engine = engine
    _group: UccGroup

    def __init__(
        self,
        group_name: str,
        context: UccContext,
        inner: Backend,
        store: Store,
        deadline: Deadline,
        options: UccOptions,
    ) -> None:
        """Make a group's team; blocks until all ranks do. The group owns `inner` from now on."""
        self.rank, self.size = inner.rank, inner.size
        self._inner = inner
        place = PrefixStore("team", store), self.rank, self.size
        team = UccTeam(context, *place, deadline, _checker(inner), engine.lock)
        self._group = UccGroup(group_name, team, inner, options.any_order)

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Run `ops`; see Backend. Operations that UCC can't run raise before anything is sent."""
        ops = [validate(op, self.rank, self.size) for op in ops]
        check_devices(ops)
        only_messages = all(isinstance(op, (Send, Recv)) for op in ops)
        if only_messages and not self._group.holds_messages_back():
            return self._inner.launch(ops, timeout, async_op)
        _await_streams(ops)
        return self._run(ops, timeout, async_op)

    def probe(self, peer: int | None, tag: int | None, deadline: Deadline) -> MessageInfo | None:
        """Return the next message; see Backend."""
        return self._inner.probe(peer, tag, deadline)

    @property
    def failure_detector(self) -> FailureDetector | None:
        """The CPU backend, which detects dead ranks."""
        return self._inner.failure_detector

    def split(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline, options: Any = None
    ) -> UccBackend:
        """Make the backend for a subgroup of `ranks`; blocks until all have arrived."""
        self._group.check()
        store = PrefixStore("ucc", store)
        inner = self._inner.split(ranks, name, PrefixStore("cpu", store), deadline)
        try:
            context = self._group.team.context
            return UccBackend(name, context, inner, store, deadline, options or UccOptions())
        except BaseException as error:
            _give_up(inner, error)
            raise


def _await_streams(ops: Sequence[Op]) -> None:
    """Block until the work on device arrays' streams is done: UCC knows no streams."""
    devices = [x for op in ops for x in arrays_of(op) if device_type(x) != "cpu"]
    if devices:
        # Imported late: most jobs have no device.
        memory, streams = import_to_end("nc10d.cuda.memory"), import_to_end("nc10d.cuda.streams")
        driver = import_to_end("nc10d.cuda.driver")
        for device, stream in {(memory.device_of(x), streams.stream_of(x)) for x in devices}:
            with driver.on_device(device):
                driver.call("cuStreamSynchronize", stream)
