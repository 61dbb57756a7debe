"""Starts a job whose ranks are on separate hosts: network namespaces of this machine.

SIGTERM and Ctrl-C end a job's ranks and remove the hosts; a second signal waits for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from benchmarks.libraries.jobs import RANK, Rows
from benchmarks.libraries.tcp import ADDRESSES
from nc10d.auth.token import VALUE, new_token
from nc10d.testing.hosts.namespaces import DEVICE, Network, network

PORT = "29500"
TERMINATED = 128 + signal.SIGTERM
"""A shell's exit code for a command that SIGTERM ended."""
_ENDING = {signal.SIGTERM, signal.SIGINT}


@contextlib.contextmanager
def separate_hosts(count: int) -> Iterator[Network]:
    """Make hosts that are removed again, also if a signal ends this process.

    For the main thread only. UnsupportedPlatform where hosts can't be made.
    """
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        with _signals_blocked(), network(count) as net, _signals_unblocked():
            yield net
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(TERMINATED)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals that end a process, also in children: a terminal's Ctrl-C reaches them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _signals_unblocked() -> Iterator[None]:
    """Unblock them for a while."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)


def run_on_hosts(
    net: Network,
    local_ranks: int,
    library: str,
    module: str,
    arguments: Sequence[object],
    limit: float,
) -> Rows:
    """Run `module.rows(library, *arguments)` on `local_ranks` of each host; return rank 0's rows.

    Blocks until the job ends, at most `limit` seconds. RuntimeError with the end of a rank's error
    output if it fails.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        out = Path(folder) / "rows.json"
        words = [sys.executable, "-m", RANK, module, library, json.dumps(arguments), str(out)]
        token = new_token()
        ranks = []
        for rank in range(local_ranks * len(net.names)):
            command = [*net.inside(rank // local_ranks), *words]
            variables = dict(_variables(net, local_ranks, rank, token))
            ranks.append(_started(command, variables, started))
        for process in ranks:
            _, errors = process.communicate(timeout=limit)
            if process.returncode:
                raise RuntimeError(f"{library}: {errors[-1500:]}")
        rows: Rows = json.loads(out.read_text())
        return rows


def _started(
    command: Sequence[str], variables: Mapping[str, str], stack: contextlib.ExitStack
) -> subprocess.Popen[str]:
    """Start a rank that ends with the stack; a signal in between would leave it running."""
    with _signals_blocked():
        process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
            preexec_fn=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, _ENDING),
        )
        stack.callback(_end, process)
    return process


def _end(rank: subprocess.Popen[str]) -> None:
    rank.kill()
    rank.communicate()


def _variables(net: Network, local_ranks: int, rank: int, token: str) -> Iterator[tuple[str, str]]:
    """Yield torchrun's variables for a rank, and each library's name of the device."""
    yield from (("RANK", str(rank)), ("WORLD_SIZE", str(local_ranks * len(net.names))))
    yield from (("LOCAL_RANK", str(rank % local_ranks)), ("LOCAL_WORLD_SIZE", str(local_ranks)))
    yield from (("MASTER_ADDR", net.address(0)), ("MASTER_PORT", PORT))
    yield from (("NC10D_SOCKET_IFNAME", DEVICE), ("GLOO_SOCKET_IFNAME", DEVICE), (VALUE, token))
    yield ADDRESSES, ",".join(map(net.address, range(len(net.names))))
