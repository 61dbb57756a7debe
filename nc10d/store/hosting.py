"""Start a store's server in a process of its own or in a thread, and choose its address.

The owner binds and listens. So the port is known at once, a port in use is an error at once, and
clients may connect before the server is up. The server's process inherits the listening socket and
the read end of a pipe. It ends once the pipe's write end has closed (the owner closed it, or died)
and the last client has disconnected. It has a session of its own and no output: Ctrl-C does not
reach it, and it does not keep the owner's output open.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from nc10d.auth.token import exposed_error, insecure, job_token, reachable
from nc10d.errors import StoreError
from nc10d.store.server import Server
from nc10d.store.store_errors import explain_no_listener
from nc10d.store.wire import Limits

_BACKLOG = 4096
_SERVER_SCRIPT = Path(__file__).with_name("server_process.py")
MOST_PORT = 65535
ANY = ("", "0.0.0.0", "::")


class Hosting:
    """A running server: its address, as this machine reaches it, and the pipe that keeps it alive.

    Several owners in this process may share it (`keep`, `release`). The server ends after the last
    owner has released it and the last client has disconnected.
    """

    def __init__(
        self, address: tuple[str, int], lifeline: int, child: subprocess.Popen[bytes] | None
    ) -> None:
        self.host = "127.0.0.1" if address[0] in ANY else address[0]
        self.port = address[1]
        self._lifeline: int | None = lifeline
        self._child = child
        self._users = 1
        _hostings.add(self)

    @property
    def alive(self) -> bool:
        """Whether this process still keeps the server alive."""
        return self._lifeline is not None

    def keep(self) -> None:
        """Share the server with another owner."""
        self._users += 1

    def release(self) -> None:
        """Give up an owner's share; the server may end after the last."""
        self._users -= 1
        if self._users == 0:
            self.cut()

    def cut(self) -> None:
        """Close the pipe; idempotent."""
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            os.close(lifeline)
        self.reap()

    def reap(self) -> None:
        """Wait for the intermediate process, which ends as soon as the server is up."""
        if self._child is not None:
            self._child.wait()
            self._child = None

    def forget_child(self) -> None:
        """In a forked child, close its copy of the pipe: pipe and process belong to the parent."""
        if self._child is not None:
            self._child.returncode = 0
            self._child = None
        self.cut()


_hostings: weakref.WeakSet[Hosting] = weakref.WeakSet()


def _after_fork() -> None:
    for hosting in [*_hostings]:
        hosting.forget_child()


os.register_at_fork(after_in_child=_after_fork)


def host_server(
    host: str,
    port: int,
    kind: str,
    limits: Limits,
    token: bytes | None = None,
    listen_fd: int | None = None,
) -> Hosting:
    """Start a server for `host` and `port` (0: any free port); StoreError if the port is in use.

    With a `token` it serves only clients that know it. `kind` is "process" or "thread".
    `listen_fd` is a listening socket to serve instead; the server takes ownership of it.
    """
    start = _STARTERS.get(kind)
    if start is None:
        raise ValueError(f"server must be one of {sorted(_STARTERS)}, not {kind!r}")
    if listen_fd is not None:
        listener = socket.socket(fileno=listen_fd)
    else:
        listener = listen(host, port, token)
    with listener:
        return start(listener, limits, token)


def check_port(port: int, least: int = 0) -> int:
    """Return `port`; TypeError unless an integer, ValueError unless `least` to 65535."""
    if not hasattr(port, "__index__"):
        raise TypeError(f"a port must be an int, not {type(port).__name__}")
    if not least <= port <= MOST_PORT:
        raise ValueError(
            f"a port to {'connect to' if least else 'listen on'} is {least} to "
            f"{MOST_PORT}, not {port}"
        )
    return port


def shared_server(
    host: str, port: int, kind: str, limits: Limits, token: bytes | None = None
) -> Hosting:
    """Share the server that this process runs on `port`, or start a new server."""
    for hosting in [*_hostings]:
        if port and hosting.port == port and hosting.alive:
            hosting.keep()
            return hosting
    return host_server(host, port, kind, limits, token)


