"""nc10d's stores are torch's and torch's are nc10d's: adapters obey the laws of every store."""

import contextlib
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import store_laws as laws
import torch
import torch.distributed as dist

import nc10d
import nc10d.torch
from nc10d.base.error_wire import decode_error, encode_error
from nc10d.errors import DistError, NotANumberError, QueueEmptyError, StoreError, StoreTimeout
from nc10d.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from nc10d.torch.stores import StoreForTorch, TorchStore, as_own_store

QUICK = timedelta(milliseconds=100)
ROOT = Path(__file__).parents[2]


def torch_tcp_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


class CppBetween(TorchStore):
    """A store behind an adapter, torch's C++ PrefixStore, and an adapter back."""

    def __init__(self, below: Store) -> None:
        super().__init__(dist.PrefixStore("p", nc10d.torch.as_store(below)))
        self.below = PrefixStore("p", below)

    def list_keys(self) -> list[str]:  # torch's PrefixStore passes it to no store in Python
        return self.below.list_keys()


MAKERS: dict[str, Callable[[], Store]] = {
    "torch hash": lambda: TorchStore(dist.HashStore()),
    "both adapters": lambda: TorchStore(StoreForTorch(HashStore())),
    "C++ between": lambda: CppBetween(HashStore()),
    "torch tcp": lambda: TorchStore(torch_tcp_store()),
}


@pytest.fixture(params=MAKERS)
def fresh(request: pytest.FixtureRequest) -> laws.MakeStore:
    """Return a function that makes an empty store at each call."""
    served = TorchStore(torch_tcp_store()) if request.param == "torch tcp" else None

    @contextlib.contextmanager
    def make() -> Iterator[Store]:
        if served is None:
            yield MAKERS[request.param]()
            return
        for key in served.list_keys():
            served.delete_key(key)
        yield served

    return make


@pytest.fixture
def store(fresh: laws.MakeStore) -> Iterator[Store]:
    with fresh() as made:
        yield made


test_calls_return_what_a_dict_would_give = laws.calls_return_what_a_dict_would_give
test_additions_from_many_threads_all_count = laws.additions_from_many_threads_all_count
test_a_timeout_of_the_call_replaces_the_stores = laws.a_timeout_of_the_call_replaces_the_stores
test_the_callers_mistakes = laws.the_callers_mistakes_are_refused_at_the_call


@pytest.mark.parametrize("write", ["set", "add", "append", "multi_set", "compare_set"])
def test_every_kind_of_write_ends_a_wait(store: Store, write: str) -> None:
    laws.every_kind_of_write_wakes_waiters(store, write)


@pytest.mark.parametrize("blocked", ["get", "multi_get", "wait"])
def test_a_call_that_times_out_names_its_keys(store: Store, blocked: str) -> None:
    store.set_timeout(QUICK)
    assert store.timeout == QUICK
    with pytest.raises(StoreTimeout, match="absent"):
        getattr(store, blocked)("absent" if blocked == "get" else ["absent"])


def test_a_queue_in_torchs_store_is_a_queue() -> None:
    store = TorchStore(torch_tcp_store())
    with ThreadPoolExecutor(1) as pool:
        popped = pool.submit(store.queue_pop, "q")
        store.queue_push("q", b"\xff")
        assert popped.result(20) == b"\xff"
    assert store.queue_len("q") == 0
    with pytest.raises(QueueEmptyError):
        store.queue_pop("q", block=False)
    store.set_timeout(QUICK)
    with pytest.raises(StoreTimeout, match="q"):
        store.queue_pop("q")


def test_adding_to_text_in_torchs_store_is_an_error() -> None:
    for theirs, kind in ((dist.HashStore(), NotANumberError), (torch_tcp_store(), StoreError)):
        store = TorchStore(theirs)
        store.set("text", "abc")
        with pytest.raises(kind):
            store.add("text", 1)


@pytest.mark.parametrize("make", ["hash", "file", "tcp", "prefix"])
def test_every_store_of_nc10d_is_a_store_for_torch(make: str, tmp_path: Path) -> None:
    makers: dict[str, Callable[[], Store]] = {
        "hash": HashStore,
        "file": lambda: FileStore(tmp_path / "store", 1),
        "tcp": lambda: TCPStore("127.0.0.1", is_master=True),
        "prefix": lambda: PrefixStore("inner", HashStore()),
    }
    store = nc10d.torch.as_store(makers[make]())
    assert isinstance(store, dist.Store)
    store.set("bytes", b"\xff\x00")
    assert store.get("bytes") == b"\xff\x00"
    assert store.add("n", 2) == 2
    assert store.compare_set("new", "", "x") == b"x"
    store.multi_set(["a", "b"], ["1", b"\xfe"])
    assert store.multi_get(["a", "b"]) == [b"1", b"\xfe"]
    store.append("a", "2")
    assert store.get("a") == b"12"
    assert store.check(["a"])
    assert store.delete_key("a")
    assert sorted(store.list_keys()) == ["b", "bytes", "n", "new"]
    assert store.num_keys() >= 4
    store.queue_push("q", "v")
    assert store.queue_len("q") == 1
    assert store.queue_pop("q") == b"v"
    store.barrier("all", 1)
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", False)
    with pytest.raises(dist.DistStoreError, match="absent"):
        store.wait(["absent"], QUICK)
    store.clone().set("from a clone", "1")
    assert store.get("from a clone") == b"1"
    store.close()
    store.close()


