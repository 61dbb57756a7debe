"""The launcher's command line: torchrun's options, as far as they apply here.

`read` turns arguments into a LaunchRequest; nc10d/run/cli.py acts on it. What an option of torchrun
has no meaning for is accepted and named in `LaunchRequest.notes`.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from nc10d.run.environment import LaunchedJob
from nc10d.run.rank_output import OutputPlan, StreamMasks

DEFAULT_PORT = 29500
DEFAULT_GRACE = 5.0
JOIN_SECONDS = 600.0
"""How long a node waits for the others, as under torchrun."""

_DESCRIPTION = "Start N ranks of a script on this machine and watch over them."
_EPILOG = """
On a terminal rank 0 passes through unprefixed, so that its progress bar looks right; every
other line is prefixed by "[rank N]". The exit code is that of the first rank that failed
(128 + the number for a signal), 130 after Ctrl-C. Ranks read no input, except that the first
one inherits an input that is not a terminal. Options may be spelled with underscores too, and
end at the script or at --.
"""
# Options of torchrun that change nothing, and why.
_WITHOUT_MEANING = {
    "monitor_interval": "the launcher learns of a rank's end at once",
    "start_method": "a rank is a program of its own, not a fork",
}


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The parsed command line. A port of 0 means any free port.

    `by_arrival`: the node's rank is not given, so the job's node_rank is still to be found.
    `patience`: seconds to wait for the other nodes. `signals`: more signals that end the job.
    `notes`: lines for the user.
    """

    job: LaunchedJob
    command: tuple[str, ...]
    output: OutputPlan
    grace: float = DEFAULT_GRACE
    by_arrival: bool = False
    patience: float = JOIN_SECONDS
    signals: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def read(argv: Sequence[str]) -> LaunchRequest:
    """Return the request that `argv` makes; SystemExit with usage if it makes no sense."""
    options = parser()
    args = options.parse_args(argv)
    try:
        conf = dict(_pairs(args.rdzv_conf))
        notes = _notes(args, conf)
        if args.log_dir is None and (args.redirects or args.tee):
            args.log_dir = Path(tempfile.mkdtemp(prefix="nc10d-run-"))
            notes += (f"the ranks' output is kept in {args.log_dir}",)
        return LaunchRequest(
            job=_job(args),
            command=command(args),
            output=_output(args),
            grace=args.grace_period,
            by_arrival=args.nnodes > 1 and args.node_rank is None,
            patience=_patience(conf),
            signals=_signals(args.signals_to_handle),
            notes=notes,
        )
    except ValueError as error:
        options.error(str(error))


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Split "host", "host:port", "[v6]:port" or a bare IPv6 address; return host and port.

    ValueError for any other text.
    """
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, _, port = text.partition(":")
    number = int(port) if port.isdecimal() else default_port
    if not host or (port and not port.isdecimal()) or number > 65535:
        raise ValueError(f"not an address of the form host:port: {text!r}")
    return host, number


def command(args: argparse.Namespace) -> tuple[str, ...]:
    """Return a rank's command. Python runs unbuffered, so that output is timely."""
    if args.no_python and args.module:
        raise ValueError("--no-python and --module exclude each other")
    python = () if args.no_python else (sys.executable, "-u")
    words = args.words[1:] if args.words[0] == "--" else args.words
    return (*python, *(["-m"] if args.module else []), *words)


def _job(args: argparse.Namespace) -> LaunchedJob:
    several = args.nnodes > 1
    if several and args.standalone:
        raise ValueError("--standalone is for one node")
    host, port = _endpoint(args, DEFAULT_PORT if several else 0)
    if several and host is None:
        raise ValueError("several nodes need --rdzv-endpoint, an address of node 0")
    return LaunchedJob(
        nproc=args.nproc_per_node,
        nnodes=args.nnodes,
        node_rank=args.node_rank or 0,
        master_addr=host or "127.0.0.1",
        master_port=port,
        run_id=args.rdzv_id or ("none" if several else _new_run_id()),
        role=args.role,
        max_restarts=args.max_restarts,
        keep_going=args.keep_going,
        local_addr=args.local_addr,
        as_gloo=args.as_gloo,
    )


