"""DeviceMesh: the ranks as an n-dimensional array, with a group along each dimension.

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "model"))
    mesh.get_group("model")         # the group of my row
    mesh["data"]                    # the one-dimensional mesh of my column

Contract: names and meanings are those of torch.distributed.device_mesh. To make a mesh and to
flatten a mesh make groups: every rank in the default group calls, in the same order, and the call
blocks until all have. All other calls are local and don't block.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from nc10d.api.queries import is_initialized
from nc10d.group.new_group import make_groups
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import current_world, get_default_group, init_process_group

Ranks = np.ndarray[Any, np.dtype[np.int64]]
Dim = int | str


def lines(ranks: Ranks, dims: Sequence[int]) -> list[list[int]]:
    """Return the lists of ranks along `dims`, a list for each index along the other dimensions."""
    rest = [dim for dim in range(ranks.ndim) if dim not in dims]
    length = prod(ranks.shape[dim] for dim in dims)
    found: list[list[int]] = ranks.transpose(*rest, *dims).reshape(-1, length).tolist()
    return found


class DeviceMesh:
    """The global ranks `mesh` as an array, for devices with a type ("cpu", "cuda").

    Each rank occurs at most once. Meshes with the same ranks, names and type are equal. A copy or
    pickle finds the groups by name in the process that unpickles it. ValueError for duplicate
    ranks, for ranks outside the default group, and unless each dimension has a different name.
    """

    def __init__(
        self,
        device_type: str,
        mesh: object,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        _groups: Sequence[ProcessGroup | None] | None = None,
        _root: DeviceMesh | None = None,
    ) -> None:
        self.device_type = device_type
        self.mesh = _ranks(mesh)
        self.mesh_dim_names = _names(mesh_dim_names, self.mesh.ndim)
        self._root = _root or self
        self._flat: dict[str, DeviceMesh] = {}
        if _groups is None:
            _groups = [_my_group(lines(self.mesh, [dim])) for dim in range(self.mesh.ndim)]
        self._groups = list(_groups)

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: object = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Return the mesh for an existing group, or for a group along each dimension of `mesh`.

        Local: no other rank needs to call. ValueError if a group's ranks are not the line of `mesh`
        along its dimension.
        """
        groups = [group] if isinstance(group, ProcessGroup) else list(group)
        whole = groups[0].ranks if mesh is None and len(groups) == 1 else mesh
        if whole is None:
            raise ValueError("a mesh of several groups needs `mesh`: which ranks are where")
        found = cls(device_type, whole, mesh_dim_names=mesh_dim_names, _groups=groups)
        for dim, existing in enumerate(groups):
            if list(existing.ranks) not in lines(found.mesh, [dim]):
                raise ValueError(f"{existing!r} is no line of the mesh along dimension {dim}")
        return found

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.mesh.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks along each dimension."""
        return tuple(self.mesh.shape)

    def size(self, mesh_dim: Dim | None = None) -> int:
        """Return the number of ranks, in the whole mesh or along a dimension."""
        return self.mesh.size if mesh_dim is None else self.mesh.shape[self._dim(mesh_dim)]

    def get_rank(self) -> int:
        """Return this process's global rank."""
        return get_default_group().rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's index along each dimension; None if it is not in the mesh."""
        found = np.argwhere(self.mesh == self.get_rank())
        return tuple(found[0].tolist()) if len(found) else None

    def get_local_rank(self, mesh_dim: Dim | None = None) -> int:
        """Return this rank's index along a dimension, the only dimension if none is given.

        ValueError for a rank that is not in the mesh.
        """
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise ValueError(f"rank {self.get_rank()} is not in {self!r}")
        return coordinate[self._dim(mesh_dim)]

    def get_group(self, mesh_dim: Dim | None = None) -> ProcessGroup:
        """Return my group along a dimension, the only dimension if none is given.

        ValueError for a rank that is not in the mesh.
        """
        found = self._groups[self._dim(mesh_dim)]
        if found is None:
            raise ValueError(f"rank {self.get_rank()} is not in {self!r}")
        return found

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return my group along each dimension."""
        return [self.get_group(dim) for dim in range(self.ndim)]

    def __getitem__(self, names: str | Sequence[str]) -> DeviceMesh:
        """Return my part of the mesh along the named dimensions.

        It shares this mesh's groups. KeyError for names that are unknown or out of order.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if len(wanted) == 1 and wanted[0] in self._flat:
            return self._flat[wanted[0]]
        dims = [self._index_of(name) for name in wanted]
        if dims != sorted(set(dims)):
            raise KeyError(f"dimensions must be different and in the mesh's order, got {wanted}")
        here = self.get_coordinate() or (0,) * self.ndim  # 0 for a rank that is not in the mesh
        index = [slice(None) if dim in dims else at for dim, at in enumerate(here)]
        groups = [self._groups[dim] for dim in dims]
        return _mesh(self.device_type, self.mesh[tuple(index)], wanted, groups, self._root)

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """Return my ranks as a one-dimensional mesh, with a group for all of them.

        The root mesh finds it by its name; the default name joins the dimensions' names by "_".
        Makes groups: every rank in the default group calls, and the call blocks until all have.
        """
        root = self._root
        name = mesh_dim_name or "_".join(self.mesh_dim_names or ("all",))
        if name in root._flat:
            return root._flat[name]
        if self.mesh_dim_names == (name,):
            return self
        if name in (root.mesh_dim_names or ()):
            raise ValueError(f"the mesh has a dimension {name!r} already")
        names = root.mesh_dim_names or ()
        dims = [names.index(own) for own in self.mesh_dim_names or ()] or range(root.ndim)
        group = _my_group(lines(root.mesh, dims))
        flat = _mesh(self.device_type, self.mesh.reshape(-1), (name,), [group], root)
        root._flat[name] = flat
        return flat

    def _unflatten(
        self, dim: Dim, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str]
    ) -> DeviceMesh:
        """Return the mesh with a dimension as several, in row-major order; every rank calls.

        Blocks as _flatten does. ValueError unless the sizes' product is the dimension's size. The
        mesh must be whole, not a part (ValueError).
        """
        at, sizes = self._dim(dim), tuple(mesh_sizes)
        if prod(sizes) != self.shape[at] or len(sizes) != len(mesh_dim_names):
            have = f"a dimension of {self.shape[at]} ranks"
            raise ValueError(f"{have} can't be {sizes}, named {list(mesh_dim_names)}")
        if self._root is not self:
            raise ValueError(f"{self!r} is a part of {self._root!r}: unflatten that mesh")
        ranks = self.mesh.reshape(*self.shape[:at], *sizes, *self.shape[at + 1 :])
        names = self.mesh_dim_names or tuple(map(str, range(self.ndim)))
        names = (*names[:at], *mesh_dim_names, *names[at + 1 :])
        made = [_my_group(lines(ranks, [at + i])) for i in range(len(sizes))]
        groups = [*self._groups[:at], *made, *self._groups[at + 1 :]]
        return _mesh(self.device_type, ranks, names, groups, None)

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        """Return my part of a mesh along the dimensions of its parts, in their order.

        ValueError unless all are different dimensions of the same mesh.
        """
        root = device_mesh_list[0]._root
        names = [name for mesh in device_mesh_list for name in mesh.mesh_dim_names or ()]
        known = [name for name in root.mesh_dim_names or () if name in names]
        if any(mesh._root is not root for mesh in device_mesh_list) or sorted(known) != sorted(
            names
        ):
            raise ValueError(f"{names} are not different dimensions of the same mesh, {root!r}")
        part = root[known]
        order = [known.index(name) for name in names]
        groups = [part._groups[dim] for dim in order]
        return _mesh(root.device_type, part.mesh.transpose(order), tuple(names), groups, root)

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:
        """Return a one-dimensional mesh for each line of ranks along a dimension."""
        dim = self._index_of(mesh_dim_name)
        me, own, names = self.get_rank(), self._groups[dim], (mesh_dim_name,)
        return [
            _mesh(
                self.device_type, np.array(line), names, [own if me in line else None], self._root
            )
            for line in lines(self.mesh, [dim])
        ]

    def _get_root_mesh(self) -> DeviceMesh:
        """Return the whole mesh to which this part belongs; a whole mesh returns itself."""
        return self._root

    def _get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        """Return the index of a dimension; KeyError for an unknown name."""
        return self._index_of(mesh_dim_name)

    def _is_current_rank_part_of_mesh(self) -> bool:
        """Return whether this rank is in the mesh."""
        return self.get_coordinate() is not None

    def _dim(self, dim: Dim | None) -> int:
        if dim is None and self.ndim != 1:
            raise ValueError(f"say which of {self.ndim} dimensions: mesh_dim is not given")
        dim = dim or 0
        if isinstance(dim, str):
            return self._index_of(dim)
        if not -self.ndim <= dim < self.ndim:
            raise IndexError(f"there are {self.ndim} dimensions, no dimension {dim}")
        return dim % self.ndim

    def _index_of(self, name: str) -> int:
        names = self.mesh_dim_names or ()
        if name not in names:
            raise KeyError(f"no dimension {name!r}: the mesh has {names or 'no names'}")
        return names.index(name)

    def _identity(self) -> tuple[object, ...]:
        return self.device_type, self.shape, self.mesh.tobytes(), self.mesh_dim_names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMesh) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __reduce__(self) -> Any:
        groups = [group and group.name for group in self._groups]
        root = None if self._root is self else self._root
        return _with_groups, (self.device_type, self.mesh, self.mesh_dim_names, groups, root)

    def __repr__(self) -> str:
        sides = zip(self.mesh_dim_names or [""] * self.ndim, self.shape, strict=True)
        shape = ", ".join(f"{name}={n}" if name else str(n) for name, n in sides)
        return f"<DeviceMesh {self.device_type!r} ({shape}): ranks {self.mesh.tolist()}>"


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """Return the mesh of all ranks in this shape, in row-major order; every rank calls.

    Makes the default group if there is none. Blocks until all ranks have called. ValueError if
    the shape's product is not the world size.
    """
    if not is_initialized():
        init_process_group()
    shape = tuple(mesh_shape)
    size = get_default_group().size
    if prod(shape) != size:
        raise ValueError(f"a mesh of {shape} has {prod(shape)} places, there are {size} ranks")
    return DeviceMesh(device_type, np.arange(size).reshape(shape), mesh_dim_names=mesh_dim_names)


