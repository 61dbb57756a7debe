"""NcclOptions: a user's choices for a group on NCCL, by `pg_options` or the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from nc10d.backend.nccl.bindings.comm_config import NCCLConfig

NONBLOCKING = ("NC10D_NCCL_NONBLOCKING", "TORCH_NCCL_USE_COMM_NONBLOCKING")
"""The first of these that is set determines whether communicators are nonblocking ("1")."""


@dataclass(frozen=True, slots=True)
class NcclOptions:
    """`pg_options` of a group on NCCL.

    `config` applies to every communicator of the group. With `high_priority`, operations run on
    streams of the device's highest priority. With `timing`, `Work.duration` is the time on the
    device, in seconds.
    """

    config: NCCLConfig = field(default_factory=NCCLConfig)
    high_priority: bool = False
    timing: bool = False


def read_options(given: Any) -> NcclOptions:
    """Return options, completed from the environment; TypeError if `given` is no NcclOptions."""
    if given is not None and not isinstance(given, NcclOptions):
        raise TypeError(f"pg_options of the nccl backend must be NcclOptions, got {given!r}")
    options = given or NcclOptions()
    asked = next((os.environ[name] for name in NONBLOCKING if os.environ.get(name)), None)
    if asked is None or options.config.blocking is not None:
        return options
    return replace(options, config=replace(options.config, blocking=int(asked == "0")))
