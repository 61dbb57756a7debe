"""From the output plan to a rank's descriptors: pipes, files, or a separate terminal.

The user at a terminal sees rank 0's progress bar as if rank 0 ran alone, and sees for every other
line from which rank it comes. To this end rank 0 writes to a pseudo-terminal and passes without a
prefix; the lines of other ranks are prefixed. If the output goes to a file or a pipe, all ranks'
lines are prefixed. `OutputPlan.prefixed` forces either.

Progress bars ask whether they write to a terminal, and how wide it is. The pseudo-terminal has
the size of the user's terminal and translates nothing: the launcher reads the very bytes that
rank 0 writes.
"""

from __future__ import annotations

import os
import termios
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nc10d.run.environment import LaunchedJob
from nc10d.run.output import OutputError, OutputStream, Screen, Sink, line_prefix
from nc10d.run.signals import SignalPipe

StreamMasks = Mapping[int | None, int]
"""By local rank, None for all others: 1 for stdout, 2 for stderr, 3 for both."""


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The ranks' output: destination and form.

    `prefixed`: True for every rank, False for none, None for all except a rank 0 on a terminal.
    False changes no byte. Output goes line by line, so that two ranks' lines never mix; but rank
    0's output on a terminal, and a single rank's without a prefix, passes at once.
    `log_dir`: the folder of log_dir/RUN_ID/attempt_A/rank_R/{stdout,stderr}.log; None for no files.
    `file_only`: the streams that go to the files and not to the screen. `shown`: the local ranks
    whose output is shown; None for all.
    """

    prefixed: bool | None = None
    log_dir: Path | None = None
    file_only: StreamMasks = field(default_factory=dict)
    shown: frozenset[int] | None = None

    def hidden(self, local_rank: int) -> tuple[bool, bool]:
        """Return whether a rank's (stdout, stderr) are not shown."""
        mask = self.file_only.get(local_rank, self.file_only.get(None, 0))
        if self.shown is not None and local_rank not in self.shown:
            mask = 3
        return bool(mask & 1), bool(mask & 2)


@dataclass(slots=True)
class RankOutput:
    """A rank's two streams, and the ends that the rank inherits.

    `terminals` are pairs (the user's terminal, the launcher's end of the rank's terminal).
    """

    stdout: OutputStream
    stderr: OutputStream
    inherit: tuple[int, int]
    terminals: list[tuple[int, int]] = field(default_factory=list)

    def started(self) -> None:
        """Close the rank's ends in the launcher, so that the rank's exit ends the streams."""
        for fd in self.inherit:
            os.close(fd)

    def drain(self) -> None:
        """Pass on everything that the rank has written; never blocks on the rank."""
        self.stdout.drain()
        self.stderr.drain()

    def close(self) -> None:
        """Close the launcher's descriptors; idempotent."""
        self.stdout.close()
        self.stderr.close()

    def resize(self) -> bool:
        """Give the rank's terminals the size of the user's; return whether the rank has any."""
        for user, launcher_end in self.terminals:
            copy_size(user, launcher_end)
        return bool(self.terminals)


class OutputWiring:
    """Makes each rank's output by the plan; owns the state of the user's screen.

    `failures` grows when output cannot be written.
    """

    def __init__(
        self, plan: OutputPlan, job: LaunchedJob, restart: int, signals: SignalPipe
    ) -> None:
        self._plan = plan
        self._job = job
        self._restart = restart
        self.failures: list[OutputError] = []
        terminal = Screen()  # a terminal's unfinished line does not concern a file beside it
        self._sinks = [Sink(fd, terminal if os.isatty(fd) else Screen(), signals) for fd in (1, 2)]

    def connect(self, local_rank: int) -> RankOutput:
        """Open a rank's output; OutputError if the files cannot be made."""
        try:
            return self._connect(local_rank)
        except OSError as error:
            raise OutputError(f"cannot write logs: {error}") from error

    def _connect(self, local_rank: int) -> RankOutput:
        rank = self._job.global_rank(local_rank)
        files = log_files(self._plan, self._job, self._restart, rank) or (None, None)
        terminals: list[tuple[int, int]] = []
        streams: list[OutputStream] = []
        inherit: list[int] = []
        prefix: bytes | None = line_prefix(rank)
        if self._plan.prefixed is False:
            prefix = b"" if self._job.nproc > 1 else None
        for sink, file, hidden in zip(
            self._sinks, files, self._plan.hidden(local_rank), strict=True
        ):
            if rank == 0 and not self._plan.prefixed and not hidden and os.isatty(sink.fd):
                launcher_end, rank_end = open_terminal(sink.fd)
                terminals.append((sink.fd, launcher_end))
                streams.append(OutputStream(launcher_end, sink, None, file, self.failures))
            else:
                launcher_end, rank_end = os.pipe()
                shown = None if hidden else sink
                streams.append(OutputStream(launcher_end, shown, prefix, file, self.failures))
            inherit.append(rank_end)
        return RankOutput(streams[0], streams[1], (inherit[0], inherit[1]), terminals)


def log_files(
    plan: OutputPlan, job: LaunchedJob, restart: int, rank: int
) -> tuple[Path, Path] | None:
    """Make the folder of a rank's logs; return the paths of stdout and stderr, None for no logs."""
    if plan.log_dir is None:
        return None
    folder = plan.log_dir / job.run_id / f"attempt_{restart}" / f"rank_{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "stdout.log", folder / "stderr.log"


def open_terminal(like: int) -> tuple[int, int]:
    """Return (launcher's end, rank's end) of a new pseudo-terminal with the size of `like`."""
    launcher_end, rank_end = os.openpty()
    mode = termios.tcgetattr(rank_end)
    mode[1] &= ~termios.OPOST  # no "\n" -> "\r\n": the user's terminal does that once
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(rank_end, termios.TCSANOW, mode)
    copy_size(like, rank_end)
    return launcher_end, rank_end


def copy_size(like: int, terminal: int) -> None:
    """Give `terminal` the rows and columns of `like`."""
    termios.tcsetwinsize(terminal, termios.tcgetwinsize(like))
