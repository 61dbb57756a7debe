"""Start a store's server in a process of its own or in a thread, and choose the address.

The owner binds and listens. So the port is known at once, a port in use is an error at once, and
clients may connect before the server is up. The server's process inherits the listening socket and
an end of a socket pair, the lifeline. Once the owner's end has closed (the owner closed it, or
died), the server gives up its port; the process ends with its last client. The process has a
session of its own and no output: it hears no Ctrl-C, and does not keep the owner's output open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

from nc10d.auth.token import exposed_error, insecure, reachable
from nc10d.base.resolve import resolve
from nc10d.base.run_to_end import import_to_end, off_main
from nc10d.base.signal_errors import Thread
from nc10d.errors import DistNetworkError, StoreError
from nc10d.store.server import Server
from nc10d.store.store_errors import explain_no_listener
from nc10d.store.wire import Limits

_BACKLOG = 4096
_RELEASE_SECONDS = 2.0
_FIRST_FD = 3  # behind the standard descriptors
_SERVER_SCRIPT = Path(__file__).with_name("server_process.py")
MOST_PORT = 65535
ANY = ("", "0.0.0.0", "::")


class PortTaken(DistNetworkError):
    """Another program, or another job's server, listens on the port."""


class Hosting:
    """A running server: the address by which this machine reaches it, and the lifeline.

    Several owners in this process may share a server (`keep`, `release`). When the last owner has
    released the server, the port is free. The server ends after the last client has disconnected.
    """

    def __init__(
        self,
        address: tuple[str, int],
        lifeline: socket.socket,
        child: subprocess.Popen[bytes] | None,
    ) -> None:
        self.host = "127.0.0.1" if address[0] in ANY else address[0]
        self.port = address[1]
        self._lifeline: socket.socket | None = lifeline
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
        """Give up an owner's share; after the last, the port is free."""
        self._users -= 1
        if self._users == 0:
            self.cut()

    def cut(self) -> None:
        """Have the server give up its port; idempotent. Blocks a moment, until the port is free."""
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is None:
            return
        self.reap()
        _cut(lifeline)

    def reap(self) -> None:
        """Wait for the intermediate process, which ends as soon as the server is up."""
        if self._child is not None:
            self._child.wait()
            self._child = None

    def forget_child(self) -> None:
        """In a forked child, close its copy of the lifeline, which belongs to the parent."""
        if self._child is not None:
            self._child.returncode = 0
            self._child = None
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None


@off_main
def _cut(lifeline: socket.socket) -> None:
    with lifeline, contextlib.suppress(OSError):
        lifeline.shutdown(socket.SHUT_WR)
        lifeline.settimeout(_RELEASE_SECONDS)  # a frozen server must not hold its owner up
        lifeline.recv(1)


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
    same_user: bool = False,
) -> Hosting:
    """Start a server for `host` and `port` (0: any free port); StoreError if the port is in use.

    With a `token` it serves only clients that know it, and with `same_user` those of this user on
    this machine. `kind` is "process" or "thread".
    `listen_fd` is a bound socket to serve instead; the server takes ownership of it.
    """
    start = _STARTERS.get(kind)
    if start is None:
        raise ValueError(f"server must be one of {sorted(_STARTERS)}, not {kind!r}")
    with listen(host, port, token) if listen_fd is None else _given_listener(listen_fd) as listener:
        return start(listener, limits, token, same_user)


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


def _start_process(
    listener: socket.socket, limits: Limits, token: bytes | None, same_user: bool
) -> Hosting:
    lifeline, theirs = socket.socketpair()
    secret = token or b""
    lifeline.send(secret)  # other users can read a command line
    # Where a standard descriptor is closed, a socket may have a number that the server's process
    # has for /dev/null.
    passed = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD) for end in (listener, theirs)]
    numbers = map(str, [*passed, len(secret), int(same_user), *limits])
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SERVER_SCRIPT), *numbers],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=passed,
            start_new_session=True,
            cwd="/",
        )
    except OSError as error:
        lifeline.close()
        raise StoreError(f"cannot start the store's server: {error}") from error
    finally:
        theirs.close()
        for fd in passed:
            os.close(fd)
    return Hosting(listener.getsockname()[:2], lifeline, child)


def _start_thread(
    listener: socket.socket, limits: Limits, token: bytes | None, same_user: bool
) -> Hosting:
    lifeline, theirs = socket.socketpair()
    address = listener.getsockname()[:2]
    server = server_for(listener.dup(), theirs.detach(), limits, token, same_user)
    Thread(target=server.serve, name=f"nc10d-store-{address[1]}", daemon=True).start()
    return Hosting(address, lifeline, None)


_STARTERS: dict[str, Callable[[socket.socket, Limits, bytes | None, bool], Hosting]] = {
    "process": _start_process,
    "thread": _start_thread,
}


def listen(host: str, port: int, token: bytes | None = None) -> socket.socket:
    """Return a socket that listens for clients that connect to `host`.

    The address is NC10D_BIND if set, else that of `host` if this machine has it, else any. Without
    a token only loopback addresses are allowed, else AuthError, unless NC10D_INSECURE=1. StoreError
    if listening there is impossible.
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
        kind = PortTaken if error.errno == errno.EADDRINUSE else DistNetworkError
        # The words that torch's callers look for.
        failed = "The server socket has failed to listen on any local network address"
        raise kind(f"{failed}: store {where}: {explain_no_listener(error)}") from error


def _given_listener(fd: int) -> socket.socket:
    """Return a caller's socket, listening; ValueError unless it is a TCP socket with a port."""
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise ValueError(f"master_listen_fd {fd} is not a socket: {error.strerror}") from error
    try:
        # An unbound socket would listen on every address of the machine.
        inet = listener.family in (socket.AF_INET, socket.AF_INET6)
        if not inet or listener.type != socket.SOCK_STREAM or listener.getsockname()[1] == 0:
            raise ValueError(f"master_listen_fd {fd} is not a TCP socket that is bound to a port")
        listener.listen(_BACKLOG)
    except BaseException as error:
        listener.detach()  # the descriptor stays the caller's
        if isinstance(error, OSError):
            why = explain_no_listener(error)
            raise StoreError(f"master_listen_fd {fd}: cannot listen: {why}") from error
        raise
    return listener


def _listen_on_loopback(host: str, port: int) -> socket.socket:
    if host == "":
        return _bind((socket.AF_INET, ("127.0.0.1", port)))
    if reachable(host):
        raise exposed_error(f"a store's server at {host}")
    return _bind(_resolve(host, port))


def _listen_for(host: str, port: int) -> socket.socket:
    if host == "0.0.0.0":
        return _bind((socket.AF_INET, (host, port)))
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
    found = resolve(host, port)
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
    # At a loss of 10 % both ways, 15 probes in a row have no answer with a probability of
    # 0.19 ** 15 = 2e-11: 2e-6 in 1,000 hours. Three in a row have none every 73 minutes.
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 15)):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def server_for(
    listener: socket.socket,
    owner: int | None,
    limits: Limits,
    token: bytes | None,
    same_user: bool = False,
) -> Server:
    """Return a server; a server with a token serves only clients that know it (or `same_user`)."""
    if token is None:
        return Server(listener, owner, limits)
    auth = import_to_end("nc10d.store.auth_server")
    found: Server = auth.AuthServer(listener, owner, limits, token, same_user)
    return found
