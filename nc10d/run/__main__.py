"""`python -m nc10d.run` and the console script `nc10d-run`."""

from __future__ import annotations

import signal
import sys

from nc10d.run.signals import run_interruptible


def main() -> int:
    """Run the launcher with the arguments of this process; return its exit code."""
    # A script's shell starts a command in the background with SIGINT ignored. SIGINT ends a job
    # that runs, and therefore also ends the wait for other nodes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_interruptible(_launch)


def _launch() -> int:
    from nc10d.run import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