_kept_servers: dict[str, Hosting] = {}


def keep_server(host: str, port: int) -> None:
    """Share or start a server process on `port`, and keep it until this process ends.

    Only the latest server is kept: an earlier one is released.
    """
    hosting = shared_server(host, port, "process", Limits(), job_token())
    before, _kept_servers["latest"] = _kept_servers.get("latest"), hosting
    if before is not None:
        before.release()


def _start_process(listener: socket.socket, limits: Limits, token: bytes | None) -> Hosting:
    read, write = os.pipe()
    secret = token or b""
    os.write(write, secret)  # other users can read a command line
    command = [sys.executable, "-I", "-S", str(_SERVER_SCRIPT), str(listener.fileno()), str(read)]
    command.append(str(len(secret)))
    try:
        child = subprocess.Popen(
            [*command, *map(str, limits)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(listener.fileno(), read),
            start_new_session=True,
            cwd="/",
        )
    except OSError as error:
        os.close(write)
        raise StoreError(f"cannot start the store's server: {error}") from error
    finally:
        os.close(read)
    return Hosting(listener.getsockname()[:2], write, child)


def _start_thread(listener: socket.socket, limits: Limits, token: bytes | None) -> Hosting:
    read, write = os.pipe()
    address = listener.getsockname()[:2]
    server = server_for(listener.dup(), read, limits, token)
    threading.Thread(target=server.serve, name=f"nc10d-store-{address[1]}", daemon=True).start()
    return Hosting(address, write, None)


_STARTERS: dict[str, Callable[[socket.socket, Limits, bytes | None], Hosting]] = {
    "process": _start_process,
    "thread": _start_thread,
}


def listen(host: str, port: int, token: bytes | None = None) -> socket.socket:
    """Return a socket that listens for clients that connect to `host`.

    Its address is NC10D_BIND if set, else that of `host` if it is this machine's, else any.
    Without a token it must be a loopback address, else AuthError, unless NC10D_INSECURE=1.
    StoreError if it cannot listen there.
    """
    check_port(port)
    bind = os.environ.get("NC10D_BIND")
    try:
        if token is None and not insecure():
            return _listen_on_loopback(bind or host, port)
        if bind:
            return _bind(_resolve(bind, port))
        return _listen_for(host, port)
    except OSError as error:
        where = f"{bind or host}:{port}" + (" (from NC10D_BIND)" if bind else "")
        raise StoreError(
            f"store {where}: cannot listen there: {explain_no_listener(error)}"
        ) from error


def _listen_on_loopback(host: str, port: int) -> socket.socket:
    if host == "":
        return _bind((socket.AF_INET, ("127.0.0.1", port)))
    if reachable(host):
        raise exposed_error(f"a store's server at {host}")
    return _bind(_resolve(host, port))


def _listen_for(host: str, port: int) -> socket.socket:
    if host in ANY:
        return _listen_anywhere(port)
    address = _resolve(host, port)
    # Many /etc/hosts map the machine's own name to a loopback address, which others can't reach.
    if _is_loopback(address[1][0]) and not (host == "localhost" or _is_loopback(host)):
        return _listen_anywhere(port)
    try:
        return _bind(address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return _listen_anywhere(port)


def _listen_anywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return _bind((socket.AF_INET6, ("::", port)))
    return _bind((socket.AF_INET, ("0.0.0.0", port)))


Address = tuple[socket.AddressFamily, tuple[str, int]]


def _resolve(host: str, port: int) -> Address:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    return family, (str(address[0]), port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bind(address: Address) -> socket.socket:
    family, where = address
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if where[0] == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        _set_inherited_options(sock)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _set_inherited_options(listener: socket.socket) -> None:
    """Set options that accepted sockets inherit: no delay; dead hosts are detected in a minute."""
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def server_for(
    listener: socket.socket, owner: int | None, limits: Limits, token: bytes | None
) -> Server:
    """Return a server; with a token it serves only clients that know the token."""
    if token is None:
        return Server(listener, owner, limits)
    from nc10d.store.auth_server import AuthServer

    return AuthServer(listener, owner, limits, token)
