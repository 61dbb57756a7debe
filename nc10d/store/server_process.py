"""The server's process: `server_process.py LISTENER OWNER SECRET SAME_USER [LIMIT ...]`.

LISTENER and OWNER are descriptors. The first SECRET bytes read from OWNER are the job's token; with
SAME_USER 1, clients of this user need none.

To start in a few milliseconds, the process loads only the standard library and the few modules of
nc10d that a server needs: an empty module replaces the package, so that `__init__` does not run.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import types
from pathlib import Path


def _stand_in(name: str, folder: Path) -> None:
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def main(listener: int, owner: int, secret: int, same_user: int, *limits: int) -> None:
    """Serve `listener` until `owner` reads end-of-file and the last client has gone."""
    _stand_in("nc10d", Path(__file__).resolve().parent.parent)
    _stand_in("nc10d.store", Path(__file__).resolve().parent)
    from nc10d.store.hosting import server_for
    from nc10d.store.server import raise_descriptor_limit
    from nc10d.store.wire import Limits

    # The terminal's Ctrl-C is for the ranks; the server ends after them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Leave the owner's process tree, so that the owner need not wait for the server.
    if os.fork():
        os._exit(0)
    raise_descriptor_limit()
    gc.disable()  # the loop creates no reference cycles
    token = os.read(owner, secret) if secret else None
    listening = socket.socket(fileno=listener)
    server_for(listening, owner, Limits(*limits), token, bool(same_user)).serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
