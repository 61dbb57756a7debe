"""The agent: run the ranks of this node until all have ended, and decide the exit code.

A single thread runs a loop that waits for four kinds of events: output, ends of ranks, signals to
the launcher, and the next step of a shutdown. Nothing polls. A `JobAttempt` is a life of the local
ranks; a failed attempt is followed by another while restarts are left.
"""

from __future__ import annotations

import contextlib
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
from nc10d.run.launch_options import LaunchRequest
from nc10d.run.output import OutputError, OutputStream
from nc10d.run.processes import RankProcess, RankProcesses
from nc10d.run.rank_output import OutputWiring, RankOutput
from nc10d.run.signals import SignalPipe


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The end of an attempt: by a signal, a failed rank, output that can't be written, or well."""

    interrupted_by: int | None = None
    failure: report.Exit | None = None
    unwritten: OutputError | None = None

    @property
    def exit_code(self) -> int:
        """The launcher's exit code."""
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        if self.unwritten is not None:
            return 1
        return self.failure.exit_code if self.failure else 0

    @property
    def may_restart(self) -> bool:
        """Whether another attempt makes sense: a rank failed, and nothing else ended the job."""
        return self.failure is not None and self.interrupted_by is None and self.unwritten is None

    def text(self) -> str:
        """Return the report for the user; empty if no rank failed."""
        text = report.failure_text(self.failure) if self.failure else ""
        if self.interrupted_by is not None:
            text += f"nc10d-run: ended by {report.signal_name(self.interrupted_by)}\n"
        if self.unwritten is not None:
            text += f"nc10d-run: {self.unwritten}; the ranks were ended\n"
        return text


def run(job: LaunchedJob, request: LaunchRequest) -> int:
    """Run this node's ranks, restarting them as the job allows; return the exit code.

    Blocks until every rank has ended. Main thread only. OSError if the command cannot be run.
    """
    with SignalPipe(request.signals) as signals:
        for restart in range(job.max_restarts + 1):
            with JobAttempt(job, restart, request, signals) as attempt:
                attempt.start(request.command)
                outcome = attempt.watch()
            write_message(outcome.text())
            if not outcome.may_restart or restart == job.max_restarts:
                break
            write_message(f"nc10d-run: restart {restart + 1} of {job.max_restarts}\n")
    return outcome.exit_code


