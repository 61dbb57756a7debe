"""`python -m nc10d.auth FILE`: write a new job token to a file."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from nc10d.auth.token import FILE, write_token


def main(arguments: list[str] | None = None) -> int:
    """Write a token to the file given as the only argument; return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 1 or words[0].startswith("-"):
        print("usage: python -m nc10d.auth FILE   writes a new job token to FILE", file=sys.stderr)
        return 2
    try:
        write_token(Path(words[0]))
    except OSError as error:
        print(f"nc10d.auth: cannot write {words[0]}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"export {FILE}={shlex.quote(str(Path(words[0]).absolute()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