def _new_run_id() -> str:
    # For a single node only: several nodes would each make up another name.
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _endpoint(args: argparse.Namespace, default_port: int) -> tuple[str | None, int]:
    if args.standalone:
        return None, 0
    port = default_port if args.master_port is None else args.master_port
    if args.rdzv_endpoint:
        return parse_endpoint(args.rdzv_endpoint, port)
    return args.master_addr, port


def _output(args: argparse.Namespace) -> OutputPlan:
    shown = args.local_ranks_filter
    if shown is not None and min(shown) >= args.nproc_per_node:
        count = args.nproc_per_node
        raise ValueError(f"--local-ranks-filter: all ranks of this node are below {count}")
    return OutputPlan(args.prefix, args.log_dir, args.redirects or {}, shown)


def _patience(conf: dict[str, str]) -> float:
    return float(conf.get("join_timeout", conf.get("timeout", JOIN_SECONDS)))


def _notes(args: argparse.Namespace, conf: dict[str, str]) -> tuple[str, ...]:
    """Return lines about options that change nothing, and why."""
    ignored = [
        f"--{name.replace('_', '-')} ({why})"
        for name, why in _WITHOUT_MEANING.items()
        if getattr(args, name) is not None
    ]
    keys = sorted(conf.keys() - {"timeout", "join_timeout"})
    if keys:
        ignored.append(f"{', '.join(keys)} of --rdzv-conf (only timeout and join_timeout have one)")
    notes: tuple[str, ...] = (f"without meaning here: {', '.join(ignored)}",) if ignored else ()
    if args.as_gloo and not entry_points(group="torch.backends", name="nc10d"):
        notes += ("--as-gloo acts after `import nc10d.torch`: nc10d is not installed here",)
    return notes


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if not all(key.strip() and sign for key, sign, _ in pairs):
        raise ValueError(f"--rdzv-conf is key=value,key=value, not {text!r}")
    return [(key.strip(), value.strip()) for key, _, value in pairs]


def _signals(text: str) -> tuple[int, ...]:
    names = [
        f"SIG{word.strip().upper().removeprefix('SIG')}" for word in text.split(",") if word.strip()
    ]
    unknown = [name for name in names if name not in signal.Signals.__members__]
    if unknown:
        raise ValueError(f"--signals-to-handle: no signal is called {', '.join(unknown)}")
    numbers = tuple(signal.Signals[name] for name in names)
    if {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD} & set(numbers):
        raise ValueError("--signals-to-handle: SIGKILL, SIGSTOP and SIGCHLD cannot be passed on")
    return numbers


def _whole(text: str) -> int:
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _ranks(text: str) -> frozenset[int]:
    return frozenset(map(_whole, text.split(",")))


def _nproc(text: str) -> int:
    if text == "gpu" and not _gpus():
        raise argparse.ArgumentTypeError("no CUDA device can be used here")
    if text in ("auto", "cpu", "gpu"):
        return (text != "cpu" and _gpus()) or len(os.sched_getaffinity(0))
    if not text.isdecimal():
        message = f"{text!r} is neither a number of ranks nor auto, cpu or gpu"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def _port(text: str) -> int:
    port = _whole(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"a port is at most 65535, not {text}")
    return port


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not found >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return found


def _gpus() -> int:
    """Return the number of CUDA devices that this process may use. (No package is needed.)"""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL(os.environ.get("NC10D_CUDA_LIBRARY") or "libcuda.so.1")
    except OSError:
        return 0
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def _nnodes(text: str) -> int:
    lowest, _, highest = text.partition(":")
    if highest and highest != lowest:
        raise argparse.ArgumentTypeError("a range of nodes (an elastic job) is not supported")
    return _whole(lowest)


