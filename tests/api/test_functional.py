"""Functional collectives: new arrays that wait on first use, and unchanged inputs."""

import copy
import gc
import operator
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d as dist
import nc10d.torch
from nc10d.api import functional as F
from nc10d.api.async_array import AsyncCollectiveArray
from nc10d.api.mesh import init_device_mesh
from nc10d.testing import Ranks, reference, run_local
from nc10d.work import Future, Work

SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
KINDS = ["plain", "strided", "tensor"]


def laid(x, kind):
    """Return a copy of `x` in a layout, or as a tensor."""
    if kind == "tensor":
        return torch.tensor(x)
    if kind == "strided":
        return np.repeat(x, 2, axis=-1)[..., ::2]
    return x.copy()


def apply(group, call, x, kind, args):
    given = laid(x, kind)
    result = getattr(F, call)(given, *args)
    assert isinstance(result, AsyncCollectiveArray)
    plain = F.wait_tensor(result)
    assert type(plain) is type(given)
    assert np.array_equal(given, x), "an input was written"
    return np.asarray(plain)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3) as three:
        yield three


def arrays_of(shape):
    count = int(np.prod(shape))
    return [np.arange(count).reshape(shape) + 100.0 * rank for rank in range(3)]


def ran(ranks, call, arrays, kind, *args):
    return ranks.run(apply, [call] * 3, arrays, [kind] * 3, [args] * 3)


@settings(deadline=None, max_examples=25)
@given(shape=SHAPES, kind=st.sampled_from(KINDS), name=st.sampled_from(["sum", "Max", "PRODUCT"]))
def test_all_reduce_returns_the_references_result(ranks, shape, kind, name):
    arrays = arrays_of(shape)
    expected = reference.all_reduce(arrays, getattr(dist, name.upper()))
    found = ran(ranks, "all_reduce", arrays, kind, name)
    assert all(map(np.array_equal, found, expected))


@settings(deadline=None, max_examples=25)
@given(data=st.data(), shape=SHAPES, kind=st.sampled_from(KINDS))
def test_gathering_joins_along_a_dimension_and_scattering_cuts_along_it(ranks, data, shape, kind):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    arrays = arrays_of(shape)
    whole = np.concatenate(arrays, axis=dim)
    assert all(np.array_equal(x, whole) for x in ran(ranks, "all_gather_tensor", arrays, kind, dim))
    wholes = [whole + rank for rank in range(3)]
    parts = np.split(sum(wholes), 3, axis=dim)
    found = ran(ranks, "reduce_scatter_tensor", wholes, kind, "sum", dim)
    assert all(map(np.array_equal, found, parts))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_whole_arrays_go_where_they_are_sent(ranks, kind):
    arrays = arrays_of((6, 2))
    exchanged = [np.concatenate([x[2 * r : 2 * r + 2] for x in arrays]) for r in range(3)]
    found = ran(ranks, "all_to_all_single", arrays, kind, None, None)
    assert all(map(np.array_equal, found, exchanged))
    found = ran(ranks, "permute_tensor", arrays, kind, [1, 2, 0])
    assert all(map(np.array_equal, found, [arrays[2], arrays[0], arrays[1]]))
    found = ran(ranks, "broadcast", arrays, kind, 1)
    assert all(np.array_equal(x, arrays[1]) for x in found)


@pytest.mark.ranks(2)
def test_splits_may_be_uneven(world):
    sent = np.arange(3) + 10 * world.rank
    splits = [[1, 2], [2, 1]][world.rank]
    expected = [[0, 10, 11], [1, 2, 12]][world.rank]
    assert F.all_to_all_single(sent, [[1, 2], [2, 1]][world.rank], splits).tolist() == expected


