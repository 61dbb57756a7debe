"""A mesh has a group along each dimension, of exactly the ranks of a line."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d as dist
from nc10d.api.mesh import DeviceMesh, init_device_mesh, lines
from nc10d.testing import run_local

SIDES = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@settings(deadline=None)
@given(data=st.data(), sides=SIDES)
def test_lines_have_every_rank_once_and_differ_along_their_dimensions_only(data, sides):
    ranks = np.arange(np.prod(sides)).reshape(sides)
    dims = data.draw(st.lists(st.sampled_from(range(len(sides))), unique=True, min_size=1))
    found = lines(ranks, dims)
    assert sorted(rank for line in found for rank in line) == list(range(ranks.size))
    for line in found:
        places = np.array([np.argwhere(ranks == rank)[0] for rank in line])
        assert len(line) == np.prod([sides[dim] for dim in dims])
        rest = [dim for dim in range(len(sides)) if dim not in dims]
        assert (places[:, rest] == places[0, rest]).all()


def along_each(group, shape):
    mesh = init_device_mesh("cpu", shape)
    return [
        (mesh.get_group(dim).ranks, mesh.get_local_rank(dim), mesh.size(dim))
        for dim in range(mesh.ndim)
    ], mesh.get_coordinate()


@settings(deadline=None, max_examples=10)
@given(shape=st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda s: np.prod(s) <= 8))
def test_each_rank_is_in_its_line_along_each_dimension(shape):
    ranks = np.arange(np.prod(shape)).reshape(shape)
    found = run_local(along_each, ranks.size, [shape] * ranks.size)
    for rank, (each, coordinate) in enumerate(found):
        assert coordinate == tuple(np.argwhere(ranks == rank)[0])
        for dim, (members, place, size) in enumerate(each):
            line = tuple(slice(None) if d == dim else at for d, at in enumerate(coordinate))
            assert list(members) == ranks[line].tolist()
            assert (place, size) == (coordinate[dim], shape[dim])


def named(group):
    return init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))


@pytest.mark.ranks(4)
def test_a_slice_has_the_groups_of_the_whole_and_my_index_in_the_rest(world):
    mesh = named(world)
    part = mesh["dp", "tp"]
    assert part.get_group("tp") is mesh.get_group("tp") is mesh["tp"].get_group()
    assert part.mesh.tolist() == [[0, 1], [2, 3]]
    assert part["dp"].mesh.tolist() == mesh["dp"].mesh.tolist() == [[0, 2], [1, 3]][world.rank % 2]
    assert mesh["tp"].get_local_rank() == world.rank % 2


def test_a_flattened_slice_has_a_group_of_all_its_ranks_and_is_found_by_its_name():
    def run(group):
        mesh = named(group)
        flat = mesh["dp", "cp"]._flatten("data")
        assert mesh["data"] is flat is mesh["dp", "cp"]._flatten("data")
        assert mesh["tp"]._flatten() == mesh["tp"]
        with pytest.raises(ValueError, match="has a dimension 'dp' already"):
            mesh["tp"]._flatten("dp")
        whole = mesh._flatten()
        assert whole.mesh_dim_names == ("dp_cp_tp",)
        assert whole.get_group() is group
        x = np.ones(1)
        dist.all_reduce(x, group=flat.get_group())
        return flat.get_group().ranks, flat.mesh.tolist(), x.tolist()

    assert run_local(run, 4) == [((r, r + 2), [r, r + 2], [2.0]) for r in (0, 1)] * 2


@pytest.mark.ranks(4)
def test_meshes_of_the_same_ranks_and_names_are_equal(world):
    mesh = named(world)
    assert mesh["dp"] == mesh["dp"]
    assert {mesh["dp"]: 1}[mesh["dp"]] == 1
    renamed = DeviceMesh.from_group(mesh.get_group("dp"), "cpu", mesh_dim_names=("tp",))
    assert [mesh["dp"] == other for other in (mesh["tp"], renamed, "dp")] == [False] * 3


@pytest.mark.ranks(4)
def test_copies_and_pickles_are_equal_and_have_the_same_groups(world):
    mesh = named(world)
    for part in (mesh, mesh["dp", "tp"], mesh["tp"]):
        for again in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
            assert again == part
            assert again.get_all_groups() == part.get_all_groups()
    pickled = pickle.dumps(mesh["tp"])
    dist.destroy_process_group(mesh.get_group("tp"))
    with pytest.raises(ValueError, match="needs groups that are not here"):
        pickle.loads(pickled)


def test_ranks_outside_of_a_mesh_have_no_coordinate_and_no_group():
    def run(group):
        mesh = DeviceMesh("cpu", [2, 0])
        if group.rank == 1:
            assert mesh.get_coordinate() is None
            for call in (mesh.get_group, mesh.get_local_rank):
                with pytest.raises(ValueError, match="rank 1 is not in"):
                    call()
            return None
        return mesh.get_group().ranks, mesh.get_local_rank(), mesh.get_rank()

    assert run_local(run, 3) == [((2, 0), 1, 0), None, ((2, 0), 0, 2)]


def test_a_mesh_can_be_made_of_existing_groups():
    def run(group):
        mesh = named(group)
        rows = DeviceMesh.from_group(mesh.get_group("tp"), "cpu", mesh_dim_names=("tp",))
        assert rows.get_group("tp") is mesh.get_group("tp")
        both = DeviceMesh.from_group(
            [mesh.get_group("dp"), mesh.get_group("tp")], "cpu", [[0, 1], [2, 3]]
        )
        with pytest.raises(ValueError, match="no line of the mesh along dimension 0"):
            DeviceMesh.from_group(
                [mesh.get_group("tp"), mesh.get_group("dp")], "cpu", [[0, 1], [2, 3]]
            )
        return [line.ranks for line in both.get_all_groups()]

    assert run_local(run, 4)[3] == [(1, 3), (2, 3)]


@pytest.mark.ranks(1)
def test_mistakes_are_named():
    with pytest.raises(ValueError, match="6 places, there are 1 ranks"):
        init_device_mesh("cpu", (2, 3))
    with pytest.raises(ValueError, match="rank may be in the mesh once"):
        DeviceMesh("cpu", [0, 0])
    with pytest.raises(ValueError, match="different names"):
        init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "a"))
    with pytest.raises(ValueError, match="at least one dimension"):
        DeviceMesh("cpu", 0)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="say which of 2"):
        mesh.get_group()
    with pytest.raises(KeyError, match="no dimension 'c'"):
        mesh["c"]
    with pytest.raises(KeyError, match="in the mesh's order"):
        mesh["b", "a"]
    with pytest.raises(IndexError, match="no dimension 2"):
        mesh.size(2)
    assert repr(mesh) == "<DeviceMesh 'cpu' (a=1, b=1): ranks [[0]]>"


@pytest.mark.ranks(4)
def test_a_dimension_can_be_several_with_a_group_for_each(world):
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    mesh = whole._unflatten(0, (2, 2), ("dp", "tp"))
    assert (mesh.shape, mesh.mesh_dim_names) == ((2, 2), ("dp", "tp"))
    with pytest.raises(ValueError, match="a dimension of 4 ranks"):
        whole._unflatten("world", (3, 2), ("dp", "tp"))
    with pytest.raises(ValueError, match="is a part of"):
        mesh["dp"]._unflatten("dp", (2, 1), ("a", "b"))
    assert mesh.get_group("dp").ranks == (world.rank % 2, world.rank % 2 + 2)
    assert mesh["tp"].get_group().ranks == (world.rank // 2 * 2, world.rank // 2 * 2 + 1)
    assert mesh.get_coordinate() == (world.rank // 2, world.rank % 2)


@pytest.mark.ranks(4)
def test_parts_are_joined_in_their_order(world):
    mesh = named(world)
    joined = DeviceMesh._concatenate([mesh["tp"], mesh["dp"]])
    assert joined._get_root_mesh() is mesh._get_root_mesh() is mesh
    assert joined.mesh_dim_names == ("tp", "dp")
    assert joined.get_group("dp") is mesh.get_group("dp")
    assert joined.mesh.tolist() == mesh.mesh[:, 0, :].T.tolist()
    with pytest.raises(ValueError, match="different dimensions of the same mesh"):
        DeviceMesh._concatenate([mesh["tp"], mesh["tp"]])
    with pytest.raises(ValueError, match="different dimensions of the same mesh"):
        DeviceMesh._concatenate([mesh["tp"], init_device_mesh("cpu", (4,))])


@pytest.mark.ranks(4)
def test_all_lines_along_a_dimension_are_meshes(world):
    mesh = named(world)
    assert mesh._get_mesh_dim_by_name("tp") == 2
    subs = mesh._get_all_submeshes("dp")
    mine = [sub for sub in subs if sub._is_current_rank_part_of_mesh()]
    assert [sub.get_group() for sub in mine] == [mesh.get_group("dp")]
    assert [sub.mesh.tolist() for sub in subs] == [[0, 2], [1, 3]]
