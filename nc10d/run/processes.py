"""The ranks of an attempt as processes: all in one process group, led by a guard process.

The guard is a shell that ignores signals and waits for the end of a pipe held by the launcher
alone. If the launcher is killed outright, the pipe ends and the guard ends the group: ranks, their
children, itself. In every other case the launcher ends the group. The separate group also keeps
the terminal's Ctrl-C away from the ranks: the launcher passes it on, once.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nc10d.errors import UnsupportedPlatform

# The guard writes "up" once its traps are set.
_GUARD = "trap '' INT TERM HUP QUIT; echo up; read _; kill -s TERM 0; sleep 2; kill -s KILL 0"


@dataclass(slots=True)
class RankProcess:
    """A rank's process, and a descriptor that is readable once the process has ended."""

    process: subprocess.Popen[bytes]
    pidfd: int

    @property
    def pid(self) -> int:
        """The rank's process id."""
        return self.process.pid

    def reap(self) -> int:
        """Wait for the rank's end and close the descriptor; return subprocess's status."""
        os.close(self.pidfd)
        return self.process.wait()

    def send(self, number: int) -> None:
        """Send a signal; does nothing once the rank has been reaped."""
        self.process.send_signal(number)


def _require_pidfd() -> None:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        raise UnsupportedPlatform(
            f"the launcher needs Linux 5.3 or newer, and a sandbox that allows pidfd_open: {error}"
        ) from error


class RankProcesses:
    """A process group that ends with the launcher; `close` kills the rest.

    UnsupportedPlatform if the kernel cannot report a process's end.
    """

    def __init__(self) -> None:
        _require_pidfd()
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        assert self._guard.stdout is not None
        self._guard.stdout.readline()

    def spawn(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdin: int | None,
        stdout: int,
        stderr: int,
    ) -> RankProcess:
        """Start a rank in the group; OSError if `command` cannot be run."""
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            process_group=self._guard.pid,
        )
        return RankProcess(process, os.pidfd_open(process.pid))

    def send(self, number: int) -> None:
        """Send a signal to every process in the group."""
        # The guard is our child and not yet reaped, so the id cannot belong to another process.
        os.killpg(self._guard.pid, number)

    def close(self) -> None:
        """Kill every process left in the group; idempotent."""
        if self._guard.returncode is None:
            self.send(signal.SIGKILL)
            self._guard.communicate()
