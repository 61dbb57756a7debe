"""`python -m nc10d.auth FILE`: write a new job token to a file."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from nc10d.auth.token import FILE, write_token


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a token to the file given as the only argument; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nc10d.auth",
        description="Write a new job token to a new file that only its owner may read, and print "
        "the line that gives it to the processes of a job.",
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    path = parser.parse_args(arguments).file
    try:
        write_token(path)
    except OSError as error:
        print(f"nc10d.auth: cannot write {path}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"export {FILE}={shlex.quote(str(path.absolute()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
