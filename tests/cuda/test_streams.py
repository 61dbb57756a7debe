"""The current stream is found from objects alone: no driver is needed."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nc10d import cuda
from nc10d.cuda import driver, streams


class Speaks:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 77


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (2, 2),
        (Speaks(), 77),
        (SimpleNamespace(cuda_stream=78), 78),  # torch
        (SimpleNamespace(ptr=79), 79),  # CuPy
        (SimpleNamespace(handle=ctypes.c_void_p(80)), 80),  # Numba
    ],
)
def test_streams_of_all_libraries_are_understood(stream: Any, handle: int) -> None:
    assert cuda.stream_handle(stream) == handle


def test_an_object_that_is_no_stream_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="CUDA stream"):
        cuda.stream_handle("0")


def interface(**more: Any) -> Any:
    """Return an object with `__cuda_array_interface__`, of a new type."""
    return type("Array", (), {"__cuda_array_interface__": more})()


def test_the_stream_of_an_array_is_the_named_or_the_default_stream() -> None:
    assert cuda.stream_of(interface(stream=123)) == 123
    assert cuda.stream_of(interface(stream=None)) == streams.LEGACY
    assert cuda.stream_of(interface()) == streams.LEGACY
    assert cuda.stream_of(None) == streams.LEGACY


@pytest.mark.parametrize("raw", [True, False])
def test_the_stream_of_a_tensor_is_torchs_current_stream(
    monkeypatch: pytest.MonkeyPatch, raw: bool
) -> None:
    """By torch's own function without an object, where that exists."""
    tensor = type("Tensor", (), {"__module__": "torch", "device": SimpleNamespace(index=3)})
    private = SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 100 + index)
    public = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=200))
    torch = SimpleNamespace(_C=private if raw else SimpleNamespace(), cuda=public)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert cuda.stream_of(tensor()) == (103 if raw else 200)


def test_a_block_sets_the_stream_and_restores_the_previous() -> None:
    x = interface(stream=123)
    with cuda.stream(5):
        with cuda.stream(Speaks()) as handle:
            assert handle == cuda.stream_of(x) == 77
        assert cuda.stream_of(x) == 5
    assert cuda.stream_of(x) == 123


@pytest.mark.parametrize(
    ("device", "number"),
    [
        (3, 3),
        ("cuda:1", 1),
        (SimpleNamespace(type="cuda", index=2), 2),  # torch
        (SimpleNamespace(id=4), 4),  # CuPy, Numba
    ],
)
def test_devices_of_all_libraries_have_a_number(device: Any, number: int) -> None:
    assert driver.ordinal(device) == number


@pytest.mark.parametrize("device", ["cpu", "cuda:x", SimpleNamespace(type="cpu", index=0)])
def test_other_devices_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match=r"(?i)cuda"):
        driver.ordinal(device)
