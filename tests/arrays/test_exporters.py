"""No operation runs on memory that is not its caller's, whatever an array's library describes.

The exporters of these tests give null pointers, copies, other shapes at each look, too short
buffers, device memory, or raise. An operation then uses exactly the memory that they have, or it is
a ValueError or TypeError that leaves all memory unchanged.
"""

import array
import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d as dist
from nc10d.api import functional
from nc10d.arrays.buffer import as_buffer, device_type
from nc10d.testing import Ranks, run_local

N, MARGIN = 6, 8


@dataclass(frozen=True)
class Look:
    """What an exporter says of its memory."""

    address: int
    shape: tuple[int, ...]
    step: int = 8
    read_only: bool = False
    device: int = 1
    offset: int = 0


class Exporter:
    """N doubles between margins, described as `script` says: an entry for each look."""

    def __init__(self, script: Sequence[str]) -> None:
        self.room = np.full(N + 2 * MARGIN, -7.0)
        self.home = self.room[MARGIN : MARGIN + N]
        self.home[:] = np.arange(N)
        self.kept: list[Any] = []
        self.script, self.looks = list(script), 0

    def look(self) -> Look:
        """Return the next description; the last entry of the script is repeated."""
        kind = self.script[min(self.looks, len(self.script) - 1)]
        self.looks += 1
        honest = Look(self.home.ctypes.data, (N,))
        if kind == "copy":
            self.kept.append(self.home.copy())
            return replace(honest, address=self.kept[-1].ctypes.data)
        if kind == "raises":
            raise RuntimeError("no export today")
        return {
            "honest": honest,
            "null": replace(honest, address=0),
            "null and offset": replace(honest, address=0, offset=4000),
            "short": replace(honest, shape=(N - 2,)),
            "long": replace(honest, shape=(2**61,)),
            "negative": replace(honest, shape=(-N,)),
            "backwards": replace(honest, address=honest.address + 8 * (N - 1), step=-8),
            "one place": replace(honest, step=0),
            "read-only": replace(honest, read_only=True),
            "device": replace(honest, device=2),
        }[kind]


class ByInterface(Exporter):
    """An exporter by NumPy's array interface."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        found = self.look()
        place = found.address + found.offset, found.read_only
        strides = tuple([found.step] * len(found.shape))
        return {
            "version": 3,
            "typestr": "<f8" if found.device == 1 else ">f8",  # it has no devices
            "shape": found.shape,
            "strides": strides,
            "data": place,
        }


class _Tensor(ctypes.Structure):
    """dlpack.h's DLManagedTensorVersioned, from its version on."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


_KEPT: list[Any] = []


class ByDlpack(Exporter):
    """An exporter by DLPack."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        found = self.look()
        shape, steps = (ctypes.c_int64 * 1)(*found.shape), (ctypes.c_int64 * 1)(found.step // 8)
        places = ctypes.addressof(shape), ctypes.addressof(steps), found.offset
        head = 1, 0, None, None, int(found.read_only)
        tensor = _Tensor(*head, found.address, found.device, 0, 1, 2, 64, 1, *places)
        _KEPT.append((tensor, shape, steps))
        return _new_capsule(ctypes.addressof(tensor), b"dltensor_versioned", None)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, timeout=20) as ranks:
        yield ranks


def call(group: Any, role: str, mode: str, x: Any, out: Any) -> None:
    """Read or write `x`, whose elements all ranks have alike; `out` takes the elements read."""
    peer, how = 1 - group.rank, {"async_op": mode == "async"}
    works = []
    if role == "all_reduce":
        works.append(group.all_reduce(x, **how))
    elif role == "gathered":
        works.append(group.all_gather([out[:N], out[N:]], x, **how))
    elif role == "gathers":
        outs = [x, out[N:]] if group.rank == 0 else [out[N:], x]
        works.append(group.all_gather(outs, out[:N], **how))
    elif role == "splits":
        works.append(group.reduce_scatter_tensor(out[: N // 2], x, **how))
    elif group.rank == 0:
        works.append(group.isend(x, peer))
    else:
        works.append(group.irecv(x) if role == "any source" else group.irecv(x, peer))
    for work in works:
        if work is not None:
            work.wait()


def described(x: Exporter, kind: str) -> np.ndarray[Any, Any]:
    """Return the memory that a script's entry describes, of those that an operation may use."""
    if kind == "one place":
        return np.broadcast_to(x.home[:1], N)
    return {"backwards": x.home[::-1], "short": x.home[:-2]}.get(kind, x.home)


