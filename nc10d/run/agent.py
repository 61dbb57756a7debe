"""The agent: runs the ranks of this node until all have ended, and decides the exit code.

One thread, one loop, waiting for four kinds of events: output, ends of ranks, signals to the
launcher, and the next step of an ending. Nothing polls. An `JobAttempt` is one life of the local
ranks; a failed one is followed by another while restarts are left.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nc10d.run import report, shutdown
from nc10d.run.environment import LaunchedJob, rank_environment
from nc10d.run.output import OutputStream
from nc10d.run.processes import RankProcess, RankProcesses
from nc10d.run.rank_output import OutputPlan, OutputWiring, RankOutput
from nc10d.run.signals import SignalPipe


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended: by a signal to the launcher, by a failed rank, or well."""

    interrupted_by: int | None = None
    failure: report.Exit | None = None

    @property
    def exit_code(self) -> int:
        """The launcher's exit code."""
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        return self.failure.exit_code if self.failure else 0

    @property
    def may_restart(self) -> bool:
        """Say whether another attempt makes sense: something failed, and nobody said stop."""
        return self.failure is not None and self.interrupted_by is None

    def text(self) -> str:
        """Return what to tell the user; empty when all went well."""
        text = report.failure_text(self.failure) if self.failure else ""
        if self.interrupted_by is not None:
            text += f"nc10d-run: ended by {report.signal_name(self.interrupted_by)}\n"
        return text


def run(job: LaunchedJob, command: Sequence[str], plan: OutputPlan, grace: float) -> int:
    """Run `command` as this node's ranks, restarting them as the job allows; return the code.

    Blocks until every rank has ended. Main thread only. OSError if the command cannot be run.
    """
    with SignalPipe() as signals:
        for restart in range(job.max_restarts + 1):
            with JobAttempt(job, restart, plan, grace, signals) as attempt:
                attempt.start(command)
                outcome = attempt.watch()
            tell(outcome.text())
            if not outcome.may_restart or restart == job.max_restarts:
                break
            tell(f"nc10d-run: restart {restart + 1} of {job.max_restarts}\n")
    return outcome.exit_code


def tell(text: str) -> None:
    """Write the launcher's own words to stderr."""
    sys.stderr.write(text)
    sys.stderr.flush()


class JobAttempt:
    """One life of the local ranks. Leaving the context ends whatever is left of them."""

    def __init__(
        self, job: LaunchedJob, restart: int, plan: OutputPlan, grace: float, signals: SignalPipe
    ) -> None:
        self._job = job
        self._restart = restart
        self._grace = grace
        self._signals = signals
        self._plumber = OutputWiring(plan, job, restart, signals)
        self._clock = shutdown.ShutdownClock()
        self._selector = selectors.DefaultSelector()
        self._living: dict[int, RankProcess] = {}
        self._outputs: dict[int, RankOutput] = {}
        self._exits: list[report.Exit] = []  # in order of time, until we ask ranks to end
        self._blamed: report.Exit | None = None
        self._asked_to_end = False
        self._interrupted_by: int | None = None

    def __enter__(self) -> JobAttempt:
        self._family = RankProcesses()
        self._watch_for(self._signals.fd, self._signals.collect)
        return self

    def __exit__(self, *_: object) -> None:
        self._family.close()
        for process in self._living.values():
            process.reap()
        self._selector.close()
        for output in self._outputs.values():
            output.drain()
            output.close()

    def start(self, command: Sequence[str]) -> None:
        """Start the ranks, in order; OSError if the command cannot be run."""
        for local_rank in range(self._job.nproc):
            self._start_rank(local_rank, command)

    def watch(self) -> AttemptResult:
        """Wait until every rank has ended, carrying output, ending the others if one fails."""
        while self._living:
            for key, _ in self._selector.select(self._clock.remaining()):
                act: Callable[[], None] = key.data
                act()
            self._on_signals()
            for step in self._clock.take_due():
                self._send(step)
        if self._job.keep_going and all(end.failed for end in self._exits):
            self._blamed = report.first_failure(self._exits)  # nobody was left to go on
        return AttemptResult(self._interrupted_by, self._blamed)

    def _start_rank(self, local_rank: int, command: Sequence[str]) -> None:
        output = self._outputs[local_rank] = self._plumber.connect(local_rank)
        environment = rank_environment(self._job, local_rank, self._restart, os.environ)
        try:
            process = self._family.spawn(command, environment, _stdin(local_rank), *output.inherit)
        finally:
            output.started()
        self._living[local_rank] = process
        self._watch_for(process.pidfd, partial(self._on_exit, local_rank))
        for stream in (output.stdout, output.stderr):
            self._watch_for(stream.source, partial(self._on_output, stream))

    def _watch_for(self, fd: int, act: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, act)

    def _on_output(self, stream: OutputStream) -> None:
        # An exit seen in the same round may have drained and closed the stream already.
        if stream.open and not stream.pump() and not stream.open:
            self._selector.unregister(stream.source)

    def _on_exit(self, local_rank: int) -> None:
        process = self._living.pop(local_rank)
        self._selector.unregister(process.pidfd)
        status = process.reap()
        output = self._outputs[local_rank]
        output.drain()
        if not self._asked_to_end:
            last_lines = output.stderr.last_lines()
            rank, host = self._job.global_rank(local_rank), socket.gethostname()
            self._exits.append(report.Exit(rank, local_rank, host, process.pid, status, last_lines))
            self._judge()

    def _judge(self) -> None:
        """End the other ranks if one has failed; a mere witness gives the cause time to show."""
        if self._job.keep_going:
            if self._exits[-1].failed:
                tell(f"nc10d-run: {report.describe(self._exits[-1])}; the others go on\n")
            return
        first = report.first_failure(self._exits)
        if first is not self._blamed and first is not None:
            self._blamed = first
            delay = shutdown.SETTLE if report.is_witness(first) else 0.0
            self._clock.begin(shutdown.politely(self._grace, delay))

    def _on_signals(self) -> None:
        for number in self._signals.take():
            if number == signal.SIGWINCH:
                self._on_resize()
            else:
                self._interrupt(number)

    def _on_resize(self) -> None:
        for local_rank, process in self._living.items():
            if self._outputs[local_rank].resized():
                process.send(signal.SIGWINCH)

    def _interrupt(self, number: int) -> None:
        if self._interrupted_by is not None:
            self._clock.begin(shutdown.AT_ONCE)
        elif number == signal.SIGINT:
            self._clock.begin(shutdown.INTERRUPT)
            for output in self._outputs.values():
                output.hush()
        else:
            self._clock.begin(shutdown.politely(self._grace))
        self._interrupted_by = self._interrupted_by or number
        self._asked_to_end = True

    def _send(self, step: shutdown.ShutdownStep) -> None:
        self._asked_to_end = True
        if step.whom is shutdown.SignalTarget.GROUP:
            self._family.send(step.number)
        else:
            for process in self._living.values():
                process.send(step.number)


def _stdin(local_rank: int) -> int | None:
    """Give the first rank the launcher's stdin, unless that is a terminal; the others nothing.

    Ranks are a background job to the terminal: one that read from it would be stopped.
    """
    return None if local_rank == 0 and not os.isatty(0) else subprocess.DEVNULL
