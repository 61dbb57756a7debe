"""`python -m nc10d.bench`: what collectives cost on this machine; see `nc10d.bench.cli`."""

from __future__ import annotations

from nc10d.run.quiet import quietly


def main() -> int:
    """Read the command line, measure, print; return the exit code."""
    import sys

    from nc10d.bench import cli

    return cli.run(cli.read(sys.argv[1:]))


if __name__ == "__main__":
    raise SystemExit(quietly(main))
