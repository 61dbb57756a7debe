"""The launcher's command line: torchrun's options, as far as they apply here.

Reading options is pure (`read`: arguments -> LaunchRequest); `main` acts on the request.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nc10d.auth.token import VALUE, job_token, new_token, require_token
from nc10d.base.signal_errors import raised_here
from nc10d.errors import AuthError, StoreError
from nc10d.run.environment import LaunchedJob
from nc10d.run.output import OutputError
from nc10d.run.rank_output import OutputPlan

DEFAULT_PORT = 29500
DEFAULT_GRACE = 5.0
NOT_RUNNABLE = 127
BROKEN_PIPE = 141

_DESCRIPTION = "Start N ranks of a script on this machine and watch over them."
_EPILOG = """
On a terminal rank 0 passes through unprefixed, so that its progress bar looks right; every
other line is prefixed by "[rank N]". The exit code is that of the first rank that failed
(128 + the number for a signal), 130 after Ctrl-C. Ranks read no input, except that the first
one inherits an input that is not a terminal. Options may be spelled with underscores too.
"""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The parsed command line. A port of 0 means any free port."""

    job: LaunchedJob
    command: tuple[str, ...]
    output: OutputPlan
    grace: float
    standalone: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher with `argv` (default: the process's arguments); return its exit code.

    Blocks until every rank has ended. Wrong options end the process with code 2.
    """
    from nc10d.run import agent

    open_standard_descriptors()
    request = read(sys.argv[1:] if argv is None else argv)
    job = request.job
    try:
        ensure_token(request, os.environ)
        with hosted_store(job) as port:
            job = replace(job, master_port=port)
            return agent.run(job, request.command, request.output, request.grace)
    except raised_here(BrokenPipeError):
        # The reader of our output has left. Python would complain again when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BROKEN_PIPE
    except OutputError as error:
        agent.write_message(f"nc10d-run: {error}\n")
        return 1
    except raised_here(OSError) as error:
        agent.write_message(f"nc10d-run: cannot start the ranks: {error}\n")
        return NOT_RUNNABLE
    except raised_here(AuthError) as error:
        agent.write_message(f"nc10d-run: {error}\n")
        return 1
    except raised_here(StoreError) as error:
        agent.write_message(f"nc10d-run: cannot host the store: {error}\n")
        return 1


@contextlib.contextmanager
def hosted_store(job: LaunchedJob) -> Iterator[int]:
    """Yield the port where ranks meet; on node 0, a store listens there until the block ends.

    The launcher outlives every rank and every restart, so its store does too, and all ranks are
    clients alike. StoreError if the port is taken.
    """
    if job.node_rank != 0:
        yield job.master_port
        return
    from nc10d.store import TCPStore

    store = TCPStore(job.master_addr, job.master_port, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        store.close()


def open_standard_descriptors() -> None:
    """Open /dev/null in place of closed standard descriptors.

    A pipe or socket with such a number would be taken for the ranks' input or output.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  (for the process's life)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def ensure_token(request: LaunchRequest, environment: MutableMapping[str, str]) -> None:
    """Put a new token into `environment` for a standalone job that has none.

    AuthError if the job needs a token that only the user can provide.
    """
    if request.standalone and job_token(environment) is None:
        environment[VALUE] = new_token()  # for the store here and for the ranks, which inherit it
    require_token(request.job.master_addr, "the store of a job of several nodes", environment)


def read(argv: Sequence[str]) -> LaunchRequest:
    """Return the request that `argv` makes; SystemExit with usage if it makes no sense."""
    options = parser()
    args = options.parse_args(argv)
    try:
        job, output = _job(args), _output(args)
        return LaunchRequest(job, command(args), output, args.grace_period, args.standalone)
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
    """Return the command of a rank. Python runs unbuffered, so that output is timely."""
    if args.no_python and args.module:
        raise ValueError("--no-python and --module exclude each other")
    python = () if args.no_python else (sys.executable, "-u")
    return (*python, *(["-m"] if args.module else []), args.script, *args.arguments)


def _job(args: argparse.Namespace) -> LaunchedJob:
    several = args.nnodes > 1
    if several and args.standalone:
        raise ValueError("--standalone is for one node")
    if several and args.node_rank is None:
        raise ValueError("several nodes need --node-rank on each of them")
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
    if args.redirects and args.log_dir is None:
        raise ValueError("--redirects needs --log-dir")
    file_only = (bool(args.redirects & 1), bool(args.redirects & 2))
    return OutputPlan(args.prefix, args.log_dir, file_only)


def _nproc(text: str) -> int:
    if text in ("auto", "cpu"):
        return len(os.sched_getaffinity(0))
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number, nor auto or cpu")
    return int(text)


def _nnodes(text: str) -> int:
    lowest, _, highest = text.partition(":")
    if highest and highest != lowest:
        raise argparse.ArgumentTypeError("a range of nodes (an elastic job) is not supported")
    return int(lowest)


def parser() -> argparse.ArgumentParser:
    """Return the launcher's parser."""
    result = argparse.ArgumentParser(
        "nc10d-run", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False
    )
    for title, options in OPTIONS.items():
        group = result.add_argument_group(title)
        for name, how in options.items():
            group.add_argument(*_spellings(name), **how)
    result.add_argument("script", help="what every rank runs")
    result.add_argument("arguments", nargs=argparse.REMAINDER, help="what it is given")
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
            "N", "ranks on each node (default 1); auto or cpu: one per usable core", _nproc, 1
        ),
        "--nnodes": _value("N", "nodes (default 1)", _nnodes, 1),
        "--node-rank": _value("K", "which node this is, from 0", int),
        "--rdzv-endpoint": _value("HOST:PORT", "where ranks meet: on node 0"),
        "--master-addr": _value("HOST", "the same, in two options"),
        "--master-port": _value(
            "PORT", f"default: any free port; {DEFAULT_PORT} with several nodes", int
        ),
        "--standalone": _flag("one node, free port, and a token"),
        "--max-restarts": _value(
            "N", "how often this node's ranks are restarted after a failure (default 0)", int, 0
        ),
        "--keep-going": _flag(
            "let the others go on when a rank has failed; code 0 if any ends well"
        ),
        "--rdzv-id": _value("NAME", "the job's name; also its folder of logs"),
        "--rdzv-backend": _value("ANY", "accepted, as in torchrun; there is one way"),
        "--role": _value("NAME", "value of ROLE_NAME", default="default"),
        "--grace-period": _value(
            "SECONDS", f"from SIGTERM to SIGKILL (default {DEFAULT_GRACE:g})", float, DEFAULT_GRACE
        ),
    },
    "output": {
        "--prefix": {
            "action": argparse.BooleanOptionalAction,
            "help": "prefix every line, or none (default: all but rank 0's on a terminal)",
        },
        "--log-dir": _value(
            "DIR", "keep output in DIR/NAME/attempt_A/rank_R/{stdout,stderr}.log as well", Path
        ),
        "-r --redirects": {
            **_value(
                "0-3", "with --log-dir, into the files only: 1 stdout, 2 stderr, 3 both", int, 0
            ),
            "choices": range(4),
        },
    },
    "what to run": {
        "-m --module": _flag("the script is a module's name"),
        "--no-python": _flag("the script is a program of its own"),
    },
}
