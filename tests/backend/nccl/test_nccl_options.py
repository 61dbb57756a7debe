"""NCCL's options come from the user, the environment and the device; libraries load when needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nc10d
from nc10d.arrays.dtypes import DType
from nc10d.backend.nccl.comm.options import NONBLOCKING, NCCLConfig, NcclOptions, read_options
from nc10d.backend.nccl.launch.datatypes import FP8
from nc10d.backend.nccl.launch.nccl_calls import CallContext, calls_of
from nc10d.cuda.memory import DeviceArray
from nc10d.ops import AllReduce, Broadcast

ROOT = Path(nc10d.__file__).parent


@pytest.mark.parametrize(
    ("ours", "torchs", "blocking"),
    [
        (None, None, None),
        ("1", None, 0),
        ("0", None, 1),
        (None, "1", 0),
        (None, "0", 1),
        ("0", "1", 1),  # nc10d's variable takes precedence
        ("1", "0", 0),
        ("", "1", 0),  # an empty variable counts as unset
    ],
)
def test_the_environment_decides_whether_communicators_block(
    monkeypatch: pytest.MonkeyPatch, ours: str | None, torchs: str | None, blocking: int | None
) -> None:
    for name, value in zip(NONBLOCKING, (ours, torchs), strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert NONBLOCKING == ("NC10D_NCCL_NONBLOCKING", "TORCH_NCCL_USE_COMM_NONBLOCKING")
    assert read_options(None).config.blocking == blocking
    chosen = NcclOptions(NCCLConfig(blocking=1))
    assert read_options(chosen) is chosen, "who chooses is not asked"


@pytest.mark.parametrize("dtype", sorted(FP8, key=lambda x: x.label))
def test_eight_bit_floats_are_reduced_where_nccl_can_and_moved_everywhere(dtype: DType) -> None:
    x = DeviceArray(4096, (8,), dtype, 0, None)
    new, old = (
        CallContext(0, 2, lambda _: True, lambda *_: 0, 0, fp8=has) for has in (True, False)
    )
    assert calls_of(AllReduce(x), new)[0][0] == "ncclAllReduce"
    with pytest.raises(TypeError, match=r"NCCL >= 2\.24 and a device of compute capability 9\.0"):
        calls_of(AllReduce(x), old)
    assert calls_of(Broadcast(x, 0), old)[0][0] == "ncclBroadcast"


def test_cuda_is_loaded_by_the_driver_module_alone_and_late() -> None:
    code = "import nc10d.backend.nccl.backend, nc10d.backend.staged.backend, nc10d.cuda, sys;"
    code += "print([m for m in sys.modules if m.startswith('cuda.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[]", done.stderr
    assert [path.name for path in ROOT.rglob("*.py") if _imports_cuda(path)] == ["driver.py"]


def _imports_cuda(path: Path) -> bool:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    froms = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names = [x.name for node in nodes if isinstance(node, ast.Import) for x in node.names]
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
    late = [call.args[0] for call in calls if ast.unparse(call.func) == "import_to_end"]
    names += [str(x.value) for x in late if isinstance(x, ast.Constant)]
    return any(name.split(".")[0] == "cuda" for name in froms + names)


def test_without_a_wheel_the_systems_library_is_loaded() -> None:
    code = "import importlib.util as u; u.find_spec = lambda name: None\n"
    code += "from nc10d.backend.nccl.bindings.library import find_library; print(find_library())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "libnccl.so.2", done.stderr
