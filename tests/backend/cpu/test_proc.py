"""Without /proc, a group is an UnsupportedPlatform that says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import nc10d
try:
    nc10d.init_process_group(rank=0, world_size=1)
except nc10d.UnsupportedPlatform as error:
    print(error)
"""


def test_a_machine_without_proc_is_refused_with_the_reason() -> None:
    hidden = 'mount -t tmpfs none /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*command, hidden, "sh", "true"], capture_output=True).returncode:
        pytest.skip("this user may not hide /proc")
    done = subprocess.run(
        [*command, hidden, "sh", sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.startswith("nc10d needs /proc: "), done.stderr
