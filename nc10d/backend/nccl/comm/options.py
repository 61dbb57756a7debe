"""A user's choices for a group on NCCL, and communicators' configuration among them.

NCCL reads as many bytes of the struct as both sides know and fills in every field that is newer
than the struct's `version` (parseCommConfig in NCCL's init.cc). Two releases put a new field into
former padding, so size and version must match: both are the older side's, the library's or the
table's.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nc10d.backend.nccl.bindings.header_table import CONFIG, CONSTANTS, HEADER_VERSION
from nc10d.backend.nccl.bindings.library import Library, config_type, version_code
from nc10d.cuda.driver import QUEUES

UNDEFINED = -(2**31)
"""NCCL_CONFIG_UNDEF_INT: the library's own choice."""
NONBLOCKING = ("NC10D_NCCL_NONBLOCKING", "TORCH_NCCL_USE_COMM_NONBLOCKING")
"""The first that is set determines whether communicators are nonblocking ("1")."""
LINKS = ("direction", "tag", "group")
"""The ways of messages; see NcclOptions."""
_USUAL_QUEUES = 8


@dataclass(frozen=True, slots=True)
class NCCLConfig:
    """The fields of ncclConfig_t under torch's names; None is NCCL's own choice.

    TypeError for a value of another type, and ValueError for one that NCCL would refuse. A group
    with a field that is newer than the loaded release is refused (UnsupportedPlatform). NCCL's
    documentation on ncclConfig_t explains each.
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

    def __post_init__(self) -> None:
        for name, text in zip(_NAMES, C_NAMES, strict=True):
            value = getattr(self, name)
            kind = str if text.endswith("Name") else int
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"NCCLConfig.{name}: expected {kind.__name__}, got {value!r}")
            least, most = _RANGES.get(name, (UNDEFINED + 1, _MOST_INT))
            if isinstance(value, int) and not least <= value <= most:
                raise ValueError(f"NCCLConfig.{name}: expected {least} to {most}, got {value}")
        few, many = self.min_ctas, self.max_ctas
        if few is not None and (many is None or few > many):
            pair = f"{few} and {many}"
            raise ValueError(f"NCCLConfig.min_ctas needs max_ctas, which is no smaller, got {pair}")


_NAMES = tuple(option.name for option in fields(NCCLConfig))
# The library's own fields (size, magic, version) come first in the struct; the others are in
# NCCLConfig's order.
C_NAMES = tuple(member.name for member in CONFIG[3:])
_SINCE = {member.name: member.since for member in CONFIG}
_MOST_INT, _MOST_CHANNELS = 2**31 - 1, 64  # MAXCHANNELS (NCCL's include/device.h)
_RANGES = {
    "blocking": (0, 1),
    "cga_cluster_size": (0, _MOST_INT),
    "min_ctas": (1, _MOST_INT),
    "max_ctas": (1, _MOST_INT),
    "split_share": (0, 1),
    "collnet_enable": (0, 1),
    "cta_policy": (0, 3),
    "shrink_share": (0, 1),
    "nvls_ctas": (1, _MOST_INT),
    "n_channels_per_net_peer": (1, _MOST_CHANNELS),
    "nvlink_centric_sched": (0, 1),
    "graph_usage_mode": (0, 2),
    "num_rma_ctx": (0, _MOST_INT),
    "max_p2p_peers": (1, _MOST_INT),
    "graph_stream_ordering": (0, 1),
    "host_cft_mode": (1, 3),
    "nvls_host_mode": (0, _MOST_INT),
}
"""The values that NCCL takes: parseCommConfig in NCCL 2.30.7's init.cc, and nccl.h 2.32.3's enums.

Other fields take any int of 32 bits but UNDEFINED.
"""


def as_struct(config: NCCLConfig, library: Library) -> ctypes.Structure:
    """Return `config` as `library`'s struct; UnsupportedPlatform for a field that is too new."""
    # The older release, the library's or the table's.
    release = min(library.version, HEADER_VERSION)
    struct: Any = config_type(release)()
    struct.size = ctypes.sizeof(struct)
    struct.magic = CONSTANTS["NCCL_API_MAGIC"]
    struct.version = version_code(release)
    for option, name in zip(_NAMES, C_NAMES, strict=True):
        value = getattr(config, option)
        if value is not None:
            library.require(_SINCE[name], f"NCCLConfig.{option}")
            setattr(struct, name, value.encode() if isinstance(value, str) else int(value))
        elif hasattr(struct, name) and not name.endswith("Name"):
            setattr(struct, name, UNDEFINED)
    return struct  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class NcclOptions:
    """`pg_options` of a group on NCCL.

    `config` applies to every communicator in the group. With `high_priority`, operations run on
    streams with the device's highest priority. With `timing`, `Work.duration` is the time on the
    device, in seconds.

    `links` is how messages go, the same on all ranks: each direction between two ranks has a
    communicator ("direction"), or each tag in each direction ("tag"), which costs device memory and
    time to form, or messages go on the group's own communicator, in order with the collectives
    ("group"). But for "tag", messages from a rank to another are received in the order of their
    sends, and other tags are a CollectiveMismatch. With "group" an exchange must be in one block.
    The default is "direction", or "group" where CUDA_DEVICE_MAX_CONNECTIONS is less than 8: there
    the streams of a device share its hardware queues, and wait for each other anyway.

    With `grow_from`, a group whose ranks are the new group's first ranks, the new group's
    communicator grows out of that group's (ncclCommGrow, NCCL 2.29.2). All ranks in that group pass
    `grow_from`, and new ranks do not. The old group has been used, has nothing in flight
    (ValueError), and can only be destroyed afterwards.
    """

    config: NCCLConfig = field(default_factory=NCCLConfig)
    high_priority: bool = False
    timing: bool = False
    links: str | None = None
    grow_from: object = None

    def __post_init__(self) -> None:
        if not isinstance(self.config, NCCLConfig):
            raise TypeError(f"NcclOptions.config: expected an NCCLConfig, got {self.config!r}")
        if self.links not in (None, *LINKS):
            raise ValueError(f"NcclOptions.links: expected one of {LINKS}, got {self.links!r}")


def read_options(given: NcclOptions | None) -> NcclOptions:
    """Return a group's `pg_options`, completed from the environment."""
    options = given or NcclOptions()
    if options.links is None:
        queues = os.environ.get(QUEUES, "")
        few = queues.isdigit() and int(queues) < _USUAL_QUEUES
        options = replace(options, links="group" if few else "direction")
    asked = next((os.environ[name] for name in NONBLOCKING if os.environ.get(name)), None)
    if asked is None or options.config.blocking is not None:
        return options
    return replace(options, config=replace(options.config, blocking=int(asked == "0")))


def shares(options: NcclOptions) -> bool:
    """Return whether NCCL shares resources between a communicator and those split off it."""
    asked = os.environ.get("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0") != "0"
    return asked or bool(options.config.split_share)