def _masks(text: str) -> StreamMasks:
    """Read "3", for all ranks, or "0:1,1:2", by local rank."""
    masks: dict[int | None, int] = {}
    for part in text.split(","):
        rank, colon, mask = part.rpartition(":")
        if mask not in ("0", "1", "2", "3") or (colon and not rank.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is neither 0 to 3 nor RANK:0-3,RANK:0-3")
        masks[int(rank) if colon else None] = int(mask)
    return masks


def parser() -> argparse.ArgumentParser:
    """Return the launcher's parser."""
    result = argparse.ArgumentParser(
        "nc10d-run", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False
    )
    for title, options in OPTIONS.items():
        group = result.add_argument_group(title)
        for name, how in options.items():
            group.add_argument(*_spellings(name), **how)
    # One argument of two words: only so does argparse leave a "--" to the script.
    result.add_argument(
        "words",
        nargs=argparse.PARSER,
        metavar="script",
        help="what every rank runs, and its arguments",
    )
    return result


def _spellings(names: str) -> list[str]:
    """Return the option's names, each with dashes and with underscores."""
    both = ((name, name[:2] + name[2:].replace("-", "_")) for name in names.split())
    return list(dict.fromkeys(x for pair in both for x in pair))


def _value(metavar: str, text: str, kind: Any = str, default: Any = None) -> dict[str, Any]:
    return {"metavar": metavar, "help": text, "type": kind, "default": default}


def _flag(text: str) -> dict[str, Any]:
    return {"action": "store_true", "help": text}


OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "the job": {
        "--nproc-per-node": _value(
            "N",
            "ranks on this node (default 1); gpu: one per CUDA device, cpu: one per usable core, "
            "auto: gpu if there are any, else cpu",
            _nproc,
            1,
        ),
        "--nnodes": _value("N", "nodes (default 1)", _nnodes, 1),
        "--node-rank": _value(
            "K", "which node this is, from 0 (default: in the order of their arrival)", int
        ),
        "--rdzv-endpoint": _value("HOST:PORT", "where ranks meet: on node 0"),
        "--master-addr": _value("HOST", "the same, in two options"),
        "--master-port": _value(
            "PORT", f"default: any free port; {DEFAULT_PORT} with several nodes", _port
        ),
        "--standalone": _flag("one node, any free port"),
        "--local-addr": _value("HOST", "the address at which other nodes reach this node's ranks"),
        "--max-restarts": _value(
            "N", "how often this node's ranks are restarted after a failure (default 0)", int, 0
        ),
        "--keep-going": _flag(
            "let the others go on when a rank has failed; code 0 if any ends well"
        ),
        "--as-gloo": _flag('torch.distributed gives nc10d\'s groups where the script names "gloo"'),
        "--rdzv-id": _value("NAME", "the job's name; also its folder of logs"),
        "--rdzv-backend": {
            **_value("NAME", "c10d or static: the same here", default="static"),
            "choices": ("c10d", "static"),
        },
        "--rdzv-conf": _value(
            "KEY=VALUE,...",
            f"timeout or join_timeout: seconds to wait for other nodes (default {JOIN_SECONDS:g})",
            default="",
        ),
        "--role": _value("NAME", "value of ROLE_NAME", default="default"),
        "--grace-period --shutdown-timeout": _value(
            "SECONDS",
            f"from SIGTERM to SIGKILL (default {DEFAULT_GRACE:g})",
            _seconds,
            DEFAULT_GRACE,
        ),
        "--signals-to-handle": _value(
            "NAME,...",
            "besides SIGINT, SIGTERM and SIGHUP: signals that are passed on and end the job",
            default="",
        ),
        **{
            f"--{name.replace('_', '-')}": _value("ANY", f"without meaning here: {why}")
            for name, why in _WITHOUT_MEANING.items()
        },
    },
    "output": {
        "--prefix": {
            "action": argparse.BooleanOptionalAction,
            "help": "prefix every line, or change no byte (default: a prefix for all but rank 0 on "
            "a terminal)",
        },
        "--log-dir": _value(
            "DIR", "keep output in DIR/NAME/attempt_A/rank_R/{stdout,stderr}.log as well", Path
        ),
        "-r --redirects": _value(
            "0-3", "hide 1: stdout, 2: stderr, 3: both; 0:1,1:3: by local rank", _masks
        ),
        "-t --tee": _value(
            "0-3", "keep both in files, as --log-dir does; without it in a new folder", _masks
        ),
        "--local-ranks-filter": _value("R,...", "show only these local ranks", _ranks),
    },
    "what to run": {
        "-m --module": _flag("the script is a module's name"),
        "--no-python": _flag("the script is a program of its own"),
    },
}
