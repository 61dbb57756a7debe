"""The real libnccl on a machine without a GPU: its answers and its errors.

All tests run on any machine that has the library, except that tests of an absent driver are
skipped where a driver exists.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
from nccl_here import LIBRARY, needs_nccl

from nc10d import cuda
from nc10d.backend.nccl.bindings.header_table import CONSTANTS, FUNCTIONS, HEADER_VERSION
from nc10d.backend.nccl.bindings.library import RESULT, Library, UniqueId, find_library, library
from nc10d.errors import NCCLError, UnsupportedPlatform

pytestmark = needs_nccl


@pytest.fixture(scope="module")
def nccl() -> Library:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return library()


def test_the_wheels_library_is_found_and_has_a_version(nccl: Library) -> None:
    assert nccl.path == find_library()
    assert nccl.path == str(LIBRARY[0] / "libnccl.so.2")
    assert nccl.version >= (2, 18, 0)
    assert nccl.version[0] == HEADER_VERSION[0]


def test_every_function_of_this_release_is_exported(nccl: Library) -> None:
    for name in FUNCTIONS:
        if nccl.has(name):
            assert nccl.address(name) > 0


def test_the_error_for_a_function_of_a_later_release_names_the_release(nccl: Library) -> None:
    older = Library(nccl.path)
    older.version = (2, 26, 2)
    assert not older.has("ncclAlltoAll")
    with pytest.raises(
        UnsupportedPlatform, match=r"ncclAlltoAll needs NCCL >= 2\.28\.3, .* 2\.26\.2"
    ):
        older.function("ncclAlltoAll")


def test_results_have_texts(nccl: Library) -> None:
    texts = [nccl.function("ncclGetErrorString")(code).decode() for code in range(8)]
    assert len(set(texts)) == 8
    assert texts[0] == "no error"


def test_unique_ids_differ(nccl: Library) -> None:
    ids = {nccl.unique_id() for _ in range(3)}
    assert len(ids) == 3
    assert {len(unique_id) for unique_id in ids} == {CONSTANTS["NCCL_UNIQUE_ID_BYTES"]}


def test_no_communicator_is_an_invalid_argument(nccl: Library) -> None:
    answer = ctypes.c_int()
    with pytest.raises(NCCLError, match="NULL") as caught:
        nccl.call("ncclCommGetAsyncError", None, ctypes.byref(answer))
    assert caught.value.code == RESULT["ncclInvalidArgument"]


def test_a_collective_without_a_communicator_is_refused(nccl: Library) -> None:
    with pytest.raises(NCCLError) as caught:
        nccl.call("ncclAllReduce", None, None, 1, 7, 0, None, None)
    assert caught.value.code == RESULT["ncclInvalidArgument"]


@pytest.mark.parametrize("name", ["ncclCommDestroy", "ncclCommAbort"])
def test_ending_no_communicator_is_nothing(nccl: Library, name: str) -> None:
    assert nccl.call(name, None) == RESULT["ncclSuccess"]


def test_an_end_too_many_is_an_invalid_usage(nccl: Library) -> None:
    nccl.call("ncclGroupStart")
    nccl.call("ncclGroupEnd")
    with pytest.raises(NCCLError, match="ncclGroupEnd") as caught:
        nccl.call("ncclGroupEnd")
    assert caught.value.code == RESULT["ncclInvalidUsage"]


def test_without_a_driver_communicators_and_memory_are_refused(nccl: Library) -> None:
    if cuda.available():
        pytest.skip("this machine has a GPU")
    made = ctypes.c_void_p()
    unique = UniqueId.from_buffer_copy(nccl.unique_id())
    with pytest.raises(NCCLError, match="CUDA") as caught:
        nccl.call("ncclCommInitRankConfig", ctypes.byref(made), 1, unique, 0, None)
    assert caught.value.code == RESULT["ncclUnhandledCudaError"]
    with pytest.raises(NCCLError):
        nccl.call("ncclMemAlloc", ctypes.byref(made), 1024)


def test_without_a_driver_the_driver_module_raises() -> None:
    if cuda.available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UnsupportedPlatform, match=r"(?i)driver|cuda"):
        cuda.device_count()


def test_a_library_named_by_the_environment_is_taken_and_a_wrong_one_is_named() -> None:
    code = "from nc10d.backend.nccl.bindings.library import library; library()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NC10D_NCCL_LIBRARY": "/nowhere/libnccl.so.2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "UnsupportedPlatform" in done.stderr
    assert "/nowhere/libnccl.so.2" in done.stderr
