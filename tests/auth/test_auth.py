"""The sources of a job's token, and the addresses that are refused without a token."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from nc10d.auth import token as auth
from nc10d.errors import AuthError

TOKEN = "0123456789abcdef" * 4


def test_a_token_is_read_from_its_file_before_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "token"
    auth.write_token(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = auth.job_token({auth.FILE: str(path), auth.VALUE: TOKEN})
    assert token == bytes.fromhex(path.read_text())
    assert auth.job_token({auth.VALUE: TOKEN}) == bytes.fromhex(TOKEN)
    assert auth.job_token({}) is None
    assert auth.job_token({auth.VALUE: "", auth.FILE: ""}) is None


def test_each_new_token_differs() -> None:
    assert len({auth.new_token() for _ in range(100)}) == 100


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o666])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    auth.write_token(path)
    path.chmod(mode)
    with pytest.raises(AuthError, match=f"chmod 600 {path}") as caught:
        auth.job_token({auth.FILE: str(path)})
    assert path.read_text().strip() not in str(caught.value)


@pytest.mark.parametrize("text", ["", "x" * 64, TOKEN[:-1], TOKEN + "0", "secret"])
def test_a_malformed_token_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(text)
    sources = [{auth.FILE: str(path)}, *([{auth.VALUE: text}] if text else [])]
    for environment in sources:
        with pytest.raises(AuthError, match="make one with") as caught:
            auth.job_token(environment)
        assert not text or text not in str(caught.value).split("python -m")[0]


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token", 0o600)
    with pytest.raises(AuthError, match="must be an ordinary file"):
        auth.job_token({auth.FILE: str(tmp_path / "token")})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    auth.write_token(path)
    os.chown(path, 12345, 12345)
    with pytest.raises(AuthError, match=r"belongs to another user \(number 12345\)"):
        auth.job_token({auth.FILE: str(path)})


def test_a_missing_file_is_an_error_that_names_it() -> None:
    with pytest.raises(AuthError, match=r"/nowhere/token \(NC10D_TOKEN_FILE\): No such file"):
        auth.job_token({auth.FILE: "/nowhere/token"})


@pytest.mark.parametrize(
    ("host", "beyond"),
    [
        ("127.0.0.1", False),
        ("127.1.2.3", False),
        ("::1", False),
        ("localhost", False),
        ("no.such.host.invalid", False),
        ("0.0.0.0", True),
        ("::", True),
        ("192.0.2.1", True),
        ("2001:db8::1", True),
    ],
)
def test_an_address_that_others_can_reach_needs_a_token_or_trust(
    monkeypatch: pytest.MonkeyPatch, host: str, beyond: bool
) -> None:
    assert auth.reachable(host) == beyond
    for name, value in (("NC10D_INSECURE", "1"), ("NC10D_TOKEN", TOKEN)):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            auth.require_token(host, "the store")
    if beyond:
        with pytest.raises(AuthError, match=r"NC10D_TOKEN_FILE.*NC10D_INSECURE=1"):
            auth.require_token(host, "the store")
    else:
        auth.require_token(host, "the store")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "nc10d.auth", *words)
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_the_command_makes_a_file_and_prints_how_to_use_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    os.umask(os.umask(0))  # keep the user's umask
    done = command(str(path))
    assert done.stdout == f"export NC10D_TOKEN_FILE={path}\n"
    assert auth.job_token({auth.FILE: str(path)}) is not None
    odd = tmp_path / "my 'token' $HOME"
    shell = f'{command(str(odd)).stdout}printf %s "$NC10D_TOKEN_FILE"'
    told = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert told.stdout == str(odd)
    again = command(str(path))
    assert again.returncode == 1
    assert "File exists" in again.stderr
    assert command().returncode == 2