@pytest.mark.ranks(2)
def test_a_group_submits_several_calls_in_one_launch(world):
    xs = [np.full((2, 2), float(world.rank)), np.ones(2)]
    before = world.seq
    sums = F.all_reduce_coalesced(xs, "sum")
    gathered = F.all_gather_into_tensor_coalesced(xs)
    parts = F.reduce_scatter_tensor_coalesced([xs[0], xs[0]], "avg", [0, 1])
    assert world.seq - before == 3
    whole = [[0.0] * 2] * 2 + [[1.0] * 2] * 2
    means = [[[0.5, 0.5]], [[0.5], [0.5]]]
    assert [x.tolist() for x in (*sums, *gathered, *parts)] == [
        [[1.0] * 2] * 2,
        [2.0] * 2,
        whole,
        [1.0] * 4,
        *means,
    ]


def test_a_group_can_be_named_in_every_way():
    def run(group):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        row, column = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
        x = np.array([2.0**group.rank])
        own_row = row[group.rank // 2]
        groups = [None, group, [3, 2, 1, 0], own_row, row, column]
        groups += [(mesh, "b"), (mesh, 0), mesh["a"], tuple(own_row), mesh.get_group("b")]
        return [float(F.all_reduce(x, "sum", named)[0]) for named in groups]

    rows, columns = [3, 3, 12, 12], [5, 10, 5, 10]
    for rank, found in enumerate(run_local(run, 4)):
        r, c = rows[rank], columns[rank]
        assert found == [15, 15, 15, r, r, c, r, c, c, r, r]


def test_a_group_of_ranks_is_made_once_and_tags_distinguish_them():
    def run(group):
        first = F.find_group([0, 1])
        assert F.find_group([1, 0]) is first
        assert F.find_group([0, 1], "other") is F.find_group([0, 1], "other")
        assert F.find_group([0, 1], "other") is not first
        return F.find_group([0, 1, 2]) is group if group.rank < 3 else None

    def run_three(group):
        return run(group) if group.rank < 2 else F.find_group([[2]]).ranks

    assert run_local(run_three, 3)[2] == (2,)


MISTAKES = [
    (lambda x: F.all_reduce(x, "total"), "unknown reduction 'total'"),
    (lambda x: F.all_reduce(x, 3), "unknown reduction 3"),
    (lambda x: F.all_reduce(x, "sum", [0, 0]), "listed twice"),
    (lambda x: F.all_reduce(x, "sum", [[0, 1], [1]]), "groups must have one size"),
    (lambda x: F.all_reduce(x, "sum", [[0, 1], [1, 2]]), "listed twice"),
    (lambda x: F.all_reduce(x, "sum", [5]), "is in no group"),
    (lambda x: F.all_reduce(x, "sum", "world"), "group must be"),
    (lambda x: F.reduce_scatter_tensor(x, "sum", 0), "3 places.*divided by 2 ranks"),
    (lambda x: F.all_gather_tensor(x, 2), "no dimension 2"),
    (lambda x: F.permute_tensor(x, [0, 0]), "each of 2 ranks once"),
    (lambda x: F.all_to_all_single(x, [1, 2], None), "both split sizes or none"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("call", "words"), MISTAKES)
def test_mistakes_are_named_before_anything_is_sent(call, words):
    with pytest.raises(ValueError, match=words):
        call(np.zeros(3))
    assert F.all_reduce(np.ones(1), "sum").tolist() == [2.0]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("call", [F.all_reduce, F.broadcast, F.all_gather_tensor])
def test_a_list_is_refused_as_by_every_call(call):
    with pytest.raises(TypeError, match=r"got a list: pass np\.array"):
        call([1, 2], "sum" if call is F.all_reduce else 0)


def deferred(array):
    """Return a result, and the Future that ends it."""
    future = Future()
    return AsyncCollectiveArray(array, Work.from_future(future)), future


USES = {
    "operator": lambda a: a + 1,
    "reflected": lambda a: 1 - a,
    "array on the left": lambda a: np.ones(3) * a,
    "comparison": lambda a: a > 1,
    "function": lambda a: np.concatenate([a, [1]]),
    "ufunc with out": lambda a: np.add(a, 1, out=np.zeros(3)),
    "index": lambda a: a[1:],
    "method": lambda a: a.sum(),
    "len": len,
    "iter": lambda a: list(a),
    "repr": repr,
    "asarray": np.asarray,
    "astype by asarray": lambda a: np.asarray(a, np.int64),
    "dlpack": np.from_dlpack,
    "bool": lambda a: bool(a.all()),
    "in place": lambda a: operator.iadd(a, 1),
    "divmod": lambda a: divmod(a, 2)[0],
    "format": lambda a: f"{a}" == f"{np.arange(3.0)}",
    "pickle": lambda a: pickle.loads(pickle.dumps(a)),
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "interface": lambda a: a.__array_interface__["shape"],
    "another collective's": lambda a: dist.as_buffer(a).count,
}


@pytest.mark.parametrize("use", USES)
def test_a_result_waits_when_it_is_used_and_behaves_as_the_array(use):
    a, future = deferred(np.arange(3.0))
    assert not a.completed
    assert (a.shape, a.dtype, a.ndim, a.nbytes) == ((3,), np.float64, 1, 24)
    assert not a.completed
    future.set_exception(LookupError("used"))
    with pytest.raises(LookupError, match="used"):
        USES[use](a)
    b, future = deferred(np.arange(3.0))
    future.set_result(None)
    found, expected = USES[use](b), USES[use](np.arange(3.0))
    assert not isinstance(found, AsyncCollectiveArray)
    if use == "repr":
        assert found == f"AsyncCollectiveArray({expected})"
    else:
        assert np.array_equal(found, expected)


def test_torchs_functions_take_a_result_as_a_tensor():
    a, future = deferred(torch.arange(3.0))
    future.set_result(None)
    assert torch.stack([a, a]).tolist() == [[0, 1, 2]] * 2
    assert (torch.ones(3) + a).tolist() == [1, 2, 3]
    assert (a @ torch.ones(3)).item() == 3


def test_arrays_of_the_cpu_do_not_pass_for_a_gpus():
    a, future = deferred(np.zeros(1))
    assert not hasattr(a, "__cuda_array_interface__")
    future.set_result(None)


@pytest.mark.ranks(2)
def test_a_result_can_be_written_and_given_to_collectives(world):
    a = F.all_reduce(np.ones(2), "sum")
    b = F.all_reduce(F.all_reduce(a, "sum"), "sum")
    objects = [b if world.rank == 0 else None]
    dist.broadcast_object_list(objects)
    a[0] = 7
    dist.all_reduce(a)
    whole = a.tolist(), b.tolist(), operator.index(F.all_reduce(np.array(3), "max"))
    plain = world.rank == 0 or isinstance(objects[0], np.ndarray)
    assert (*whole, plain, objects[0].tolist()) == ([14, 4], [8, 8], 3, True, [8, 8])


def test_a_dropped_result_keeps_its_memory_and_the_next_call_warns_of_its_failure():
    a, future = deferred(np.zeros(1))
    memory = weakref.ref(a.unfinished)
    del a
    gc.collect()
    deferred(np.zeros(1))[1].set_result(None)
    assert memory() is not None
    future.set_exception(dist.DistError("lost"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deferred(np.zeros(1))[1].set_result(None)
    assert "dropped unused; it failed: lost" in str(caught[0].message)
    caught.clear()
    gc.collect()
    assert memory() is None


@pytest.mark.ranks(2, strict=False)
def test_a_dropped_result_does_not_wait_for_peers_that_wait_for_this_rank(world):
    x, told = np.ones(3), np.zeros(1)
    if world.rank == 0:
        F.all_reduce(x, "sum")
        gc.collect()
        world.send(told, 1)
    else:
        world.recv(told, 0)
        F.all_reduce(x, "sum").wait()
    assert F.all_reduce(x, "sum").tolist() == [2.0] * 3
