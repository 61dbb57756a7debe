"""The environment variables of nc10d, and a warning for one that is misspelt or has a bad value.

docs/environment.md explains each. A variable whose reader raises an error has no pattern.
"""

from __future__ import annotations

import difflib
import functools
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping

from nc10d.base.run_to_end import off_main

PREFIX = "NC10D_"
_SWITCH, _ONE, _SECONDS = "0|1", "1", r"\d+(\.\d*)?"
_MEANING = {_SWITCH: "0 or 1", _ONE: "1", _SECONDS: "a number of seconds"}
VARIABLES = {
    "NC10D_ALLOW_PICKLE": "",
    "NC10D_AS_GLOO": _SWITCH,
    "NC10D_BIND": "",
    "NC10D_CACHE_DIR": "",
    "NC10D_CMA": _SWITCH,
    "NC10D_CUDA_LIBRARY": "",
    "NC10D_DEBUG": "",
    "NC10D_DNS_TIMEOUT": "",
    "NC10D_DUMP_DIR": "",
    "NC10D_DUMP_SIGNAL": "",
    "NC10D_HOST_ID": "",
    "NC10D_INSECURE": _SWITCH,
    "NC10D_KEEP_STEPPED_GRADIENTS": _SWITCH,
    "NC10D_KERNEL_COPY_FROM": "",
    "NC10D_NCCL_HEARTBEAT": _SECONDS,
    "NC10D_NCCL_LIBRARY": "",
    "NC10D_NCCL_NONBLOCKING": _SWITCH,
    "NC10D_OPENMPI": "",
    "NC10D_ORDERED": _SWITCH,
    "NC10D_PEER_TIMEOUT": "",
    "NC10D_RESTART_COUNT": "",
    "NC10D_SOCKET_ADDRESS": "",
    "NC10D_SOCKET_IFNAME": "",
    "NC10D_STORE_TCP": _ONE,
    "NC10D_SYNC_SENDS": _SWITCH,
    "NC10D_TCP_CONGESTION": "",
    "NC10D_TOKEN": "",
    "NC10D_TOKEN_FILE": "",
    "NC10D_UCC_LIBRARY": "",
}
"""By variable: the pattern of its values, a key of _MEANING; empty if any value is allowed."""
_OF_TESTS = ("NC10D_EMULATED_", "NC10D_REQUIRE_", "NC10D_SCHEDULES")


@off_main
def seconds_of(name: str, default: float, least: float = 0.0, most: float = math.inf) -> float:
    """Return the seconds that a variable gives, `default` without it; ValueError if malformed."""
    text = os.environ.get(name) or default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not least <= seconds <= most:
        raise ValueError(f"{name} is a number of seconds, {least:g} or more: {text!r}")
    return seconds


@functools.cache
def warn_once() -> None:
    """Log a warning for each variable of this process that is unknown or has a bad value, once.

    In a rank of `nc10d.run` the launcher has done so.
    """
    if "NC10D_RESTART_COUNT" not in os.environ:
        for problem in problems(os.environ):
            logging.getLogger("nc10d").warning("%s", problem)


def problems(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable that is unknown or has a bad value."""
    for name in sorted(environment):
        value = environment[name]
        if not name.startswith(PREFIX) or name.startswith(_OF_TESTS):
            continue
        if name not in VARIABLES:
            yield f"{name} is not a variable of nc10d{_hint(name)}"
        elif value and VARIABLES[name] and not re.fullmatch(VARIABLES[name], value):
            yield f"{name}={value!r} has no meaning: it may be {_MEANING[VARIABLES[name]]}"


def _hint(name: str) -> str:
    short = {known.removeprefix(PREFIX): known for known in VARIABLES}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), short, 1)
    return f"; {short[near[0]]} is" if near else " (docs/environment.md lists them)"
