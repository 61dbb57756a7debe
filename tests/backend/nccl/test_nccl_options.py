"""NCCL's options come from the user, the environment and the device; libraries load when needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nc10d
from nc10d.arrays.dtypes import DType
from nc10d.backend.nccl.bindings.header_table import HEADER_VERSION
from nc10d.backend.nccl.comm.options import (
    NONBLOCKING,
    UNDEFINED,
    NCCLConfig,
    NcclOptions,
    as_struct,
    read_options,
)
from nc10d.backend.nccl.launch.datatypes import FP8
from nc10d.backend.nccl.launch.nccl_calls import CallContext, calls_of
from nc10d.cuda.memory import DeviceArray
from nc10d.ops import AllReduce, Broadcast

ROOT = Path(nc10d.__file__).parent


@pytest.mark.parametrize(
    ("queues", "links"),
    [(None, "direction"), ("", "direction"), ("1", "group"), ("7", "group"), ("8", "direction")],
)
def test_few_hardware_queues_decide_how_messages_go(
    monkeypatch: pytest.MonkeyPatch, queues: str | None, links: str
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    assert read_options(None).links == links
    assert read_options(NcclOptions(links="tag")).links == "tag"
    with pytest.raises(ValueError, match=r"links: expected one of .*, got 'pair'"):
        NcclOptions(links="pair")


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
    assert read_options(chosen).config is chosen.config, "who chooses is not asked"


# NCCL's own rules: parseCommConfig in init.cc of 2.18.1 to 2.30.7. Fields without a row take any.
SWITCHES = (
    *("blocking", "split_share", "collnet_enable", "shrink_share"),
    *("nvlink_centric_sched", "graph_stream_ordering"),
)
REFUSED = {
    **dict.fromkeys(SWITCHES, (-1, 2)),
    **dict.fromkeys(("cga_cluster_size", "num_rma_ctx"), (-1, 2**31)),
    **dict.fromkeys(("max_ctas", "nvls_ctas", "max_p2p_peers"), (0, 2**31)),
    "n_channels_per_net_peer": (0, 65),
    "cta_policy": (-1, 4),
    "graph_usage_mode": (-1, 3),
    "traffic_class": (UNDEFINED, 2**31),
}
NEWEST: Any = SimpleNamespace(version=HEADER_VERSION, require=lambda *_: None)


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_outside_nccls_ranges_is_refused_before_ranks_meet(name: str) -> None:
    below, above = REFUSED[name]
    for value in (below, above):
        with pytest.raises(ValueError, match=rf"NCCLConfig\.{name}: expected .*, got {value}"):
            NCCLConfig(**{name: value})
    for value in (below + 1, above - 1):
        as_struct(NCCLConfig(**{name: value}), NEWEST)


def test_options_of_other_types_are_refused() -> None:
    wrong: Any
    for wrong in ({"max_ctas": "4"}, {"comm_name": 4}):
        with pytest.raises(TypeError, match=r"NCCLConfig\.\w+: expected (int|str), got '?4'?"):
            NCCLConfig(**wrong)
    wrong = 5
    with pytest.raises(TypeError, match=r"NcclOptions\.config: expected an NCCLConfig, got 5"):
        NcclOptions(wrong)


@pytest.mark.parametrize(("least", "most"), [(1, None), (3, 2)])
def test_min_ctas_needs_max_ctas_which_is_no_smaller(least: int, most: int | None) -> None:
    with pytest.raises(ValueError, match=rf"min_ctas needs max_ctas.*, got {least} and {most}"):
        NCCLConfig(min_ctas=least, max_ctas=most)
    as_struct(NCCLConfig(min_ctas=least, max_ctas=least), NEWEST)


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
