"""c10d as a library of its own: collectives, stores, work and coalescing on raw arrays.

    import nc10d as dist

    dist.init_process_group()
    dist.all_reduce(x)

This module only maps each public name to its module, and the first use of a name imports that
module. `import nc10d` alone imports no other module of the package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nc10d import cuda as cuda
    from nc10d.api import functional as functional
    from nc10d.api.batch_p2p import P2POp, batch_isend_irecv
    from nc10d.api.calls import (
        all_gather,
        all_gather_into_tensor,
        all_gather_single,
        all_reduce,
        all_to_all,
        all_to_all_single,
        barrier,
        broadcast,
        gather,
        gather_single,
        irecv,
        isend,
        recv,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_tensor,
        scatter,
        scatter_single,
        send,
    )
    from nc10d.api.mesh import DeviceMesh, init_device_mesh
    from nc10d.api.monitored_barrier import monitored_barrier
    from nc10d.api.objects import (
        all_gather_object,
        broadcast_object_list,
        gather_object,
        recv_object_list,
        scatter_object_list,
        send_object_list,
    )
    from nc10d.api.queries import (
        CoalescingManager,
        _coalescing_manager,
        coalescing_manager,
        get_backend,
        get_backend_config,
        get_global_rank,
        get_group_rank,
        get_node_local_rank,
        get_process_group_ranks,
        get_rank,
        get_world_size,
        is_available,
        is_initialized,
        is_torchelastic_launched,
    )
    from nc10d.api.registered import empty, from_numpy, zeros
    from nc10d.arrays.buffer import Buffer, as_buffer
    from nc10d.arrays.dtypes import DType
    from nc10d.backend.config import BackendConfig
    from nc10d.backend.registry import register_backend
    from nc10d.base.debug_level import (
        DebugLevel,
        get_debug_level,
        set_debug_level,
        set_debug_level_from_env,
    )
    from nc10d.codec import register_dataclass, register_type
    from nc10d.errors import (
        Aborted,
        AuthError,
        CodecError,
        CollectiveMismatch,
        CollectiveTimeout,
        CudaError,
        DistError,
        ForkedGroupError,
        GroupClosed,
        NCCLError,
        NotANumberError,
        PeerLost,
        QueueEmptyError,
        RendezvousError,
        StoreError,
        StoreTimeout,
        UnsupportedPlatform,
    )
    from nc10d.group import flight_recorder as observe  # noqa: F401
    from nc10d.group.new_group import (
        new_group,
        new_subgroups,
        new_subgroups_by_enumeration,
        split_group,
    )
    from nc10d.group.process_group import ProcessGroup
    from nc10d.group.shrink import shrink_group
    from nc10d.group.world import (
        GroupMember,
        abort_process_group,
        destroy_process_group,
        get_default_group,
        init_process_group,
    )
    from nc10d.ops import AVG, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM, ReduceOp, premul_sum
    from nc10d.reducer.gradients import SparseGradient
    from nc10d.reducer.hooks import GradBucket
    from nc10d.reducer.logger import Logger
    from nc10d.reducer.plan import compute_bucket_assignment_by_size
    from nc10d.reducer.reducer import Reducer
    from nc10d.rendezvous.methods import rendezvous
    from nc10d.store import FileStore, HashStore, PrefixStore, Store, TCPStore
    from nc10d.work import Future, Work, collect_all, wait_all

_NAMES = {
    "api.calls": """all_gather all_gather_into_tensor all_gather_single all_reduce all_to_all
        all_to_all_single barrier broadcast gather gather_single irecv isend recv reduce
        reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter scatter_single send""",
    "backend.config": "BackendConfig",
    "backend.registry": "register_backend",
    "arrays.buffer": "Buffer as_buffer",
    "codec": "register_dataclass register_type",
    "base.debug_level": "DebugLevel get_debug_level set_debug_level set_debug_level_from_env",
    "arrays.dtypes": "DType",
    "errors": """Aborted AuthError CodecError CollectiveMismatch CollectiveTimeout CudaError
        DistError ForkedGroupError GroupClosed NCCLError NotANumberError PeerLost QueueEmptyError
        RendezvousError StoreError StoreTimeout UnsupportedPlatform""",
    "group.process_group": "ProcessGroup",
    "api.mesh": "DeviceMesh init_device_mesh",
    "api.monitored_barrier": "monitored_barrier",
    "api.objects": """all_gather_object broadcast_object_list gather_object recv_object_list
        scatter_object_list send_object_list""",
    "ops": "AVG BAND BOR BXOR MAX MIN PRODUCT SUM ReduceOp premul_sum",
    "api.batch_p2p": "P2POp batch_isend_irecv",
    "api.queries": """get_backend get_backend_config get_global_rank get_group_rank
        get_node_local_rank get_process_group_ranks get_rank get_world_size is_available
        is_initialized is_torchelastic_launched _coalescing_manager coalescing_manager
        CoalescingManager""",
    "reducer.gradients": "SparseGradient",
    "reducer.hooks": "GradBucket",
    "reducer.logger": "Logger",
    "reducer.plan": "compute_bucket_assignment_by_size",
    "reducer.reducer": "Reducer",
    "api.registered": "empty from_numpy zeros",
    "rendezvous.methods": "rendezvous",
    "store": "FileStore HashStore PrefixStore Store TCPStore",
    "group.shrink": "shrink_group",
    "group.new_group": "new_group new_subgroups new_subgroups_by_enumeration split_group",
    "work": "Future Work collect_all wait_all",
    "group.world": """GroupMember abort_process_group destroy_process_group get_default_group
        init_process_group""",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_SUBMODULES = {"cuda": "cuda", "functional": "api.functional", "observe": "group.flight_recorder"}
"""Public modules by the name under which users know them: `nc10d.functional` and so on."""

__version__ = "0.1.0"
__all__ = [
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "MAX",
    "MIN",
    "PRODUCT",
    "SUM",
    "Aborted",
    "AuthError",
    "BackendConfig",
    "Buffer",
    "CoalescingManager",
    "CodecError",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "CudaError",
    "DType",
    "DebugLevel",
    "DeviceMesh",
    "DistError",
    "FileStore",
    "ForkedGroupError",
    "Future",
    "GradBucket",
    "GroupClosed",
    "GroupMember",
    "HashStore",
    "Logger",
    "NCCLError",
    "NotANumberError",
    "P2POp",
    "PeerLost",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "ReduceOp",
    "Reducer",
    "RendezvousError",
    "SparseGradient",
    "Store",
    "StoreError",
    "StoreTimeout",
    "TCPStore",
    "UnsupportedPlatform",
    "Work",
    "_coalescing_manager",
    "abort_process_group",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "as_buffer",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "coalescing_manager",
    "collect_all",
    "compute_bucket_assignment_by_size",
    "destroy_process_group",
    "empty",
    "from_numpy",
    "gather",
    "gather_object",
    "gather_single",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_group",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "is_torchelastic_launched",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "premul_sum",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register_backend",
    "register_dataclass",
    "register_type",
    "rendezvous",
    "scatter",
    "scatter_object_list",
    "scatter_single",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "shrink_group",
    "split_group",
    "wait_all",
    "zeros",
]


def __getattr__(name: str) -> Any:
    if name == "group":
        # c10d's `group.WORLD`: the package nc10d.group has that attribute once there is a world.
        importlib.import_module("nc10d.group.world")
        return importlib.import_module("nc10d.group")
    if name in _SUBMODULES:
        return importlib.import_module(f"nc10d.{_SUBMODULES[name]}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'nc10d' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"nc10d.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBMODULES, "group"})
