"""`python -m nc10d.warmup` leaves nothing to compile."""

import subprocess
import sys

from nc10d.kernels import reduce


def test_after_the_warm_up_everything_is_loaded():
    done = subprocess.run(
        [sys.executable, "-m", "nc10d.warmup"], check=True, stdout=subprocess.PIPE, text=True
    )
    assert "functions ready" in done.stdout
    check = """
from nc10d.kernels import reduce
for name, make in reduce.every_kernel():
    make()
assert all(kernel.cache_hits for kernel in reduce._kernels.values())
"""
    subprocess.run([sys.executable, "-c", check], check=True)


def test_every_kernel_has_a_task_of_its_own():
    names = [name for name, _ in reduce.every_kernel()]
    assert len(names) == len(set(names)) > 50
