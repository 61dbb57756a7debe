"""How a call exchanges Python objects: messages out, messages in, and the deadline.

If an object can't be encoded or decoded, on this rank or on a peer, the call's ranks all still run
the same collectives. Errors are raised after the last of these, so the group stays in step.

Not done: kept memory for long arrays. A received array is new memory, which the kernel clears
first (half the time for 64 MiB); memory that begins at a huge page saves a twentieth.
Not done: a first piece of 256 bytes instead of 1,024, which saves 0.3 µs there and back, and
needs a second prepared call. The rest of a small object's time is Python's part in the call, some
0.6 µs on each side; sending with the GIL held made no difference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from nc10d.base.deadline import monotonic
from nc10d.base.run_to_end import import_to_end
from nc10d.codec import EncodedMessage, Envelope, MessageKind, encode_pickled
from nc10d.codec.decoder import Bytes, Locate
from nc10d.codec.encoder import walk
from nc10d.codec.messages import LARGEST, cut, pieces_used
from nc10d.codec.openings import ALL_ROWS, Openings, give_back
from nc10d.codec.type_registry import codec_of
from nc10d.errors import Aborted, CodecError
from nc10d.group.process_group import ProcessGroup

Location = Any
"""The type of `map_location`: None, a device, or a function on arrays."""


class OutgoingObject:
    """This rank's object as a message, or the error if the object can't be encoded."""

    def __init__(self, message: EncodedMessage, error: Exception | None) -> None:
        message.divide()
        self.message, self.error = message, error
        self.opening = message.opening()
        """The bytes that travel first."""

    @classmethod
    def failed(cls, error: Exception) -> OutgoingObject:
        """Return a message with the error."""
        return cls(EncodedMessage.failed(error), error)


def encode_outgoing(value: object, allow_pickle: bool, openings: Openings) -> OutgoingObject | None:
    """Return this rank's object as a message; None if a small plain object lies in `openings.own`.

    If the object can't be encoded, or is longer than LARGEST bytes, the message reports the error.
    """
    try:
        if openings.put(value):
            return None
        return OutgoingObject(_encoded(value, openings.stream(), allow_pickle), None)
    except Exception as error:  # noqa: BLE001  (`raise_if_failed` raises it after the exchange)
        return OutgoingObject.failed(error)


def opening_of(out: OutgoingObject | None, openings: Openings) -> Bytes:
    """Return the opening with this rank's object."""
    return openings.own if out is None else out.opening


def pieces_to_send(out: OutgoingObject | None, openings: Openings) -> Sequence[Bytes]:
    """Return the pieces of this rank's opening that are still to be sent as a message."""
    return openings.pieces() if out is None else cut(out.opening)[: pieces_used(out.opening)]


def raise_if_failed(out: OutgoingObject | None) -> None:
    """Raise the error if this rank's object could not be encoded."""
    error = None if out is None else out.error
    if out is not None and error is not None:
        out.error = None  # the traceback keeps the caller's frame, and the frame keeps `out`
        try:
            raise error
        finally:
            del error


def _encoded(value: object, stream: Bytes | None, allow_pickle: bool) -> EncodedMessage:
    """Return an object as a message; `stream` is a plain object's pickle, else None."""
    if stream is not None:
        return EncodedMessage(MessageKind.PLAIN, stream.tobytes())
    try:
        message = walk(value)
    except CodecError:
        if not allow_pickle:
            raise
        message = encode_pickled(value)
    nbytes = len(message.header) + message.payload
    if nbytes > LARGEST:
        raise CodecError(f"the object has {nbytes} bytes, and a message {LARGEST} at most")
    return message


