"""Ranks for tests that a launcher starts: mpirun, srun, or any command that runs one a rank.

    launcher = Launcher(["mpirun", "-n", "{size}"])
    with launcher.ranks(3, "mpi") as ranks:
        sums = ranks.run(add_up, arrays)

The launcher's processes call init_process_group without rank and size, which they must learn from
their environment, connect to a Unix socket of their owner's (so all are on one host), and are then
ranks like those of `nc10d.testing.ranks`. Functions and arrays must pickle.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nc10d.base.deadline import Deadline
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import init_process_group
from nc10d.testing.rank_workers import STOP, Outcome, RankWorker, serve
from nc10d.testing.ranks import Ranks

SLICE = 0.1
"""Seconds between looks whether a launcher whose ranks have not come is still there."""
EXIT_SECONDS = 10.0
"""Seconds that a launcher has to end by itself once its ranks have been asked to."""


class Launcher:
    """A command that starts ranks: words in which "{size}" stands for how many.

    `environment` is added to that of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self.command = list(command)
        self.environment = dict(environment or {})

    def ranks(self, world_size: int, backend: str, timeout: float = 30.0) -> Ranks:
        """Return `world_size` ranks, started at the first run; `timeout` as in Ranks."""
        return LaunchedRanks(self, world_size, backend, timeout)

    def start(self, size: int, *arguments: str) -> LauncherProcess:
        """Start `size` processes that run this module with `arguments`."""
        words = [word.format(size=size) for word in self.command]
        return LauncherProcess(
            [*words, sys.executable, "-m", __name__, *arguments], self.environment
        )


class LaunchedRanks(Ranks):
    """Ranks that a launcher starts anew whenever there are none."""

    def __init__(self, launcher: Launcher, world_size: int, backend: str, timeout: float) -> None:
        super().__init__(world_size, "processes", backend, timeout)
        self._launcher = launcher

    def _start(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="nc10d-"))
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder / "owner"))
                listener.listen(self.world_size)
                job = self._launcher.start(self.world_size, str(folder / "owner"))
                self._members = self._meet(job, listener)
        finally:
            shutil.rmtree(folder)

    def _meet(self, job: LauncherProcess, listener: socket.socket) -> list[RankWorker]:
        """Let all ranks come and form their group; return them by rank."""
        deadline = Deadline.after(self._limit)
        try:
            found = [LaunchedWorker(job, job.accept(listener, deadline)) for _ in self._numbers()]
            for member in found:
                member.give(self._options)
            for member in found:
                member.answer(deadline)
            for member in found:
                member.give((_rank_of, ()))
            by_rank = {member.answer(deadline): member for member in found}
            return [by_rank[rank] for rank in self._numbers()]
        except BaseException:
            job.end(0.0)
            raise

    def _numbers(self) -> range:
        return range(self.world_size)


class LauncherProcess:
    """A launcher at work, and what it and its ranks have written."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def accept(self, listener: socket.socket, deadline: Deadline) -> Connection:
        """Wait for one rank; RuntimeError with the job's output if it ends, or is late."""
        while self._process.poll() is None and not deadline.expired():
            listener.settimeout(deadline.slice(SLICE))
            with contextlib.suppress(TimeoutError):
                return Connection(listener.accept()[0].detach())
        raise RuntimeError(f"the ranks did not come; the launcher {self.story()}")

    def story(self) -> str:
        """Say how the launcher ended, and what was written last."""
        code = self._process.poll()
        state = "is still running" if code is None else f"ended with code {code}"
        self._output.seek(0)
        return f"{state} and wrote:\n{self._output.read().decode(errors='replace')[-4000:]}"

    def end(self, patience: float = EXIT_SECONDS) -> None:
        """Wait until the launcher has ended; kill it and its session after `patience` seconds."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            # Launchers pass SIGTERM on; SIGKILL is for those that do not.
            for which in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, which)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(2.0)
        self._output.close()


class LaunchedWorker:
    """A rank of a job."""

    def __init__(self, job: LauncherProcess, pipe: Connection) -> None:
        self._job = job
        self._pipe = pipe

    def give(self, task: Any) -> None:
        """Hand over a function and its arguments; both must pickle."""
        self._pipe.send(task)

    def take(self, timeout: float) -> Outcome | None:
        """Wait for an outcome; a rank that has gone is one."""
        try:
            return self._pipe.recv() if self._pipe.poll(timeout) else None
        except (EOFError, ConnectionResetError):
            return False, RuntimeError(f"the rank has ended; the launcher {self._job.story()}")

    def answer(self, deadline: Deadline) -> Any:
        """Wait for an outcome, and return what the rank did or raise what it raised."""
        outcome = self.take(deadline.remaining())
        if outcome is None:
            raise TimeoutError(f"a rank did not answer; the launcher {self._job.story()}")
        if not outcome[0]:
            raise outcome[1]
        return outcome[1]

    def end(self) -> None:
        """Ask the rank to end, and wait until its launcher has."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send(STOP)
        self._job.end()
        self._pipe.close()

    def drop(self) -> None:
        """End the whole job: a rank alone can't be given up."""
        self._job.end(0.0)
        self._pipe.close()


def _rank_of(group: ProcessGroup) -> int:
    return group.rank


def main(path: str) -> None:
    """Be a rank of the owner that listens at `path`."""
    with socket.socket(socket.AF_UNIX) as owner:
        owner.connect(path)
        pipe = Connection(owner.detach())
    options = pipe.recv()
    serve(lambda: init_process_group(**options), pipe.recv, pipe.send)


if __name__ == "__main__":
    main(sys.argv[1])