def test_every_error_of_nc10d_is_torchs_of_the_same_name() -> None:
    kinds = [kind for kind in vars(nc10d.errors).values() if isinstance(kind, type)]
    own = [kind for kind in kinds if issubclass(kind, DistError) and kind is not DistError]
    for kind in own:
        error = kind("text", rank=3)
        assert isinstance(error, dist.DistError), kind
        for theirs in ("DistBackendError", "DistStoreError", "DistNetworkError", "QueueEmptyError"):
            same = isinstance(error, getattr(nc10d.errors, theirs))
            assert isinstance(error, getattr(dist, theirs)) == same, (kind, theirs)
        for copied in (pickle.loads(pickle.dumps(error)), decode_error(encode_error(error))):
            assert (type(copied), str(copied), copied.rank) == (kind, "text", 3)


def test_a_handler_of_torchs_errors_gets_those_of_a_store_of_nc10d() -> None:
    store = HashStore()
    store.set_timeout(QUICK)
    with pytest.raises(dist.DistStoreError, match="absent"):
        store.get("absent")
    with pytest.raises(dist.QueueEmptyError):
        store.queue_pop("q", block=False)
    with pytest.raises(dist.DistNetworkError):
        TCPStore("127.0.0.1", 1, timeout=QUICK)


def test_an_adapter_in_the_hands_of_cpp_alone_stays_an_adapter() -> None:
    below = HashStore()
    theirs = dist.PrefixStore("p", nc10d.torch.as_store(below))
    twin = theirs.clone()
    gc.collect()
    twin.set("k", b"\xff")
    assert theirs.get("k") == below.get("p/k") == b"\xff"
    assert theirs.has_extended_api()


def test_a_store_has_one_adapter_and_a_close_lets_go_of_it() -> None:
    below = HashStore()
    first = nc10d.torch.as_store(below)
    assert nc10d.torch.as_store(below) is first
    assert nc10d.torch.as_store(first) is first
    assert as_own_store(first) is below
    theirs = dist.HashStore()
    assert nc10d.torch.as_store(as_own_store(theirs)) is theirs
    first.clone()
    first.close()
    assert nc10d.torch.as_store(below) is not first
    nc10d.torch.as_store(below).close()
    with pytest.raises(TypeError, match="store of nc10d"):
        nc10d.torch.as_store(object())  # type: ignore[arg-type]


def test_a_timeout_set_on_either_side_holds_on_both() -> None:
    below = HashStore()
    above = nc10d.torch.as_store(below)
    theirs = dist.PrefixStore("p", above)
    theirs.set_timeout(QUICK)
    assert above.timeout == below.timeout == QUICK
    with pytest.raises(dist.DistStoreError, match="p/absent"):
        theirs.get("absent")
    below.set_timeout(None)
    assert above.timeout == timedelta.max
    theirs.set("k", "")
    assert theirs.get("k") == b""


def test_torchs_own_group_meets_in_a_store_of_nc10d() -> None:
    store = nc10d.torch.as_store(HashStore())

    def member(rank: int) -> float:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))
        x = torch.tensor([rank + 1.0])
        group.allreduce([x]).wait()
        return x.item()

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(member, range(2))] == [3.0, 3.0]
    store.close()


def test_torchs_store_serves_a_group_of_nc10d() -> None:
    store = torch_tcp_store()
    nc10d.init_process_group(store=store, rank=0, world_size=1)
    try:
        x = torch.ones(2)
        nc10d.all_reduce(x)
        assert nc10d.new_group([0]) is not None
    finally:
        nc10d.destroy_process_group()
    assert store.num_keys() > 0


def test_torchs_store_without_the_adapter_is_refused_by_name() -> None:
    script = "import torch.distributed as d, nc10d; nc10d.PrefixStore('p', d.HashStore())"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "import nc10d.torch" in ended.stderr.splitlines()[-1]


BOTH = """
import torch, torch.distributed as dist, nc10d, nc10d.torch
dist.init_process_group("gloo")
nc10d.init_process_group()
x, y = torch.ones(1), torch.ones(1)
dist.all_reduce(x)
nc10d.all_reduce(y)
theirs = dist.distributed_c10d._get_default_store()
nc10d.destroy_process_group()
nc10d.init_process_group(store=theirs, rank=dist.get_rank(), world_size=dist.get_world_size())
nc10d.all_reduce(y)
assert (x.item(), y.item()) == (2, 4)
nc10d.destroy_process_group()
dist.destroy_process_group()
print("met")
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "nc10d.run"])
def test_a_launchers_store_serves_torch_and_nc10d(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "both.py"
    script.write_text(BOTH)
    command = [sys.executable, "-m", launcher, "--nproc-per-node", "2", str(script)]
    if launcher == "torch.distributed.run":
        command[3:3] = ["--standalone"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("met") == 2
