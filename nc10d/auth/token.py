"""A job's token: 256 secret bits that all processes of the job share.

The token is 64 hexadecimal digits, in the file that NC10D_TOKEN_FILE names (which only its owner
may read) or else in the variable NC10D_TOKEN. With a token, every connection of the job begins
with the handshake of auth/handshake.py. Without a token, processes listen on loopback addresses
only, unless NC10D_INSECURE=1 declares the network as trusted. A token is never part of a command
line, of a message or of a log.

`python -m nc10d.auth FILE` makes a token.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from nc10d.base.resolve import resolve
from nc10d.base.run_to_end import off_main
from nc10d.errors import AuthError

FILE, VALUE, INSECURE = "NC10D_TOKEN_FILE", "NC10D_TOKEN", "NC10D_INSECURE"
TOKEN_BYTES = 32
_TOKEN = re.compile(r"[0-9a-fA-F]{64}")
_HOW_TO_MAKE = "make one with: python -m nc10d.auth FILE"


def new_token() -> str:
    """Return a new random token in the form of the variable NC10D_TOKEN."""
    return os.urandom(32).hex()


def job_token(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the job's token, 32 bytes, or None if there is none.

    AuthError if the token is malformed, or if its file is unreadable, open to other users, or owned
    by a user other than this one or root.
    """
    name = environment.get(FILE)
    if name:
        return _parse_token(_read_secret_file(Path(name)), f"the file {name} ({FILE})")
    text = environment.get(VALUE)
    return _parse_token(text, VALUE) if text else None


def check_token(token: bytes | None) -> bytes | None:
    """Return the caller's argument `token`; TypeError or ValueError unless it has 32 bytes.

    A shorter token could be guessed.
    """
    if token is None:
        return None
    if not isinstance(token, bytes):
        raise TypeError(f"a token is bytes, not {type(token).__name__}")
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"a token has {TOKEN_BYTES} bytes, not {len(token)}")
    return token


def _parse_token(text: str, where: str) -> bytes:
    if not _TOKEN.fullmatch(text.strip()):
        raise AuthError(
            f"{where} does not hold a token, which is 64 hexadecimal digits; {_HOW_TO_MAKE}"
        )
    return bytes.fromhex(text.strip())


@off_main
def _read_secret_file(path: Path) -> str:
    try:
        with open(path, opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            mode = stat.S_IMODE(status.st_mode)
            if status.st_uid not in (os.geteuid(), 0):
                raise AuthError(
                    f"the token file {path} ({FILE}) belongs to another user (number "
                    f"{status.st_uid}), who knows the token: {_HOW_TO_MAKE}"
                )
            if not stat.S_ISREG(status.st_mode):
                raise AuthError(
                    f"the token file {path} ({FILE}) must be an ordinary file: {_HOW_TO_MAKE}"
                )
            if mode & 0o077:
                raise AuthError(
                    f"others than its owner may use the token file {path} (mode {mode:04o}): "
                    f"chmod 600 {shlex.quote(str(path))}, and make a new token if others could "
                    "have read it"
                )
            return file.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise AuthError(
            f"cannot read the token file {path} ({FILE}): {reason}; {_HOW_TO_MAKE}"
        ) from error


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file; do not wait for a pipe's writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def insecure(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the user trusts the network: NC10D_INSECURE is 1."""
    return environment.get(INSECURE) == "1"


def require_token(host: str, what: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise AuthError if `what` would use a non-loopback address without a token.

    `host` is an address or a name. An unknown name is not an error here; connecting to it will
    report it.
    """
    if not reachable(host) or insecure(environment) or job_token(environment) is not None:
        return
    raise exposed_error(f"{what} at {host}")


def exposed_error(what: str) -> AuthError:
    """Return the AuthError for `what`, which other machines could reach without a token."""
    return AuthError(
        f"{what} can be reached from other machines, and the job has no token. Give "
        f"every process of the job the same one: {FILE} names a file of mode 600 "
        f"({_HOW_TO_MAKE}). Or set {INSECURE}=1, "
        "if nobody else reaches that network. A job on one machine can meet at "
        "127.0.0.1 (MASTER_ADDR) instead"
    )


@off_main
def reachable(host: str) -> bool:
    """Return whether `host`, an address or a name, may be reachable from other machines."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = resolve(host, 0)
    except OSError:
        return False
    return any(not ipaddress.ip_address(str(info[4][0])).is_loopback for info in found)


def write_token(path: Path) -> None:
    """Write a new token to a new file that only its owner may read; OSError if the file exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(new_token() + "\n")
