"""Buffers describe the memory of arrays of all libraries without a copy."""

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nc10d.arrays import buffer
from nc10d.arrays.buffer import Buffer, as_buffer, device_type, overlap, register
from nc10d.arrays.dtypes import DType

torch = pytest.importorskip("torch")
arrays = hnp.arrays(np.int32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


@given(arrays)
def test_an_array_is_its_address_count_and_dtype(x: np.ndarray[Any, Any]) -> None:
    found = as_buffer(x)
    assert found.address == x.__array_interface__["data"][0]
    assert (found.count, found.nbytes, found.shape) == (x.size, x.nbytes, x.shape)
    assert (found.dtype, found.device, found.owner is x) == (DType.INT32, "cpu", True)
    assert found.writable
    assert found.contiguous == x.flags.c_contiguous


@st.composite
def views(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Draw slices of an array, with steps of either sign."""
    base = np.arange(24, dtype=np.int16).reshape(4, 6)
    steps = draw(st.tuples(*[st.sampled_from([-2, -1, 1, 2, 3])] * 2))
    starts = draw(st.tuples(st.integers(0, 3), st.integers(0, 5)))
    return base[starts[0] :: steps[0], starts[1] :: steps[1]]


@given(views())
def test_the_span_holds_exactly_the_outermost_elements(x: np.ndarray[Any, Any]) -> None:
    low, high = as_buffer(x).span
    assert (low, high) == np.lib.array_utils.byte_bounds(x)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)])
def test_the_span_of_nothing_is_empty(shape: tuple[int, ...]) -> None:
    low, high = as_buffer(np.zeros(shape)).span
    assert low == high


@given(st.data())
def test_overlap_agrees_with_sets_of_elements(data: st.DataObject) -> None:
    base = np.arange(20)
    x, y = (base[data.draw(st.slices(20))] for _ in range(2))
    shared = bool(set(x.tolist()) & set(y.tolist()))
    assert overlap(as_buffer(x), as_buffer(y)) == shared


def test_arrays_of_nothing_overlap_nothing() -> None:
    x = np.zeros(4)
    assert not overlap(as_buffer(x), as_buffer(x[2:2]))


def test_columns_that_interleave_do_not_overlap() -> None:
    m = np.zeros((4, 3))
    assert not overlap(as_buffer(m[:, 0]), as_buffer(m[:, 1]))


def test_a_broadcast_view_repeats_its_elements() -> None:
    x = np.lib.stride_tricks.as_strided(np.zeros(3), (2, 3), (0, 8))
    assert as_buffer(x).repeats
    assert not as_buffer(np.zeros((2, 3))[:, ::2]).repeats


@given(views())
def test_slices_and_transposes_repeat_nothing(x: np.ndarray[Any, Any]) -> None:
    assert not as_buffer(x).repeats
    assert not as_buffer(x.T).repeats


@given(st.tuples(st.integers(1, 4), st.integers(1, 4)), st.integers(0, 9), st.integers(0, 9))
def test_arrays_that_repeat_an_address_are_always_detected(
    shape: tuple[int, int], a: int, b: int
) -> None:
    x = np.lib.stride_tricks.as_strided(np.arange(99), shape, (8 * a, 8 * b))
    collides = len(set(x.ravel().tolist())) < x.size
    assert as_buffer(x).repeats or not collides


def test_a_sliding_window_repeats_its_elements() -> None:
    x = np.lib.stride_tricks.sliding_window_view(np.zeros(5), 2, writeable=True)
    assert as_buffer(x).repeats


def test_a_read_only_array_is_not_writable() -> None:
    x = np.zeros(3)
    x.flags.writeable = False
    assert not as_buffer(x).writable


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.complex64])
def test_dtypes_of_ml_dtypes_are_recognised(dtype: type) -> None:
    assert as_buffer(np.zeros(2, dtype)).dtype.label == np.dtype(dtype).name


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (np.float32(1), "0-d array"),
        (3, "np.array"),
        ([1, 2], "np.array"),
        ((np.zeros(1),), "np.array"),
        ("text", "NumPy array"),
        (None, "NumPy array"),
        (np.ndarray, "the class ndarray"),
        (torch.Tensor, "the class Tensor"),
        (np.zeros(2, np.longdouble), "float64"),
        (np.array(["a"]), "uint8"),
        (np.zeros(2, ">i4"), "byte order"),
    ],
)
def test_an_object_that_is_no_array_is_refused_with_advice(wrong: object, advice: str) -> None:
    with pytest.raises(TypeError, match=advice):
        as_buffer(wrong)


@pytest.mark.parametrize("kind", [np.ndarray, torch.Tensor, np.float32, dict])
def test_a_class_of_arrays_goes_to_the_checks_of_the_cpu(kind: type) -> None:
    assert device_type(kind) == "cpu"


def test_masked_arrays_are_refused_and_other_subclasses_are_their_memory(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match="mask"):
        as_buffer(np.ma.masked_array([1, 2], [True, False]))
    file = np.memmap(tmp_path / "x", np.int8, "w+", shape=(5,))
    assert as_buffer(file).count == 5
    assert device_type(file) == "cpu"
    file._mmap.close()  # type: ignore[attr-defined]


class CudaArray:
    """A device array as other libraries describe it; never accessed, so any address will do."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (0x7000, False),
            "strides": strides,
            "version": 3,
        }


def test_cuda_array_interface_is_read_as_specified() -> None:
    found = as_buffer(CudaArray((2, 3)))
    assert (found.address, found.count, found.device) == (0x7000, 6, "cuda")
    assert (found.dtype, found.strides, found.contiguous) == (DType.FLOAT32, (12, 4), True)
    assert not as_buffer(CudaArray((2, 3), (4, 8))).contiguous
    assert as_buffer(CudaArray((1, 3), (400, 4))).contiguous
    assert device_type(CudaArray((1,))) == "cuda"


def test_a_cuda_array_never_overlaps_a_host_array() -> None:
    assert not overlap(as_buffer(CudaArray((2,))), as_buffer(np.zeros(2)))


def test_dlpack_gives_the_producers_own_memory() -> None:
    x = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    found = as_buffer(x)
    assert (found.address, found.count, found.dtype) == (x.data_ptr(), 6, DType.FLOAT64)
    assert not as_buffer(x.t()).contiguous
    assert device_type(x) == "cpu"


@pytest.mark.parametrize("shape", [(6,), (2, 3), (), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.float16])
def test_writing_through_as_numpy_reaches_the_users_array(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.zeros(shape, dtype=dtype)
    for array in (x, x.t() if len(shape) < 3 else x, x.numpy()):
        view = as_buffer(array).as_numpy()
        assert view.shape == tuple(array.shape)
        view[...] = 1
        assert bool((x == 1).all())
        view[...] = 0


def test_as_numpy_keeps_the_memory_alive_and_its_strides() -> None:
    view = as_buffer(torch.arange(12).reshape(3, 4)[:, ::2].t()).as_numpy()
    gc.collect()
    assert view.tolist() == [[0, 4, 8], [2, 6, 10]]
    x = np.zeros(3)
    assert as_buffer(x).as_numpy() is x


def test_as_numpy_works_for_types_that_numpy_lacks_and_for_adapters() -> None:
    x = torch.zeros((2, 4), dtype=torch.bfloat16)
    rows = (x.data_ptr(), 4, DType.BFLOAT16, "cpu", x, True, False, (2, 2), (8, 4))
    Buffer(*rows).as_numpy()[...] = 2
    assert x.tolist() == [[2, 0, 2, 0]] * 2


def test_as_numpy_is_for_the_cpu() -> None:
    with pytest.raises(TypeError, match="cuda"):
        as_buffer(CudaArray((2,))).as_numpy()


@pytest.mark.parametrize(
    ("x", "advice"),
    [
        (torch.zeros(2, dtype=torch.bfloat16), r"view\(torch.uint16\).numpy\(\).*bfloat16"),
        (torch.zeros(2, dtype=torch.float8_e5m2), r"view\(torch.uint8\).*float8_e5m2"),
        (torch.zeros(2, requires_grad=True), r"x.detach\(\)"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "plain array"),
        (torch.zeros(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (torch._efficientzerotensor(2), "plain array"),
    ],
)
def test_a_tensor_that_dlpack_refuses_is_a_type_error_with_advice(
    x: torch.Tensor, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests import nc10d.torch, which registers tensors.
    monkeypatch.delitem(buffer._resolvers, torch.Tensor, raising=False)
    monkeypatch.setattr(buffer, "_families", set())
    with pytest.raises(TypeError, match=advice):
        as_buffer(x)


def test_a_registered_type_is_resolved_by_its_own_function() -> None:
    class Mine:
        values = np.arange(3)

    register(Mine, lambda mine: as_buffer(mine.values), lambda _: "mine")
    assert as_buffer(Mine()).count == 3
    assert device_type(Mine()) == "mine"
    assert device_type([Mine(), 1]) == "mine"


def test_the_owner_stays_alive_with_the_buffer() -> None:
    def make() -> Buffer:
        return as_buffer(np.arange(1000.0))

    found = make()
    assert found.owner[999] == 999.0
