"""`python -m nc10d.store --host HOST --port PORT`: run a store's server until a signal."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from nc10d.auth.token import job_token
from nc10d.base.text import byte_size
from nc10d.errors import AuthError, StoreError
from nc10d.store.hosting import check_port, listen, server_for
from nc10d.store.server import raise_descriptor_limit
from nc10d.store.wire import Limits

_ABOUT = """\
Serve a key-value store over TCP until Ctrl-C or SIGTERM. Clients are nc10d.TCPStore(host, port)
and torch.distributed.TCPStore(host, port, is_master=False) of torch 2.13; a job meets there with
init_method tcp://host:port. Prints its address once clients can connect. With a job token
(NC10D_TOKEN_FILE or NC10D_TOKEN) it serves clients that know it, and speaks nc10d's protocol;
without a token it serves this machine alone, or, with NC10D_INSECURE=1, any client that reaches
the port."""
_BOUNDS = {
    "key": "bytes of a key",
    "value": "bytes of a value",
    "total": "bytes of keys, values, waits and unread replies together",
    "items": "keys in one request",
    "clients": "clients at the same time",
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; SystemExit with usage if they make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m nc10d.store",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--host",
        default="",
        help="address or name to listen on; without it, or with another machine's, any address "
        "(without a token: this machine alone); the variable NC10D_BIND goes before it",
    )
    parser.add_argument(
        "--port", type=_port, default=29500, help="0 to 65535; 0: any free port (default 29500)"
    )
    bounds = parser.add_argument_group("bounds", "a connection that goes beyond one is closed")
    for name, default in Limits()._asdict().items():
        text = f"{_BOUNDS[name]}, at most (default {default})"
        bounds.add_argument(
            f"--max-{name}", type=byte_size, default=default, metavar="N", help=text
        )
    return parser.parse_args(arguments)


def _port(text: str) -> int:
    try:
        return check_port(int(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a port is 0 to 65535, not {text!r}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code."""
    options = parse(arguments)
    limits = Limits(*(getattr(options, f"max_{name}") for name in Limits._fields))
    try:
        token = job_token()
        listener = listen(options.host, options.port, token)
    except (StoreError, AuthError) as error:
        print(f"nc10d.store: {error}", file=sys.stderr)
        return 1
    raise_descriptor_limit()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    host, port = listener.getsockname()[:2]
    print(f"serving on {f'[{host}]' if ':' in host else host}:{port}", flush=True)
    try:
        server_for(listener, None, limits, token).serve()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
