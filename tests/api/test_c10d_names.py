"""c10d's names do as they say: backends, errors, timeouts, deprecated calls, distributed_c10d."""

import subprocess
import sys
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d import cuda, distributed_c10d
from nc10d.backend.config import BackendConfig
from nc10d.group.world import own_world
from nc10d.testing import run_local

NO_GPU = not cuda.available()


def alone(body: Any, **how: Any) -> Any:
    """Run `body()` in a world of this thread alone, which has a rank."""
    with own_world() as world:
        try:
            dist.init_process_group(rank=0, world_size=1, **how)
            return body()
        finally:
            world.clear()


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_names_of_backends_are_strings_in_lower_case() -> None:
    assert (dist.Backend.NCCL, dist.Backend.GLOO, dist.Backend.CPU) == ("nccl", "gloo", "cpu")
    assert dist.Backend("NCCL") == dist.Backend.NCCL
    assert type(dist.Backend("nccl")) is str
    assert {"gloo", "cpu", "nccl", "mpi"} <= set(dist.Backend.backend_list)
    assert dist.Backend.backend_capability["gloo"] == ["cpu", "cuda"]
    for name in ("PIGEON", "nccl"):
        with pytest.raises(AttributeError, match=name):
            getattr(dist.Backend, name)
    with pytest.raises(ValueError, match="str"):
        dist.Backend(3)  # type: ignore[arg-type]


def test_nc10d_names_the_default_backends_as_for_torch() -> None:
    assert BackendConfig("nc10d").devices == BackendConfig().devices
    assert BackendConfig("cpu:nc10d,cuda:nc10d").devices == BackendConfig().devices
    assert dist.Backend.NC10D == "nc10d"
    assert dist.Backend.backend_capability["nc10d"] == ["cpu", "cuda"]
    assert "nc10d" in dist.Backend.backend_list
    assert dist.is_backend_available("nc10d")


def test_a_registered_backend_has_a_name() -> None:
    from nc10d.backend.registry import unregister_backend

    dist.register_backend("named", lambda setup: None)  # type: ignore[arg-type, return-value]
    try:
        assert dist.Backend.NAMED == "named"
        assert dist.is_backend_available("named")
    finally:
        unregister_backend("named")
    assert not hasattr(dist.Backend, "NAMED")


def test_a_backend_is_available_where_init_can_make_it() -> None:
    assert dist.is_available()
    assert dist.is_gloo_available()
    assert dist.is_backend_available("cpu:gloo")
    assert not dist.is_xccl_available()
    assert not dist.is_backend_available("pigeon")
    if NO_GPU:
        assert not dist.is_nccl_available()
        assert not dist.is_backend_available("cpu:gloo,cuda:nccl")


@pytest.mark.skipif(not NO_GPU, reason="it needs a machine without a GPU")
@pytest.mark.parametrize("name", ["nccl", "cuda:nccl", "cuda:gloo", "staged"])
def test_a_backend_for_gpus_alone_is_refused_without_a_gpu(name: str) -> None:
    with pytest.raises(dist.UnsupportedPlatform, match=r"needs a GPU.*gloo"):
        alone(lambda: None, backend=name)

    def grow() -> None:
        with pytest.raises(dist.UnsupportedPlatform, match="needs a GPU"):
            dist.new_group(backend=name)
        assert isinstance(dist.new_group(), dist.ProcessGroup)  # nothing was counted

    alone(grow)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [(None, "gloo"), ("GLOO", "gloo"), ("cpu",) * 2, ("cpu:gloo,cuda:nccl",) * 2, ("nc10d",) * 2],
)
def test_get_backend_answers_as_programs_compare_it(asked: str | None, answer: str) -> None:
    found = alone(lambda: (dist.get_backend(), dist.get_backend(dist.new_group())), backend=asked)
    assert found == (answer, answer)


