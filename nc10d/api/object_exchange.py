"""One object call: its messages out, its deadline, and what it makes of what comes in.

Whatever goes wrong with an object, here or at a peer, all ranks of a call take the same steps with
the backend; errors come after the last of them. So a group never falls out of step over an object.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from nc10d.base.deadline import Deadline
from nc10d.codec import EncodedMessage, Envelope, encode, encode_pickled
from nc10d.codec.messages import LARGEST, WORDS
from nc10d.codec.payload import Bytes, Locate
from nc10d.codec.type_registry import codec_of
from nc10d.errors import Aborted, CodecError
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import Group, NonMember, group_or_default

Location = Any
"""What `map_location` may be: None, a device, or a function of an array."""


class OutgoingObject:
    """This rank's object as a message; if it can't be one, a message that says so."""

    def __init__(self, value: Any, allow_pickle: bool) -> None:
        self.error: Exception | None = None
        try:
            self.message = _sized(_encoded(value, allow_pickle))
        except Exception as error:  # noqa: BLE001  (raised by `check`, when the others know)
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Send the reason instead of the object."""
        self.error = error
        self.message = EncodedMessage.failed(error)

    def check(self) -> None:
        """Raise what kept the object from being encoded."""
        if self.error is not None:
            raise self.error


def _encoded(value: Any, allow_pickle: bool) -> EncodedMessage:
    try:
        return encode(value)
    except CodecError:
        if not allow_pickle:
            raise
    return encode_pickled(value)


def _sized(message: EncodedMessage) -> EncodedMessage:
    """Return a message; CodecError if it is larger than any that is taken."""
    envelope = message.envelope()
    nbytes = envelope.header + envelope.payload
    if nbytes > LARGEST:
        raise CodecError(f"the object has {nbytes} bytes, and a message {LARGEST} at most")
    return message


class ObjectCall:
    """One object call on one group: its deadline, and what it makes of what comes."""

    def __init__(
        self,
        name: str,
        group: Group,
        allow_pickle: bool,
        location: Location = None,
        device: Any = None,
    ) -> None:
        self.found: ProcessGroup | NonMember = group_or_default(group)
        self._name = name
        self._allow_pickle = allow_pickle
        self._device = device
        self._locate = _locate(name, location)

    def begin(self) -> bool:
        """Say whether this rank takes part; ValueError where the call is not possible."""
        if isinstance(self.found, NonMember):
            message = f"{self._name}: this rank is not in the group, so the call does nothing"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            return False
        self.group = self.found
        self.rank = self.found.rank
        self.group.refuse_in_batch(self._name)
        if "cpu" not in self.group.config.devices:
            message = f"{self._name}: objects need a backend for cpu arrays, and {self.group!r}"
            raise ValueError(f"{message} has none: ask for one, as in 'cpu:cpu,cuda:nccl'")
        if self._device is not None and _kind(self._device) not in self.group.config.devices:
            message = f"{self._name}: device is {self._device!r}, for which {self.group!r}"
            raise ValueError(f"{message} has no backend")
        self._deadline = Deadline.after(self.group.timeout)
        return True

    def left(self) -> float:
        """Return the seconds that are left for the next step."""
        return self._deadline.remaining()

    def announce(self, out: OutgoingObject) -> list[Envelope]:
        """Tell everybody what this rank will send; return what each rank will."""
        table = np.empty((self.group.size, WORDS), np.int64)
        self.group.all_gather_into_tensor(table, out.message.words(), timeout=self.left())
        return self.envelopes(table)

    def envelopes(self, table: Any, sender: int | None = None) -> list[Envelope]:
        """Read one envelope a rank, from that rank or all from one sender."""
        return [
            self.envelope(words, rank if sender is None else sender)
            for rank, words in enumerate(table)
        ]

    def envelope(self, words: Any, sender: int) -> Envelope:
        """Read what a rank has announced."""
        try:
            return Envelope.read(words)
        except CodecError as error:
            raise self._blamed(error, sender) from error

    def flat(self, out: OutgoingObject) -> Bytes:
        """Return what travels of an object; without memory for it, the group is aborted."""
        return self._or_abort(out.message.envelope(), out.message.flat)

    def room(self, envelope: Envelope) -> Bytes:
        """Return memory for what comes; without it, the group is aborted."""
        return self._or_abort(envelope, lambda: np.empty(envelope.nbytes, np.uint8))

    def _or_abort(self, envelope: Envelope, make: Callable[[], Bytes]) -> Bytes:
        try:
            return make()
        except MemoryError as error:
            # The others are on their way into a step that this rank can't take.
            reason = f"{self._name}: no memory for {envelope.nbytes} bytes on rank {self.rank}"
            self.group.abort(Aborted(reason, rank=self.rank, op=self._name))
            raise MemoryError(reason) from error

    def opened(self, envelope: Envelope, flat: Bytes, sender: int) -> Any:
        """Return the object that a rank has sent."""
        try:
            return envelope.open(flat, allow_pickle=self._allow_pickle, locate=self._locate)
        except CodecError as error:
            raise self._blamed(error, sender) from error

    def opened_all(self, envelopes: Sequence[Envelope], flats: Sequence[Bytes]) -> list[Any]:
        """Return the objects of all ranks."""
        return [
            self.opened(envelope, flat, rank)
            for rank, (envelope, flat) in enumerate(zip(envelopes, flats, strict=True))
        ]

    def _blamed(self, error: CodecError, sender: int) -> CodecError:
        message = f"{self._name}: from rank {sender}: {error}"
        return CodecError(message, rank=sender, group=self.group.name, op=self._name)


def _kind(device: Any) -> str:
    """Return the kind of a device: "cuda" of "cuda:1", a torch.device or one of CuPy's."""
    if isinstance(device, int):
        return "cuda"
    named = device if isinstance(device, str) else getattr(device, "type", "cuda")
    return str(named).partition(":")[0]


def _is_device(location: Any) -> bool:
    """Say whether this is one of nc10d's, torch's (which can be called, too), Numba's or CuPy's."""
    if callable(location):
        return hasattr(location, "type") and hasattr(location, "index")
    return isinstance(location, (str, int)) or hasattr(location, "id")


def _locate(call: str, location: Any) -> Locate:
    """Return what brings an array to where `location` says; ValueError where that can't be."""
    if location is None:
        return None
    if not _is_device(location):
        if callable(location):
            return cast(Locate, location)
        message = f"{call}: map_location must be a device, a function of an array or None"
        raise ValueError(f"{message}, got {location!r}")
    if _kind(location) == "cpu":
        return None
    from nc10d import cuda

    if not (cuda.available() and 0 <= (number := cuda.ordinal(location)) < cuda.device_count()):
        raise ValueError(f"{call}: map_location is {location!r}, and there is no such device here")
    return partial(_moved, f"cuda:{number}")


def _moved(device: str, array: Any) -> Any:
    """Return an array on a device: NumPy's as nc10d.cuda's, others as their library has them."""
    from nc10d import cuda

    carrier = codec_of(type(array))
    if carrier is None or carrier.move is None:
        return cuda.to_device(array, device)
    return carrier.move(array, device)