def _set_allow_pickle(group: ProcessGroup) -> bool:
    """Set the group's `allow_pickle` by the environment; return the new value.

    ValueError if NC10D_ALLOW_PICKLE is neither 0 nor 1.
    """
    setting = os.environ.get("NC10D_ALLOW_PICKLE", "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"NC10D_ALLOW_PICKLE must be 0 or 1, got {setting!r}")
    group.allow_pickle = setting == "1"
    return group.allow_pickle


@dataclass(slots=True)
class IncomingObject:
    """A message to receive: the opening, and memory for the parts that follow the opening."""

    envelope: Envelope
    opening: Bytes
    sender: int
    parts: Sequence[Bytes] = ()
    """The flat array, then the long chunks; empty if the opening holds the whole message."""


EMPTY: Bytes = np.empty(0, np.uint8)


def rounds(found: Sequence[IncomingObject]) -> range:
    """Return the numbers of the parts that follow the openings, which all ranks have seen."""
    return range(max(incoming.envelope.parts for incoming in found))


def part(parts: Sequence[Bytes], number: int) -> Bytes:
    """Return a message's part; EMPTY if the message has fewer parts."""
    return parts[number] if number < len(parts) else EMPTY


class ObjectCall:
    """An object call on a group: its openings, its deadline, and checks on received messages."""

    __slots__ = ("_locate", "_name", "_until", "allow_pickle", "group", "openings")

    def __init__(
        self,
        name: str,
        group: ProcessGroup,
        openings: Openings,
        allow_pickle: bool | None,
        weights_only: bool,
        location: Location = None,
        device: object = None,
    ) -> None:
        """Take over the openings; the timeout began with them.

        ValueError inside a coalescing block, or if the group lacks the backend.
        """
        self._name, self.group, self.openings = name, group, openings
        self._locate = None if location is None else _locate(name, location)
        if weights_only:
            allow_pickle = False
        allowed = group.allow_pickle if allow_pickle is None else bool(allow_pickle)
        self.allow_pickle = _set_allow_pickle(group) if allowed is None else allowed
        group.refuse_in_batch(name)
        devices = group.config.devices
        if "cpu" not in devices:
            message = f"{name}: objects need a backend for cpu arrays, and {group!r}"
            raise ValueError(f"{message} has none: ask for one, as in 'cpu:cpu,cuda:nccl'")
        if device is not None and _kind(device) not in devices:
            message = f"{name}: device is {device!r}, for which {group!r}"
            raise ValueError(f"{message} has no backend")
        self._until = openings.since + group.timeout

    def remaining(self) -> float:
        """Return how many seconds the call has left."""
        return max(0.0, self._until - monotonic())

    def objects(self, rows: slice = ALL_ROWS) -> list[Any] | None:
        """Return the objects in some rows of the table, if all messages are small and plain.

        Otherwise, and if arrays are to be moved, return None.
        """
        return self.openings.objects(rows) if self._locate is None else None

    def incoming_all(self, table: Bytes, sender: int | None = None) -> list[IncomingObject]:
        """Read the openings in a table: row r comes from rank r, or every row from `sender`."""
        senders = range(len(table)) if sender is None else [sender] * len(table)
        return list(map(self.incoming, table, senders))

    def incoming(self, opening: Bytes, sender: int) -> IncomingObject:
        """Read the opening that a rank has sent; a malformed one is a CodecError with the rank."""
        try:
            return IncomingObject(Envelope.read(opening), opening, sender)
        except CodecError as error:
            raise self._error_from(error, sender) from error

    def encoded(self, out: OutgoingObject | None) -> Sequence[Bytes]:
        """Return the parts that follow the opening; abort the group if there is no memory."""
        if out is None:
            return ()
        message = out.message
        if message.inline:
            return ()
        return self._or_abort(message.envelope(), lambda: [message.flat(), *message.long])

    def allocate(self, incoming: IncomingObject) -> Sequence[Bytes]:
        """Return memory for the parts that follow an opening; abort the group if there is none."""
        envelope = incoming.envelope
        if not envelope.inline:
            sizes = [envelope.nbytes, *(nbytes for _, nbytes in envelope.long)]
            incoming.parts = self._or_abort(
                envelope, lambda: [np.empty(nbytes, np.uint8) for nbytes in sizes]
            )
        return incoming.parts

    def _or_abort(self, envelope: Envelope, make: Callable[[], list[Bytes]]) -> list[Bytes]:
        try:
            return make()
        except MemoryError as error:
            # The other ranks are about to run a collective that this rank can't run.
            reason = f"{self._name}: no memory for {envelope.total} bytes on rank {self.group.rank}"
            self.group.abort(Aborted(reason, rank=self.group.rank, op=self._name))
            raise MemoryError(reason) from error

    def decode(self, incoming: IncomingObject) -> Any:
        """Return the object that a rank has sent; CodecError that names the rank."""
        envelope = incoming.envelope
        flat, *long = incoming.parts or [envelope.inner(incoming.opening)]
        try:
            return envelope.open(
                flat, allow_pickle=self.allow_pickle, locate=self._locate, long=long
            )
        except CodecError as error:
            raise self._error_from(error, incoming.sender) from error

    def _error_from(self, error: CodecError, sender: int) -> CodecError:
        return self.error_about(sender, f"from {self.name_of(sender)}: {error}")

    def name_of(self, rank: int) -> str:
        """Return a rank's name for error texts; with the group where its global rank differs."""
        group = self.group
        same = group.ranks[rank] == rank
        return f"rank {rank}" if same else f"rank {rank} of group {group.name!r}"

    def error_about(self, sender: int, text: str) -> CodecError:
        """Return a CodecError that names this call and blames the sender."""
        message = f"{self._name}: {text}"
        return CodecError(message, rank=sender, group=self.group.name, op=self._name)

    def receive(self, places: list[Any], sender: int, transfer: Callable[[Bytes], object]) -> None:
        """Receive the rest of the message whose opening is in the table, and fill `places`; blocks.

        `transfer` receives a part into the given memory. If the message is not a list of as many
        objects as there are places, CodecError is raised and the places are unchanged.
        """
        objects, openings = self.objects(), self.openings
        if objects is None:
            incoming = self.incoming(openings.table[0], sender)
            for each in self.allocate(incoming):
                transfer(each)
            received = self.decode(incoming)
        else:
            received = objects[0]
        give_back(openings)
        self._fill(places, received, sender)

    def _fill(self, places: list[Any], objects: object, sender: int) -> None:
        if type(objects) is not list or len(objects) != len(places):
            count = len(objects) if type(objects) is list else "no list of"
            text = f"has sent {count} objects, and the list here has {len(places)}"
            raise self.error_about(sender, f"{self.name_of(sender)} {text}")
        places[:] = objects


def _kind(device: object) -> str:
    """Return a device's kind: "cuda" for "cuda:1", a torch.device or a CuPy device."""
    if isinstance(device, int):
        return "cuda"
    named = device if isinstance(device, str) else getattr(device, "type", "cuda")
    return str(named).partition(":")[0]


def _locate(call: str, location: object) -> Locate:
    """Return the function that moves an array to `location`, None for the CPU.

    ValueError if the location is neither a function nor a device that this machine has.
    """
    if location is None:
        return None
    if callable(location):  # a torch.device is callable, too
        device = hasattr(location, "type") and hasattr(location, "index")
    else:  # nc10d's, Numba's or CuPy's
        device = isinstance(location, (str, int)) or hasattr(location, "id")
    if not device:
        if callable(location):
            return cast(Locate, location)
        message = f"{call}: map_location must be a device, a function of an array or None"
        raise ValueError(f"{message}, got {location!r}")
    if _kind(location) == "cpu":
        return None
    cuda = import_to_end("nc10d.cuda")
    if not (cuda.available() and 0 <= (number := cuda.ordinal(location)) < cuda.device_count()):
        raise ValueError(f"{call}: map_location is {location!r}, and there is no such device here")
    return partial(_moved, f"cuda:{number}")


def _moved(device: str, array: object) -> object:
    """Copy an array to a device: NumPy's become nc10d.cuda's, others stay in their library."""
    cuda = import_to_end("nc10d.cuda")
    carrier = codec_of(type(array))
    if carrier is None or carrier.move is None:
        return cuda.to_device(array, device)
    return carrier.move(array, device)


def for_each_rank(
    objects: object, openings: Openings, allow_pickle: bool
) -> list[OutgoingObject | None]:
    """Return a message for each rank, and write the openings to the table.

    Rows that hooks have written stay. If an object can't be encoded, every message has the error.
    TypeError or ValueError unless `objects` is a list with an object for each rank.
    """
    if objects is None:
        raise ValueError("scatter_object_input_list must be given on the source rank")
    if not isinstance(objects, (list, tuple)):
        kind = type(objects).__name__
        raise TypeError(f"scatter_object_input_list must be a list or tuple, got {kind}")
    check_length("scatter_object_input_list", objects, len(openings.table))
    written = openings.rows
    out: list[OutgoingObject | None] = [None] * written
    for value, opening in zip(objects[written:], openings.table[written:], strict=True):
        message = encode_outgoing(value, allow_pickle, openings)
        if message is not None and message.error is not None:
            failed = OutgoingObject.failed(message.error)
            message.error = None  # the traceback keeps this frame, and the frame keeps `message`
            openings.table[:] = failed.opening
            return [failed] * len(openings.table)
        opening[:] = opening_of(message, openings)
        out.append(message)
    return out


def all_inline(out: Sequence[OutgoingObject | None]) -> bool:
    """Return whether all messages fit into their openings."""
    return all(each is None or each.message.inline for each in out)


def marks(size: int) -> Bytes:
    """Return a table with an opening for each of `size` ranks, which announces the real table."""
    mark = EncodedMessage(MessageKind.TABLE_FOLLOWS, b"").opening()
    return np.tile(mark, (size, 1))


def scatter_table(
    call: ObjectCall, out: Sequence[OutgoingObject | None], root: int
) -> IncomingObject:
    """Broadcast the openings' table, then scatter the parts; return this rank's message.

    `out` has the messages on the root, and is empty on the other ranks. Blocks.
    """
    group, table = call.group, call.openings.table
    group.broadcast(table, root, timeout=call.remaining())
    arrived = call.incoming_all(table, root)
    incoming = arrived[group.rank]
    sent, received = list(map(call.encoded, out)), call.allocate(incoming)
    for number in rounds(arrived):
        parts = [part(each, number) for each in sent] or None
        group.scatter(part(received, number), parts, root, timeout=call.remaining())
    return incoming


def check_gather_list(places: list[Any] | None, wanted: bool, size: int) -> None:
    """Check the list to fill; TypeError or ValueError. Only the destination may give a list."""
    if not wanted:
        if places:
            raise ValueError("object_gather_list must be None on ranks other than the destination")
        return
    if places is None:
        raise ValueError("object_gather_list must be given on the destination rank")
    if not isinstance(places, list):
        raise TypeError(f"object_gather_list must be a list, got {type(places).__name__}")
    check_length("object_gather_list", places, size)


def check_list(call: str, objects: object) -> None:
    """Raise TypeError that names the call unless `objects` is a list."""
    if not isinstance(objects, list):
        raise TypeError(f"{call}: object_list must be a list, got {type(objects).__name__}")


def check_length(name: str, objects: Sequence[object], size: int) -> None:
    """Raise ValueError that names the argument unless it has `size` objects."""
    if len(objects) != size:
        raise ValueError(f"{name} must have one place per rank, {size}, got {len(objects)}")