def test_the_default_backend_of_a_device_is_a_name_that_init_takes() -> None:
    assert dist.get_default_backend_for_device("cpu") == "gloo"
    assert dist.get_default_backend_for_device("cuda:1") == "nccl"
    assert BackendConfig("gloo").devices["cpu"] == "cpu"
    with pytest.raises(ValueError, match="tpu"):
        dist.get_default_backend_for_device("tpu")


@pytest.mark.parametrize("variables", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_world_of_one_needs_no_address(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with own_world() as world:
        dist.init_process_group(**({} if variables else {"rank": 0, "world_size": 1}))
        assert dist.get_world_size() == 1
        world.clear()


def test_two_ranks_need_an_address() -> None:
    with own_world(), pytest.raises(dist.RendezvousError, match="MASTER_ADDR"):
        dist.init_process_group(rank=0, world_size=2)


PARENTS = {
    "DistBackendError": "PeerLost CollectiveTimeout CollectiveMismatch Aborted NCCLError",
    "DistStoreError": "StoreTimeout DistNetworkError DistQueueEmptyError RendezvousError",
    "DistError": "DistBackendError DistStoreError DistNetworkError AuthError CodecError",
}


@pytest.mark.parametrize("parent", PARENTS)
def test_errors_are_found_by_c10ds_names(parent: str) -> None:
    for name in PARENTS[parent].split():
        assert issubclass(getattr(dist, name), getattr(dist, parent))
        assert issubclass(getattr(dist, name), RuntimeError)
    assert not issubclass(dist.DistBackendError, dist.DistStoreError)


@pytest.mark.parametrize("found_by", [dist.DistStoreError, dist.DistNetworkError, TimeoutError])
def test_a_server_that_is_not_there_is_found_by_each_name(found_by: type[Exception]) -> None:
    with pytest.raises(found_by):
        dist.TCPStore("127.0.0.1", 1, timeout=0.05)


def test_a_waits_timeout_is_a_store_error_and_no_network_error() -> None:
    with pytest.raises(dist.DistStoreError) as caught:
        dist.HashStore().wait(["missing"], timedelta(seconds=0.01))
    assert not isinstance(caught.value, dist.DistNetworkError)


def test_a_timeout_can_be_changed() -> None:
    def body(group: dist.ProcessGroup) -> float:
        dist.set_timeout(timedelta(seconds=0.05))
        if group.rank == 0:
            with pytest.raises(dist.CollectiveTimeout):
                dist.barrier()
        return group.timeout

    assert run_local(body, 2) == [0.05, 0.05]
    assert dist.default_pg_timeout == timedelta(minutes=30)


def test_groups_are_counted_and_have_their_backends() -> None:
    def body() -> tuple[int, int]:
        before = dist.get_pg_count()
        kept = dist.new_group()
        assert isinstance(kept, dist.ProcessGroup)
        assert dist.get_backend_impl() is dist.get_default_group().backend("cpu")
        assert dist.get_backend_impl(device="cpu").device_type == "cpu"
        return before, dist.get_pg_count()

    assert alone(body) == (1, 2)


def test_complex_numbers_support_what_has_a_meaning() -> None:
    names = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
    supported = [name for name in names if dist.supports_complex(getattr(dist.ReduceOp, name))]
    assert supported == ["SUM", "AVG", "PRODUCT"]


def old_calls(group: dist.ProcessGroup) -> list[str]:
    me, size = float(group.rank), group.size
    whole, part, x = np.zeros(2 * size), np.zeros(2), np.full(2, me)
    dist._all_gather_base(whole, x)
    assert whole.tolist() == [r for r in range(size) for _ in "ab"]
    dist._reduce_scatter_base(part, whole)
    assert part.tolist() == [me * size] * 2
    gathered = np.zeros((size, 2)) if me == 0 else None
    dist.gather_into_tensor(x, gathered)
    assert gathered is None or gathered[:, 1].tolist() == list(range(size))
    a, b = np.ones(3), np.ones(2, np.int32)
    dist.all_reduce_coalesced([a, b], dist.ReduceOp.SUM)
    work = dist.all_reduce_coalesced([a], async_op=True)
    assert work is not None
    work.wait()
    assert (a[0], b[0]) == (size * size, size)
    lists = [[np.zeros(2), np.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [x, np.full(3, -me)])
    assert [(p[0], q[0]) for p, q in lists] == [(r, -r) for r in range(size)]
    with pytest.raises(ValueError, match="output_tensor_lists"):
        dist.all_gather_coalesced(lists, [x])
    y, z = np.full(2, me), np.full(3, me)
    dist._broadcast_coalesced(group, [y, z], 1 << 20, size - 1)
    assert y[0] == z[0] == size - 1
    return [group.name()]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("size", [1, 3])
def test_deprecated_calls_do_as_their_successors(size: int) -> None:
    assert len(run_local(old_calls, size)) == size


OLD = {
    "_all_gather_base": lambda x: dist._all_gather_base(x, x.copy()),
    "_reduce_scatter_base": lambda x: dist._reduce_scatter_base(x, x.copy()),
    "gather_into_tensor": lambda x: dist.gather_into_tensor(x, x.copy()),
    "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x]),
    "all_gather_coalesced": lambda x: dist.all_gather_coalesced([[x]], [x.copy()]),
    "reduce_op": lambda x: dist.reduce_op.MAX,
    "_get_global_rank": lambda x: distributed_c10d._get_global_rank(None, 0),
    "_set_pg_timeout": lambda x: distributed_c10d._set_pg_timeout(timedelta(seconds=9)),
}


@pytest.mark.parametrize("name", OLD)
def test_deprecated_names_warn_of_the_line_that_uses_them(name: str) -> None:
    def use() -> None:
        with pytest.warns(FutureWarning, match=name) as seen:
            OLD[name](np.ones(2))
        assert [warning.filename for warning in seen] == [__file__]

    alone(use)


def test_private_names_of_distributed_c10d_answer() -> None:
    def body() -> None:
        group, c10d = dist.get_default_group(), distributed_c10d
        assert c10d._get_default_group() is c10d._world.default_pg is group
        assert not c10d._rank_not_in_group(None)
        assert not c10d._rank_not_in_group(group)
        assert c10d._rank_not_in_group(dist.GroupMember.NON_GROUP_MEMBER)
        assert c10d._get_group_size(None) == 1
        assert c10d._get_process_group_name(group) == group.name == c10d._world.pg_names[group]
        assert c10d._world.pg_map[group] == ("gloo", group.store)
        assert c10d._world.pg_group_ranks == {group: {0: 0}}
        c10d._get_default_store().set("k", "v")
        assert group.store.get("k") == b"v"
        assert c10d._get_process_group_store(group) is group.store
        assert c10d._resolve_process_group(group.group_name) is group
        with pytest.raises(RuntimeError, match="'pigeons'"):
            c10d._resolve_process_group("pigeons")
        assert c10d.all_reduce is dist.all_reduce
        assert dist._rank_not_in_group is c10d._rank_not_in_group
        assert c10d.group.WORLD is group

    alone(body)
    with pytest.raises(AttributeError, match="no_such"):
        distributed_c10d.no_such  # noqa: B018


def test_no_public_name_is_a_module_after_a_program_has_run() -> None:
    """The names are what they were, after init, calls and a new group have imported modules."""
    code = """
import types, numpy as np, nc10d
nc10d.init_process_group(rank=0, world_size=1)
nc10d.all_reduce(np.ones(2)); nc10d.new_group(); nc10d.all_gather_object([None], 1)
from nc10d.distributed_c10d import ReduceOp, _get_default_group
from nc10d.device_mesh import init_device_mesh
modules = [n for n in nc10d.__all__ if isinstance(getattr(nc10d, n), types.ModuleType)]
print(modules, callable(nc10d.rendezvous), nc10d.distributed_c10d.__name__)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout == "[] True nc10d.distributed_c10d\n", done.stderr
