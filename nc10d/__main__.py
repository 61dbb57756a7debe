"""`python -m nc10d`: show version and commands; `--version` shows the version alone."""

from __future__ import annotations

import platform
import sys

from nc10d import __version__

COMMANDS = {
    "run": "start the ranks of a script on this machine, and watch over them",
    "bench": "time the collectives of a job, in nccl-tests' columns",
    "debug": "find missing, different or late ranks in the dumps of a failed job",
    "auth": "make a job's token, for jobs on several machines",
    "store": "serve a key-value store",
    "warmup": "compile everything now, so that the first use need not",
}


def main() -> int:
    """Print the commands; return the exit code: 2 if the command line names something else."""
    if sys.argv[1:] in (["--version"], ["-V"]):
        print(f"nc10d {__version__}")
        return 0
    asked = sys.argv[1:] in ([], ["-h"], ["--help"])
    lines = [f"  python -m nc10d.{name:<8}{text}" for name, text in COMMANDS.items()]
    title = f"nc10d {__version__}, Python {platform.python_version()}: commands; each has a --help"
    text = "\n".join([title, "", *lines])
    print(text, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
