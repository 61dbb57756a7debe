"""NCCLConfig: the configuration of a communicator, as the loaded release of NCCL takes it.

NCCL reads as many bytes of the struct as both sides know and fills in every field that is newer
than the `version` in it (parseCommConfig in NCCL's init.cc). Two releases put a new field into
former padding, so size and version must match: both are those of the older of the library and
the table.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import Any

from nc10d.backend.nccl.bindings.header_table import CONSTANTS, HEADER_VERSION, STRUCTS, Version
from nc10d.backend.nccl.bindings.library import Library, struct_type, version_code

UNDEFINED = -(2**31)
"""NCCL_CONFIG_UNDEF_INT: the library's own choice."""


@dataclass(frozen=True, slots=True)
class NCCLConfig:
    """The fields of ncclConfig_t under torch's names; None is NCCL's own choice.

    A field that is newer than the loaded release raises UnsupportedPlatform when a communicator is
    made with it. NCCL's documentation of ncclConfig_t explains each field.
    """

    blocking: int | None = None
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None
    split_share: int | None = None
    traffic_class: int | None = None
    comm_name: str | None = None
    collnet_enable: int | None = None
    cta_policy: int | None = None
    shrink_share: int | None = None
    nvls_ctas: int | None = None
    n_channels_per_net_peer: int | None = None
    nvlink_centric_sched: int | None = None
    graph_usage_mode: int | None = None
    num_rma_ctx: int | None = None
    max_p2p_peers: int | None = None
    graph_stream_ordering: int | None = None
    launch_order_implicit: int | None = None
    num_rma_sig: int | None = None
    rma_eager_init: int | None = None
    host_cft_mode: int | None = None
    nvls_host_mode: int | None = None


# The library's own fields (size, magic, version) come first in the struct; the others are in the
# order of NCCLConfig.
C_NAMES = tuple(field.name for field in STRUCTS["ncclConfig_t"][3:])
_SINCE = {field.name: field.since for field in STRUCTS["ncclConfig_t"]}


def as_struct(config: NCCLConfig, library: Library) -> ctypes.Structure:
    """Return `config` as a struct of `library`; UnsupportedPlatform for a field that is too new."""
    release = known_release(library.version)
    struct: Any = struct_type("ncclConfig_t", release)()
    struct.size = ctypes.sizeof(struct)
    struct.magic = CONSTANTS["NCCL_API_MAGIC"]
    struct.version = version_code(release)
    for field, name in zip(fields(NCCLConfig), C_NAMES, strict=True):
        value = getattr(config, field.name)
        if value is not None:
            library.require(_SINCE[name], f"NCCLConfig.{field.name}")
            setattr(struct, name, value.encode() if isinstance(value, str) else int(value))
        elif hasattr(struct, name) and not name.endswith("Name"):
            setattr(struct, name, UNDEFINED)
    return struct  # type: ignore[no-any-return]


def known_release(version: Version) -> Version:
    """Return the older of a library's release and the table's."""
    return min(version, HEADER_VERSION)
