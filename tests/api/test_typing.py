"""Programs pass mypy --strict: a call returns a Work or None, by its `async_op`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TYPED = """
import numpy as np

import nc10d as dist
from nc10d import ProcessGroup, Work

x = np.ones(3)


def started(group: ProcessGroup, late: bool) -> list[Work]:
    dist.all_reduce(x, dist.ReduceOp.MAX, group)
    maybe = dist.broadcast(x, 0, async_op=late) or group.all_reduce(x, async_op=late)
    if maybe is not None:
        maybe.wait()
    return [
        dist.all_reduce(x, group=group, async_op=True),
        dist.barrier(async_op=True),
        dist.gather(x, dst=0, async_op=True),
        dist.isend(x, dst=1),
        group.reduce_scatter_single(x, x, async_op=True),
        group.irecv(x),
    ]


dist.all_reduce(x).wait()  # error
group = dist.get_default_group()
late: Work = group.broadcast(x, 0)  # error
dist.broadcast(x, 0, async_op=bool(x[0])).wait()  # error
dist.all_reduce(x, opp=dist.ReduceOp.MAX)  # error
"""


@pytest.mark.slow
def test_programs_are_typed_by_async_op(tmp_path: Path) -> None:
    """The examples of README and the code above pass, but for the lines marked as errors."""
    examples = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert examples
    for number, code in enumerate([*examples, TYPED]):
        (tmp_path / f"example{number}.py").write_text(code)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, "--strict", *sorted(map(str, tmp_path.glob("*.py")))],
        cwd=ROOT,  # its cache is the one of `make typecheck`
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    last = f"example{len(examples)}.py"
    wrong = [n for n, line in enumerate(TYPED.splitlines(), 1) if line.endswith("# error")]
    found = re.findall(r"(example\d+\.py):(\d+): error", done.stdout)
    assert {(name, int(n)) for name, n in found} == {(last, n) for n in wrong}, done.stdout
