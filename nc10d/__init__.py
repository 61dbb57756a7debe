"""c10d as an independent library: collectives, stores, work and coalescing on raw arrays.

    import nc10d as dist

    dist.init_process_group()
    dist.all_reduce(x)

This module only maps each public name to its module, and the first use of a name imports that
module. `import nc10d` alone imports no other module except `base.run_to_end`, by which the first
uses import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nc10d.base.run_to_end as _runs

if TYPE_CHECKING:
    from nc10d import cuda as cuda
    from nc10d import device_mesh as device_mesh
    from nc10d import distributed_c10d as distributed_c10d
    from nc10d import exact as exact
    from nc10d import functional as functional
    from nc10d import nccl as nccl
    from nc10d import numba as numba
    from nc10d import observe as observe
    from nc10d.api.backend_names import Backend as Backend
    from nc10d.api.backend_names import (
        get_default_backend_for_device as get_default_backend_for_device,
    )
    from nc10d.api.backend_names import is_backend_available as is_backend_available
    from nc10d.api.backend_names import is_gloo_available as is_gloo_available
    from nc10d.api.backend_names import is_mpi_available as is_mpi_available
    from nc10d.api.backend_names import is_nccl_available as is_nccl_available
    from nc10d.api.backend_names import is_ucc_available as is_ucc_available
    from nc10d.api.backend_names import is_xccl_available as is_xccl_available
    from nc10d.api.batch_p2p import P2POp as P2POp
    from nc10d.api.batch_p2p import batch_isend_irecv as batch_isend_irecv
    from nc10d.api.batch_p2p import irecv as irecv
    from nc10d.api.batch_p2p import isend as isend
    from nc10d.api.batch_p2p import recv as recv
    from nc10d.api.batch_p2p import send as send
    from nc10d.api.calls import all_gather as all_gather
    from nc10d.api.calls import all_gather_into_tensor as all_gather_into_tensor
    from nc10d.api.calls import all_gather_single as all_gather_single
    from nc10d.api.calls import all_reduce as all_reduce
    from nc10d.api.calls import all_to_all as all_to_all
    from nc10d.api.calls import all_to_all_single as all_to_all_single
    from nc10d.api.calls import barrier as barrier
    from nc10d.api.calls import broadcast as broadcast
    from nc10d.api.calls import exscan as exscan
    from nc10d.api.calls import gather as gather
    from nc10d.api.calls import gather_single as gather_single
    from nc10d.api.calls import reduce as reduce
    from nc10d.api.calls import reduce_scatter as reduce_scatter
    from nc10d.api.calls import reduce_scatter_single as reduce_scatter_single
    from nc10d.api.calls import reduce_scatter_tensor as reduce_scatter_tensor
    from nc10d.api.calls import scan as scan
    from nc10d.api.calls import scatter as scatter
    from nc10d.api.calls import scatter_single as scatter_single
    from nc10d.api.join import Join as Join
    from nc10d.api.join import Joinable as Joinable
    from nc10d.api.join import JoinHook as JoinHook
    from nc10d.api.mesh import DeviceMesh as DeviceMesh
    from nc10d.api.mesh import init_device_mesh as init_device_mesh
    from nc10d.api.monitored_barrier import monitored_barrier as monitored_barrier
    from nc10d.api.mpi_calls import iprobe as iprobe
    from nc10d.api.mpi_calls import probe as probe
    from nc10d.api.mpi_calls import sendrecv as sendrecv
    from nc10d.api.mpi_calls import sendrecv_replace as sendrecv_replace
    from nc10d.api.objects import all_gather_object as all_gather_object
    from nc10d.api.objects import broadcast_object_list as broadcast_object_list
    from nc10d.api.objects import gather_object as gather_object
    from nc10d.api.objects import recv_object_list as recv_object_list
    from nc10d.api.objects import scatter_object_list as scatter_object_list
    from nc10d.api.objects import send_object_list as send_object_list
    from nc10d.api.old_names import _all_gather_base as _all_gather_base
    from nc10d.api.old_names import _broadcast_coalesced as _broadcast_coalesced
    from nc10d.api.old_names import _reduce_scatter_base as _reduce_scatter_base
    from nc10d.api.old_names import all_gather_coalesced as all_gather_coalesced
    from nc10d.api.old_names import all_reduce_coalesced as all_reduce_coalesced
    from nc10d.api.old_names import gather_into_tensor as gather_into_tensor
    from nc10d.api.old_names import reduce_op as reduce_op
    from nc10d.api.queries import _coalescing_manager as _coalescing_manager
    from nc10d.api.queries import coalescing_manager as coalescing_manager
    from nc10d.api.queries import default_pg_timeout as default_pg_timeout
    from nc10d.api.queries import default_timeout as default_timeout
    from nc10d.api.queries import get_backend as get_backend
    from nc10d.api.queries import get_backend_config as get_backend_config
    from nc10d.api.queries import get_backend_impl as get_backend_impl
    from nc10d.api.queries import get_global_rank as get_global_rank
    from nc10d.api.queries import get_group_rank as get_group_rank
    from nc10d.api.queries import get_node_local_rank as get_node_local_rank
    from nc10d.api.queries import get_pg_count as get_pg_count
    from nc10d.api.queries import get_process_group_ranks as get_process_group_ranks
    from nc10d.api.queries import get_rank as get_rank
    from nc10d.api.queries import get_world_size as get_world_size
    from nc10d.api.queries import is_available as is_available
    from nc10d.api.queries import is_initialized as is_initialized
    from nc10d.api.queries import is_torchelastic_launched as is_torchelastic_launched
    from nc10d.api.queries import set_timeout as set_timeout
    from nc10d.api.queries import supports_complex as supports_complex
    from nc10d.api.registered import empty as empty
    from nc10d.api.registered import from_numpy as from_numpy
    from nc10d.api.registered import zeros as zeros
    from nc10d.arrays.buffer import Buffer as Buffer
    from nc10d.arrays.buffer import as_buffer as as_buffer
    from nc10d.arrays.dtypes import DType as DType
    from nc10d.backend.config import BackendConfig as BackendConfig
    from nc10d.backend.registry import register_backend as register_backend
    from nc10d.base.debug_level import DebugLevel as DebugLevel
    from nc10d.base.debug_level import get_debug_level as get_debug_level
    from nc10d.base.debug_level import set_debug_level as set_debug_level
    from nc10d.base.debug_level import set_debug_level_from_env as set_debug_level_from_env
    from nc10d.codec import register_dataclass as register_dataclass
    from nc10d.codec import register_type as register_type
    from nc10d.distributed_c10d import _get_process_group_name as _get_process_group_name
    from nc10d.distributed_c10d import _rank_not_in_group as _rank_not_in_group
    from nc10d.errors import Aborted as Aborted
    from nc10d.errors import AuthError as AuthError
    from nc10d.errors import CodecError as CodecError
    from nc10d.errors import CollectiveMismatch as CollectiveMismatch
    from nc10d.errors import CollectiveTimeout as CollectiveTimeout
    from nc10d.errors import CudaError as CudaError
    from nc10d.errors import DistBackendError as DistBackendError
    from nc10d.errors import DistError as DistError
    from nc10d.errors import DistNetworkError as DistNetworkError
    from nc10d.errors import DistQueueEmptyError as DistQueueEmptyError
    from nc10d.errors import DistStoreError as DistStoreError
    from nc10d.errors import ForkedGroupError as ForkedGroupError
    from nc10d.errors import GroupClosed as GroupClosed
    from nc10d.errors import NCCLError as NCCLError
    from nc10d.errors import NotANumberError as NotANumberError
    from nc10d.errors import PeerLost as PeerLost
    from nc10d.errors import QueueEmptyError as QueueEmptyError
    from nc10d.errors import RendezvousError as RendezvousError
    from nc10d.errors import StoreError as StoreError
    from nc10d.errors import StoreTimeout as StoreTimeout
    from nc10d.errors import UCCError as UCCError
    from nc10d.errors import UnsupportedPlatform as UnsupportedPlatform
    from nc10d.group.coalescing import CoalescingManager as CoalescingManager
    from nc10d.group.direct_groups import ProcessGroupCPU as ProcessGroupCPU
    from nc10d.group.direct_groups import ProcessGroupGloo as ProcessGroupGloo
    from nc10d.group.direct_groups import ProcessGroupMPI as ProcessGroupMPI
    from nc10d.group.direct_groups import ProcessGroupNCCL as ProcessGroupNCCL
    from nc10d.group.direct_groups import ProcessGroupUCC as ProcessGroupUCC
    from nc10d.group.new_group import new_group as new_group
    from nc10d.group.new_group import new_subgroups as new_subgroups
    from nc10d.group.new_group import new_subgroups_by_enumeration as new_subgroups_by_enumeration
    from nc10d.group.new_group import split_group as split_group
    from nc10d.group.process_group import ProcessGroup as ProcessGroup
    from nc10d.group.shrink import shrink_group as shrink_group
    from nc10d.group.world import GroupMember as GroupMember
    from nc10d.group.world import abort_process_group as abort_process_group
    from nc10d.group.world import destroy_process_group as destroy_process_group
    from nc10d.group.world import get_default_group as get_default_group
    from nc10d.group.world import init_process_group as init_process_group
    from nc10d.init_methods.methods import (
        register_rendezvous_handler as register_rendezvous_handler,
    )
    from nc10d.init_methods.methods import rendezvous as rendezvous
    from nc10d.kernels.reduction_decorator import reduction as reduction
    from nc10d.ops import AVG as AVG
    from nc10d.ops import BAND as BAND
    from nc10d.ops import BOR as BOR
    from nc10d.ops import BXOR as BXOR
    from nc10d.ops import MAX as MAX
    from nc10d.ops import MIN as MIN
    from nc10d.ops import PRODUCT as PRODUCT
    from nc10d.ops import SUM as SUM
    from nc10d.ops import MessageInfo as MessageInfo
    from nc10d.ops import ReduceOp as ReduceOp
    from nc10d.ops import premul_sum as premul_sum
    from nc10d.ops.ready_made import ARGMAX as ARGMAX
    from nc10d.ops.ready_made import ARGMIN as ARGMIN
    from nc10d.ops.ready_made import LAND as LAND
    from nc10d.ops.ready_made import LOGSUMEXP as LOGSUMEXP
    from nc10d.ops.ready_made import LOR as LOR
    from nc10d.ops.ready_made import LXOR as LXOR
    from nc10d.ops.ready_made import MAXLOC as MAXLOC
    from nc10d.ops.ready_made import MINLOC as MINLOC
    from nc10d.ops.ready_made import WELFORD as WELFORD
    from nc10d.ops.ready_made import softmax_merge as softmax_merge
    from nc10d.ops.ready_made import topk as topk
    from nc10d.reducer.gradients import SparseGradient as SparseGradient
    from nc10d.reducer.hooks import GradBucket as GradBucket
    from nc10d.reducer.leaf_sums import all_reduce_leaves as all_reduce_leaves
    from nc10d.reducer.leaf_sums import leaf_range as leaf_range
    from nc10d.reducer.logger import Logger as Logger
    from nc10d.reducer.plan import (
        compute_bucket_assignment_by_size as compute_bucket_assignment_by_size,
    )
    from nc10d.reducer.reducer import Reducer as Reducer
    from nc10d.store import FileStore as FileStore
    from nc10d.store import HashStore as HashStore
    from nc10d.store import PrefixStore as PrefixStore
    from nc10d.store import Store as Store
    from nc10d.store import TCPStore as TCPStore
    from nc10d.work import Future as Future
    from nc10d.work import Work as Work
    from nc10d.work import collect_all as collect_all
    from nc10d.work import wait_all as wait_all
    from nc10d.work import wait_any as wait_any
    from nc10d.work import wait_some as wait_some

_NAMES = {
    "api.calls": """all_gather all_gather_into_tensor all_gather_single all_reduce all_to_all
        all_to_all_single barrier broadcast exscan gather gather_single reduce
        reduce_scatter reduce_scatter_single reduce_scatter_tensor scan scatter scatter_single""",
    "api.backend_names": """Backend get_default_backend_for_device is_backend_available
        is_gloo_available is_mpi_available is_nccl_available is_ucc_available
        is_xccl_available""",
    "api.old_names": """_all_gather_base _broadcast_coalesced _reduce_scatter_base
        all_gather_coalesced all_reduce_coalesced gather_into_tensor reduce_op""",
    "backend.config": "BackendConfig",
    "backend.registry": "register_backend",
    "arrays.buffer": "Buffer as_buffer",
    "codec": "register_dataclass register_type",
    "base.debug_level": "DebugLevel get_debug_level set_debug_level set_debug_level_from_env",
    "arrays.dtypes": "DType",
    "distributed_c10d": "_get_process_group_name _rank_not_in_group",
    "errors": """Aborted AuthError CodecError CollectiveMismatch CollectiveTimeout CudaError
        DistBackendError DistError DistNetworkError DistQueueEmptyError DistStoreError
        ForkedGroupError GroupClosed NCCLError NotANumberError PeerLost QueueEmptyError
        RendezvousError StoreError StoreTimeout UCCError UnsupportedPlatform""",
    "group.coalescing": "CoalescingManager",
    "group.direct_groups": """ProcessGroupCPU ProcessGroupGloo ProcessGroupMPI ProcessGroupNCCL
        ProcessGroupUCC""",
    "group.process_group": "ProcessGroup",
    "api.join": "Join JoinHook Joinable",
    "api.mesh": "DeviceMesh init_device_mesh",
    "api.monitored_barrier": "monitored_barrier",
    "api.mpi_calls": "iprobe probe sendrecv sendrecv_replace",
    "api.objects": """all_gather_object broadcast_object_list gather_object recv_object_list
        scatter_object_list send_object_list""",
    "ops.ready_made": """ARGMAX ARGMIN LAND LOGSUMEXP LOR LXOR MAXLOC MINLOC WELFORD softmax_merge
        topk""",
    "kernels.reduction_decorator": "reduction",
    "ops": "AVG BAND BOR BXOR MAX MIN PRODUCT SUM MessageInfo ReduceOp premul_sum",
    "api.batch_p2p": "P2POp batch_isend_irecv irecv isend recv send",
    "api.queries": """_coalescing_manager coalescing_manager default_pg_timeout
        default_timeout get_backend get_backend_config get_backend_impl get_global_rank
        get_group_rank get_node_local_rank get_pg_count get_process_group_ranks get_rank
        get_world_size is_available is_initialized is_torchelastic_launched set_timeout
        supports_complex""",
    "reducer.gradients": "SparseGradient",
    "reducer.hooks": "GradBucket",
    "reducer.leaf_sums": "all_reduce_leaves leaf_range",
    "reducer.logger": "Logger",
    "reducer.plan": "compute_bucket_assignment_by_size",
    "reducer.reducer": "Reducer",
    "api.registered": "empty from_numpy zeros",
    "init_methods.methods": "register_rendezvous_handler rendezvous",
    "store": "FileStore HashStore PrefixStore Store TCPStore",
    "group.shrink": "shrink_group",
    "group.new_group": "new_group new_subgroups new_subgroups_by_enumeration split_group",
    "work": "Future Work collect_all wait_all wait_any wait_some",
    "group.world": """GroupMember abort_process_group destroy_process_group get_default_group
        init_process_group""",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_SUBMODULES = {
    *("cuda", "device_mesh", "distributed_c10d", "exact", "functional", "nccl", "numba"),
    "observe",
}
"""Public modules that an attribute of nc10d imports: `nc10d.functional` and so on."""

__version__ = "0.1.0"
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name == "group":
        # c10d's `group.WORLD`: the package nc10d.group has that attribute once there is a world.
        _runs.import_to_end("nc10d.group.world")
        return _runs.import_to_end("nc10d.group")
    if name in _SUBMODULES:
        return _runs.import_to_end(f"nc10d.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'nc10d' has no attribute {name!r}")
    value = getattr(_runs.import_to_end(f"nc10d.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names; c10d's names that begin with "_" can be used and are not listed."""
    names = {"__version__", "group", *_HOME, *_SUBMODULES}
    return sorted(name for name in names if not name.startswith("_") or name == "__version__")
