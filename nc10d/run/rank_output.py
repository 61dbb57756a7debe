"""From the output plan to one rank's descriptors: pipes, files, or a terminal of its own.

A user who starts a job on a terminal wants to see rank 0's progress bar as if it ran alone, and
to know of every other line whose it is. So rank 0 writes to a pseudo-terminal there, and passes
through without a prefix; everything else, and everyone when the output goes to a file or a pipe,
is prefixed. Both can be forced.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from nc10d.run.environment import LaunchedJob
from nc10d.run.output import OutputStream, Screen, Sink, prefix
from nc10d.run.signals import SignalPipe
from nc10d.run.terminal import copy_size, open_terminal


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What becomes of the ranks' output.

    `prefixed`: True for every rank, False for none, None for all but a rank 0 on a terminal.
    Unless it is True, that one passes as it is; all others go line by line.
    `log_dir`: where files are kept, as log_dir/RUN_ID/attempt_A/rank_R/{stdout,stderr}.log.
    `file_only`: whether (stdout, stderr) go to the files and not to the screen.
    """

    prefixed: bool | None = None
    log_dir: Path | None = None
    file_only: tuple[bool, bool] = (False, False)


@dataclass(slots=True)
class RankOutput:
    """One rank's two streams, and the ends of them that the rank is to inherit."""

    stdout: OutputStream
    stderr: OutputStream
    inherit: tuple[int, int]
    terminals: list[tuple[int, int]] = field(default_factory=list)

    def started(self) -> None:
        """Let go of the rank's ends, so that its exit ends the streams."""
        for fd in self.inherit:
            os.close(fd)

    def drain(self) -> None:
        """Carry on everything the rank has written."""
        self.stdout.drain()
        self.stderr.drain()

    def hush(self) -> None:
        """Leave out what an interrupted import says from now on."""
        self.stderr.hush()

    def close(self) -> None:
        """Give the descriptors back."""
        self.stdout.close()
        self.stderr.close()

    def resized(self) -> bool:
        """Give the rank's terminals the user's new size; say whether it has any."""
        for user, ours in self.terminals:
            copy_size(user, ours)
        return bool(self.terminals)


def log_files(
    plan: OutputPlan, job: LaunchedJob, restart: int, rank: int
) -> tuple[Path, Path] | None:
    """Return where this rank's stdout and stderr are kept, making the folder; None if nowhere."""
    if plan.log_dir is None:
        return None
    folder = plan.log_dir / job.run_id / f"attempt_{restart}" / f"rank_{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "stdout.log", folder / "stderr.log"


class OutputWiring:
    """Makes each rank's output by the plan; knows the user's screen."""

    def __init__(
        self, plan: OutputPlan, job: LaunchedJob, restart: int, signals: SignalPipe
    ) -> None:
        self._plan = plan
        self._job = job
        self._restart = restart
        screen = Screen()
        self._sinks = (Sink(1, screen, signals), Sink(2, screen, signals))

    def connect(self, local_rank: int) -> RankOutput:
        """Open one rank's output."""
        rank = self._job.global_rank(local_rank)
        files = log_files(self._plan, self._job, self._restart, rank) or (None, None)
        terminals: list[tuple[int, int]] = []
        streams: list[OutputStream] = []
        inherit: list[int] = []
        for sink, file, hidden in zip(self._sinks, files, self._plan.file_only, strict=True):
            mark = b"" if self._plan.prefixed is False else prefix(rank)
            if rank == 0 and not self._plan.prefixed and not hidden and os.isatty(sink.fd):
                ours, theirs = open_terminal(sink.fd)
                terminals.append((sink.fd, ours))
                streams.append(OutputStream(ours, sink, None, file))
            else:
                ours, theirs = os.pipe()
                streams.append(OutputStream(ours, None if hidden else sink, mark, file))
            inherit.append(theirs)
        return RankOutput(streams[0], streams[1], (inherit[0], inherit[1]), terminals)