def used_honestly(group: Any, kind: type[Exporter], script: Any, role: str, mode: str) -> str:
    x, out = kind(script), np.full(2 * N, 5.0)
    room, gathered = x.room.copy(), out.copy()
    seen = described(x, script[0])
    values, before = seen.copy(), seen.copy()
    try:
        if mode == "block":
            with group.coalescing_manager():
                call(group, role, mode, x, out)
        else:
            call(group, role, mode, x, out)
    except (TypeError, ValueError):
        assert np.array_equal(x.room, room)
        assert np.array_equal(out, gathered)
        return "refused"
    if role == "all_reduce":
        values *= 2
    elif role == "gathered":
        gathered[:] = [*values, *values]
    elif role == "gathers":
        values = gathered[:N]
    elif role == "splits":
        gathered[: N // 2] = 2 * values.reshape(2, -1)[group.rank]
    assert np.array_equal(seen, values)
    assert np.array_equal(out, gathered)
    if seen.flags.writeable:
        seen[:] = before
    assert np.array_equal(x.room, room), "nothing beside the elements has changed"
    assert x.looks == 2, "an operation sees the memory that it has checked"
    return "used"


KINDS = ["honest", "copy", "null", "null and offset", "short", "long", "negative", "backwards"]
KINDS += ["one place", "read-only", "device", "raises"]
MESSAGES = ["message", "any source"]
ROLES = ["all_reduce", "gathered", "gathers", "splits", *MESSAGES]


@settings(deadline=None, max_examples=150)
@given(
    kind=st.sampled_from([ByInterface, ByDlpack]),
    script=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)
    | st.tuples(*[st.sampled_from(["honest", "backwards", "read-only"])] * 2).map(
        lambda pair: [pair[0], pair[0], pair[1]]
    ),
    role=st.sampled_from(ROLES),
    mode=st.sampled_from(["sync", "async", "block"]),
)
def test_an_operation_uses_its_callers_memory_or_is_refused(
    two: Ranks, kind: Any, script: list[str], role: str, mode: str
) -> None:
    if role in MESSAGES:  # the receiver must not be refused after its message was sent
        mode = "async"
        script = ["honest" if kind in ("read-only", "one place") else kind for kind in script]
    ended = two.run(used_honestly, *[[each] * 2 for each in (kind, script, role, mode)])
    first = (script * 2)[:2] if len(script) == 1 else script[:2]
    if first[0] == first[1] and first[0] in ("honest", "backwards"):
        assert ended == ["used"] * 2
    if "copy" in first or "null" in first or "raises" in first:
        assert ended == ["refused"] * 2


class Column:
    """A column as pandas and polars have them: it converts to an array, by a copy at will."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.ones(3, dtype)


@pytest.mark.parametrize(
    ("x", "advice"),
    [
        (Column(), r"'s Column, which.*pass np.array\(x\), and copy a result back"),
        (ByInterface(["copy"]), r"gives a copy.*pass np.array\(x\)"),
        (ByDlpack(["null"]), "has no memory"),
        (ctypes.pointer(ctypes.c_int(1)), "plain array"),
        (ctypes.c_void_p(1), "plain array"),
        (array.array("u", "text"), "uint8"),
        (np.float64(1), "0-d array"),
    ],
)
def test_what_shows_no_memory_is_refused_with_advice(x: Any, advice: str) -> None:
    with pytest.raises(TypeError, match=advice):
        as_buffer(x)


def test_columns_of_data_frames_are_refused_with_advice() -> None:
    for library in ("pandas", "polars"):
        column = pytest.importorskip(library).Series([1.0, 2.0])
        with pytest.raises(TypeError, match=rf"{library}'s Series.*pass np.array\(x\)"):
            as_buffer(column)


class Buffered:
    """Values in bytes, by NumPy's array interface: the shape is not that of the bytes."""

    def __init__(self, nbytes: int) -> None:
        found = {"version": 3, "typestr": "<f8", "shape": (4,), "data": bytearray(nbytes)}
        self.__array_interface__ = found


def test_a_buffer_that_is_shorter_than_the_shape_is_refused() -> None:
    assert as_buffer(Buffered(32)).count == 4
    with pytest.raises(TypeError, match="too small"):
        as_buffer(Buffered(31))


MEMORIES = {
    "bytearray": lambda: bytearray(8),
    "memoryview": lambda: memoryview(bytearray(16)).cast("d"),
    "every second byte": lambda: memoryview(bytearray(16))[::2],
    "array": lambda: array.array("h", [0] * 8),
    "ctypes": lambda: (ctypes.c_float * 8)(),
    "ctypes of two dimensions": lambda: (ctypes.c_int * 2 * 4)(),
    "mmap": lambda: mmap.mmap(-1, 8),
}


def sums(group: Any, make: Any) -> None:
    x, out = make(), [make(), make()]
    view = np.asarray(memoryview(x))
    view[...] = np.arange(1, view.size + 1).reshape(view.shape)
    start = view.copy()
    for mode in ("sync", "again", "async"):
        work = group.all_reduce(x, async_op=mode == "async")
        assert work is None or work.result()[0] is x
    assert np.array_equal(view, 8 * start)
    work = group.all_gather(out, x, async_op=True)
    assert all(a is b for a, b in zip(work.result(), out, strict=True))
    assert all(np.array_equal(np.asarray(memoryview(each)), view) for each in out)
    if group.rank == 0:
        group.send(x, 1)
    else:
        view[...] = 0
        group.recv(x, 0)
    assert np.array_equal(view, 8 * start)
    assert np.array_equal(functional.all_reduce(x, "sum", group), 16 * start)


@pytest.mark.parametrize("name", MEMORIES)
def test_the_buffer_protocol_is_taken_without_a_copy(two: Ranks, name: str) -> None:
    assert device_type(MEMORIES[name]()) == "cpu"
    two.run(sums, [MEMORIES[name]] * 2)


def test_bytes_can_be_sent_and_not_received() -> None:
    def run(group: Any) -> bytes:
        if group.rank == 0:
            group.send(b"text", 1)
        x = bytearray(4)
        if group.rank == 1:
            with pytest.raises(ValueError, match=r"read-only: pass a copy, .*bytearray\(x\)"):
                dist.recv(b"text", 0)
            group.recv(x, 0)
        return bytes(x)

    assert run_local(run, 2)[1] == b"text"


def test_memory_of_an_operation_in_flight_cannot_move(two: Ranks) -> None:
    def run(group: Any) -> bytes:
        x = bytearray(b"abcd")
        if group.rank == 0:
            work = group.irecv(x, 1)
            with pytest.raises(BufferError):
                x.extend(b"more")
        group.barrier()
        if group.rank == 1:
            group.send(x, 0)
            return bytes(x)
        work.wait()
        del work
        x.extend(b"!")
        return bytes(x)

    assert two.run(run) == [b"abcd!", b"abcd"]
