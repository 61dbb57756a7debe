"""Jobs whose ranks are on hosts of their own: network namespaces.

SIGTERM and Ctrl-C end a job's ranks and take the hosts away; a second one waits until that is done.
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

from benchmarks.compare.plain import is_plain
from benchmarks.compare.starters import Rows
from nc10d.auth.token import VALUE, new_token
from nc10d.testing.networks import DEVICE, Network, network

PORT = "29500"
TERMINATED = 128 + signal.SIGTERM
"""What a shell reports for a command that SIGTERM ended."""
_ENDING = {signal.SIGTERM, signal.SIGINT}


@contextlib.contextmanager
def hosts_of_their_own(count: int) -> Iterator[Network]:
    """Make hosts that are taken away again also if a signal ends this process.

    For a main thread. UnsupportedPlatform where hosts can't be made.
    """
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        with _undisturbed(), network(count) as net, _disturbed():
            yield net
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(TERMINATED)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let signals that end a process wait, also in children: a terminal's Ctrl-C reaches them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _disturbed() -> Iterator[None]:
    """Amid an `_undisturbed`, let them come."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)


def words_of(net: Network, library: str) -> list[str]:
    """Return the module that measures a library, and its first arguments."""
    if is_plain(library):
        addresses = [net.address(host) for host in range(len(net.names))]
        return ["benchmarks.compare.plain", library, json.dumps(addresses)]
    return ["benchmarks.compare.peers", library]


def run_apart(net: Network, mates: int, words: Sequence[str], limit: float) -> Rows:
    """Run a module with arguments on `mates` ranks of each host; return the rows of rank 0.

    The file to write them to is given as the last argument. Blocks until the job ends, at most
    `limit` seconds; RuntimeError with a rank's last words if one fails.
    """
    python = [sys.executable, "-m"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        out = Path(folder) / "rows.json"
        token = new_token()
        ranks = []
        for rank in range(mates * len(net.names)):
            command = [*net.inside(rank // mates), *python, *words, str(out)]
            process = _started(command, dict(_variables(net, mates, rank, token)), started)
            ranks.append(process)
        for process in ranks:
            _, told = process.communicate(timeout=limit)
            if process.returncode:
                raise RuntimeError(f"{words[0]}: {told[-1500:]}")
        rows: Rows = json.loads(out.read_text())
        return rows


def _started(
    command: Sequence[str], variables: Mapping[str, str], stack: contextlib.ExitStack
) -> subprocess.Popen[str]:
    """Start a rank that ends with the stack. A signal amid this would leave it to nobody."""
    with _undisturbed():
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


def _variables(net: Network, mates: int, rank: int, token: str) -> Iterator[tuple[str, str]]:
    """Yield what torchrun would tell a rank, and each library's name of the device."""
    yield from (("RANK", str(rank)), ("WORLD_SIZE", str(mates * len(net.names))))
    yield from (("LOCAL_RANK", str(rank % mates)), ("LOCAL_WORLD_SIZE", str(mates)))
    yield from (("MASTER_ADDR", net.address(0)), ("MASTER_PORT", PORT))
    yield from (("NC10D_SOCKET_IFNAME", DEVICE), ("GLOO_SOCKET_IFNAME", DEVICE), (VALUE, token))