def _with_groups(
    device_type: str,
    mesh: Ranks,
    mesh_dim_names: tuple[str, ...] | None,
    names: Sequence[str | None],
    root: DeviceMesh | None,
) -> DeviceMesh:
    """Return a mesh from this process's groups with these names; ValueError for a missing group."""
    own_groups = current_world().groups
    missing = [name for name in names if name is not None and name not in own_groups]
    if missing:
        raise ValueError(f"the mesh needs groups that are not here: {', '.join(missing)}")
    groups = [None if name is None else own_groups[name] for name in names]
    return _mesh(device_type, mesh, mesh_dim_names, groups, root)


def _mesh(
    kind: str,
    mesh: Ranks,
    names: tuple[str, ...] | None,
    groups: Sequence[ProcessGroup | None],
    root: DeviceMesh | None,
) -> DeviceMesh:
    return DeviceMesh(kind, mesh, mesh_dim_names=names, _groups=groups, _root=root)


def _ranks(mesh: object) -> Ranks:
    found = np.array(mesh, np.int64)
    if not found.ndim:
        raise ValueError("a mesh needs at least one dimension")
    if len(np.unique(found)) != found.size:
        raise ValueError(f"each rank may be in the mesh once, got {found.tolist()}")
    return found


def _names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if len(names) != ndim or len(set(names)) != ndim:
        raise ValueError(f"{ndim} dimensions need as many different names, got {list(names)}")
    return tuple(names)


def _my_group(lists: list[list[int]]) -> ProcessGroup | None:
    """Make a group for each list; return my group, None if I'm in no list. Every rank calls."""
    default = get_default_group()
    if lists == [list(default.ranks)]:
        return default
    # In the mesh's order, so that a rank's index along a dimension is its rank in the group.
    groups = make_groups(f"DeviceMesh({lists})", lists)
    return next((group for group in groups if isinstance(group, ProcessGroup)), None)