def write_message(text: str) -> None:
    """Write a launcher's message to stderr, if that is possible."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


class JobAttempt:
    """A life of the local ranks. Leaving the context ends the processes that are left."""

    def __init__(
        self, job: LaunchedJob, restart: int, request: LaunchRequest, signals: SignalPipe
    ) -> None:
        self._job = job
        self._restart = restart
        self._grace = request.grace
        self._plan = request.output
        self._forwarded = request.signals
        self._signals = signals
        self._wiring = OutputWiring(request.output, job, restart, signals)
        self._clock = shutdown.ShutdownClock()
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, RankProcess] = {}
        self._outputs: dict[int, RankOutput] = {}
        self._exits: list[report.Exit] = []  # in time order, until the ranks are asked to end
        self._first_failure: report.Exit | None = None
        self._ending = False
        self._interrupted_by: int | None = None
        self._unwritten: OutputError | None = None

    def __enter__(self) -> JobAttempt:
        self._processes = RankProcesses()
        self._watch_for(self._signals.fd, self._signals.collect)
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()
        for process in self._running.values():
            process.reap()
        self._selector.close()
        for output in self._outputs.values():
            output.drain()
            output.close()

    def start(self, command: Sequence[str]) -> None:
        """Start the ranks, in order; OSError if the command cannot be run.

        OutputError if the ranks' output files cannot be made.
        """
        for local_rank in range(self._job.nproc):
            self._start_rank(local_rank, command)

    def watch(self) -> AttemptResult:
        """Pass output on until every rank has ended; end the others if a rank fails.

        BrokenPipeError if the output's reader has left.
        """
        while self._running:
            for key, _ in self._selector.select(self._clock.remaining()):
                act: Callable[[], None] = key.data
                act()
            self._on_signals()
            self._on_unwritten()
            for step in self._clock.take_due():
                self._send(step)
        if self._job.keep_going and all(end.failed for end in self._exits):
            self._first_failure = report.first_failure(self._exits)  # no rank was left to go on
        return AttemptResult(self._interrupted_by, self._first_failure, self._unwritten)

    def _start_rank(self, local_rank: int, command: Sequence[str]) -> None:
        output = self._outputs[local_rank] = self._wiring.connect(local_rank)
        environment = rank_environment(self._job, local_rank, self._restart, os.environ)
        try:
            process = self._processes.spawn(
                command, environment, _stdin(local_rank), *output.inherit
            )
        finally:
            output.started()
        self._running[local_rank] = process
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
        process = self._running.pop(local_rank)
        self._selector.unregister(process.pidfd)
        status = process.reap()
        output = self._outputs[local_rank]
        output.drain()
        if not self._ending:
            last_lines = output.stderr.last_lines()
            rank, host = self._job.global_rank(local_rank), socket.gethostname()
            shown = not self._plan.hidden(local_rank)[1]
            self._exits.append(
                report.Exit(rank, local_rank, host, process.pid, status, last_lines, shown)
            )
            self._react_to_exit()

    def _react_to_exit(self) -> None:
        """End the other ranks after a failure; after a secondary failure, wait for its cause."""
        if self._job.keep_going:
            if self._exits[-1].failed:
                going_on = len(self._exits) < self._job.nproc or self._job.nnodes > 1
                rest = "; the others go on" if going_on else ""
                write_message(f"nc10d-run: {report.describe(self._exits[-1])}{rest}\n")
            return
        first = report.first_failure(self._exits)
        if first is not self._first_failure and first is not None:
            self._first_failure = first
            delay = shutdown.CAUSE_WAIT if report.is_secondary(first) else 0.0
            self._clock.begin(shutdown.graceful(self._grace, delay))

    def _on_signals(self) -> None:
        for number in self._signals.take():
            if number != signal.SIGWINCH:
                self._interrupt(number)
                continue
            for local_rank, process in self._running.items():
                if self._outputs[local_rank].resize():
                    process.send(signal.SIGWINCH)

    def _on_unwritten(self) -> None:
        """End the ranks in order if output cannot be written: a program alone would fail, too."""
        failures = self._wiring.failures
        if not failures or self._unwritten is not None:
            return
        if isinstance(failures[0].__cause__, BrokenPipeError):
            raise failures[0].__cause__
        self._unwritten = failures[0]
        self._ending = True
        self._clock.begin(shutdown.graceful(self._grace))

    def _interrupt(self, number: int) -> None:
        if self._interrupted_by is not None:
            self._clock.begin(shutdown.KILL_NOW)
        elif number == signal.SIGINT:
            self._clock.begin(shutdown.INTERRUPT)
            for output in self._outputs.values():
                output.stderr.filter_tracebacks()
        else:
            passed_on = signal.Signals(number if number in self._forwarded else signal.SIGTERM)
            self._clock.begin(shutdown.graceful(self._grace, number=passed_on))
        self._interrupted_by = self._interrupted_by or number
        self._ending = True

    def _send(self, step: shutdown.ShutdownStep) -> None:
        self._ending = True
        if step.target is shutdown.SignalTarget.GROUP:
            self._processes.send(step.number)
        else:
            for process in self._running.values():
                process.send(step.number)


def _stdin(local_rank: int) -> int | None:
    """Return a rank's stdin: the launcher's for the first rank, /dev/null for the others.

    A terminal is not passed on. To it, the ranks are a background job: a read would stop them.
    """
    return None if local_rank == 0 and not os.isatty(0) else subprocess.DEVNULL
