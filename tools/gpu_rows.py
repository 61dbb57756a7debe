"""What tools/gpu_check.py prints: rows, and the machine that they are from."""

from __future__ import annotations

import json
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nc10d import cuda
from nc10d.backend.nccl.bindings.library import dotted, library
from nc10d.cuda.driver import call


@dataclass(frozen=True)
class Row:
    """One line of the table: what, how it came out, and the same in figures."""

    name: str
    result: str
    failed: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)

    def show(self) -> None:
        """Print it."""
        print(f"{'FAIL' if self.failed else '    '} {self.name:48} {self.result}", flush=True)


Check = Callable[[], Sequence[Row]]


def run(name: str, check: Check) -> list[Row]:
    """Return a check's rows; whatever it raises is a failure, and so is a check without rows."""
    begin = time.monotonic()
    try:
        rows = list(check()) or [Row(name, "nothing was checked", failed=True)]
    except Exception as error:  # noqa: BLE001  (the table is the report)
        traceback.print_exc()
        rows = [Row(name, first_line(error), failed=True)]
    return [*rows, Row(f"  time of {name}", f"{time.monotonic() - begin:.1f} s")]


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def keep(rows: Sequence[Row], path: Path) -> None:
    """Write the table to a file."""
    found = {"date": time.strftime("%Y-%m-%d"), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n")


def machine() -> Row:
    """Say which card, driver and versions these are."""
    name = call("cuDeviceGetName", 96, call("cuDeviceGet", 0)).partition(b"\0")[0].decode()
    driver = int(call("cuDriverGetVersion"))
    commit = subprocess.run(["git", "describe", "--always"], capture_output=True, text=True)
    return Row(
        "machine",
        f"{cuda.device_count()} x {name}, CUDA {driver // 1000}.{driver % 1000 // 10}, "
        f"NCCL {dotted(library().version)}, Python {platform.python_version()}, "
        f"nc10d {commit.stdout.strip()}",
    )
