"""`python -m nc10d.store --host HOST --port PORT`: a store's server on its own, until a signal."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from nc10d.errors import StoreError
from nc10d.store.hosting import listen
from nc10d.store.messages import Limits
from nc10d.store.server import Server, raise_descriptor_limit


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; sizes are bytes."""
    parser = argparse.ArgumentParser(
        prog="python -m nc10d.store", description="Serve a store over TCP (torch's wire)."
    )
    parser.add_argument("--host", default="", help="the address to listen on (default: any)")
    parser.add_argument("--port", type=int, default=29500, help="0: any free one, printed")
    for name, default in Limits()._asdict().items():
        parser.add_argument(f"--max-{name}", type=int, default=default, metavar="N")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code."""
    options = parse(arguments)
    limits = Limits(*(getattr(options, f"max_{name}") for name in Limits._fields))
    try:
        listener = listen(options.host, options.port)
    except StoreError as error:
        print(error, file=sys.stderr)
        return 1
    raise_descriptor_limit()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    host, port = listener.getsockname()[:2]
    print(f"serving on {host}:{port}", flush=True)
    try:
        Server(listener, None, limits).serve()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
