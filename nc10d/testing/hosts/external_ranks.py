"""Ranks for tests that a launcher starts: mpirun, srun, or another command that starts processes.

    launcher = Launcher(["mpirun", "-n", "{size}"])
    with launcher.ranks(3, "mpi") as ranks:
        sums = ranks.run(add_up, arrays)

The launcher's processes must learn rank and size from their environment: they call
init_process_group without them. They connect to a Unix socket of their owner, so all share a
host, and then work like the ranks of `nc10d.testing.ranks`. Functions and arrays must pickle.
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
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nc10d.base.deadline import Deadline
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import init_process_group
from nc10d.testing.rank_workers import PipeWorker, RankWorker, send_outcome, serve
from nc10d.testing.ranks import Ranks

POLL_SECONDS = 0.1
"""Seconds between checks that the launcher still runs, while ranks have not come."""
EXIT_SECONDS = 10.0
"""Seconds that a launcher has to exit once all ranks have been asked to end."""


class Launcher:
    """A command that starts ranks: "{size}" is their number; `environment` is added to this one."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self.command = list(command)
        self.environment = dict(environment or {})

    def ranks(self, world_size: int, backend: str, timeout: float = 30.0) -> Ranks:
        """Return `world_size` ranks, started at the first run; `timeout` as in Ranks."""
        return LaunchedRanks(self, world_size, backend, timeout)

    def start(self, size: int, *arguments: str) -> LauncherProcess:
        """Start `size` processes that run this module with `arguments`."""
        words = [word.format(size=size) for word in self.command]
        command = [*words, sys.executable, "-m", __name__, *arguments]
        return LauncherProcess(command, self.environment)


class LaunchedRanks(Ranks):
    """Ranks that a launcher starts whenever there are none."""

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
                self._workers = self._meet(job, listener)
        finally:
            shutil.rmtree(folder)

    def _meet(self, job: LauncherProcess, listener: socket.socket) -> list[RankWorker]:
        """Accept all ranks and let them form their group; return the workers by rank."""
        deadline = Deadline.after(self._limit)
        try:
            pipes = (job.accept(listener, deadline) for _ in range(self.world_size))
            workers = [LaunchedWorker(job, pipe) for pipe in pipes]
            for worker in workers:
                worker.submit(self._options)
            for worker in workers:
                worker.answer(deadline)
            for worker in workers:
                worker.submit((rank_of, ()))
            by_rank = {worker.answer(deadline): worker for worker in workers}
            return [by_rank[rank] for rank in range(self.world_size)]
        except BaseException:
            job.end(0.0)
            raise


class LauncherProcess:
    """A running launcher, and the output of the launcher and the ranks."""

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
        """Wait for a rank; RuntimeError with the job's output if the job ends, or is late."""
        while self._process.poll() is None and not deadline.expired():
            listener.settimeout(deadline.slice(POLL_SECONDS))
            with contextlib.suppress(TimeoutError):
                return Connection(listener.accept()[0].detach())
        raise RuntimeError(f"the ranks did not come; the launcher {self.story()}")

    def story(self) -> str:
        """Return a text about the launcher's state, with the output's end."""
        code = self._process.poll()
        state = "is still running" if code is None else f"ended with code {code}"
        self._output.seek(0)
        return f"{state} and wrote:\n{self._output.read().decode(errors='replace')[-4000:]}"

    def end(self, patience: float = EXIT_SECONDS) -> None:
        """Wait until the launcher has ended; kill it and its session after `patience` seconds."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            # Launchers pass SIGTERM on to their ranks. SIGKILL is for a launcher that does not.
            for which in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, which)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(2.0)
        self._output.close()


class LaunchedWorker(PipeWorker):
    """A rank that a launcher has started, as seen by the rank's owner."""

    _lacks_main = True

    def __init__(self, job: LauncherProcess, pipe: Connection) -> None:
        self._job = job
        self._pipe = pipe

    def _ending(self) -> str:
        return f"the rank has ended; the launcher {self._job.story()}"

    def answer(self, deadline: Deadline) -> Any:
        """Wait for an outcome; return the rank's result or raise the rank's error."""
        outcome = self.result(deadline.remaining())
        if outcome is None:
            raise TimeoutError(f"a rank did not answer; the launcher {self._job.story()}")
        if not outcome.done:
            raise outcome.value
        return outcome.value

    def end(self) -> None:
        """Ask the rank to end, and wait until the launcher has."""
        self._ask_to_end()
        self._job.end()
        self._pipe.close()

    def abandon(self) -> None:
        """End the whole job: a launcher's ranks can't be ended singly."""
        self._job.end(0.0)
        self._pipe.close()


def rank_of(group: ProcessGroup) -> int:
    """Return the rank; a function that can be sent to a process."""
    return group.rank


def main(path: str) -> None:
    """Run a rank for the owner that listens at `path`."""
    with socket.socket(socket.AF_UNIX) as owner:
        owner.connect(path)
        pipe = Connection(owner.detach())
    options = pipe.recv()
    serve(lambda: init_process_group(**options), pipe.recv, partial(send_outcome, pipe))


if __name__ == "__main__":
    main(sys.argv[1])
