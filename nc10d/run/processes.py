"""The ranks of one attempt as processes: all in one process group, with a warden to lead it.

The warden is a shell that ignores signals, leads the group, and waits for the end of a pipe that
only the launcher holds. Should the launcher be killed outright, the pipe ends and the warden ends
the group: ranks, their children, itself. In every other case the launcher does that. A group of
their own also keeps the terminal's Ctrl-C away from the ranks: the launcher passes it on, once.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Ignored signals are ignored from before the first read; "up" says that the traps are set.
_WARDEN = "trap '' INT TERM HUP QUIT; echo up; read _; kill -s TERM 0; sleep 2; kill -s KILL 0"


@dataclass(slots=True)
class RankProcess:
    """One rank's process, and a descriptor that is readable once it has ended."""

    process: subprocess.Popen[bytes]
    pidfd: int

    @property
    def pid(self) -> int:
        """The rank's process id."""
        return self.process.pid

    def reap(self) -> int:
        """Wait for the rank's end, give its descriptor back, return subprocess's status."""
        os.close(self.pidfd)
        return self.process.wait()

    def send(self, number: int) -> None:
        """Send a signal; does nothing once the rank has been reaped."""
        self.process.send_signal(number)


class RankProcesses:
    """A process group that ends with the launcher; `close` kills what still lives in it."""

    def __init__(self) -> None:
        self._warden = subprocess.Popen(
            ["/bin/sh", "-c", _WARDEN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        assert self._warden.stdout is not None
        self._warden.stdout.readline()

    def spawn(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdin: int | None,
        stdout: int,
        stderr: int,
    ) -> RankProcess:
        """Start one rank in the group; OSError if `command` cannot be run."""
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            process_group=self._warden.pid,
        )
        return RankProcess(process, os.pidfd_open(process.pid))

    def send(self, number: int) -> None:
        """Send a signal to everything in the group."""
        # The warden is our child and not yet reaped, so its id cannot belong to anybody else.
        os.killpg(self._warden.pid, number)

    def close(self) -> None:
        """Kill whatever still lives in the group; idempotent."""
        if self._warden.returncode is None:
            self.send(signal.SIGKILL)
            self._warden.communicate()
