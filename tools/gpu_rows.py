"""The rows of the report of tools/gpu_check.py, and the description of the machine."""

from __future__ import annotations

import json
import platform
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import nc10d
from nc10d import cuda
from nc10d.backend.nccl.bindings.library import dotted, library
from nc10d.cuda.driver import call

NOT_HERE = "not run: "
"""The beginning of the result of a row that this machine can't have."""


@dataclass(frozen=True)
class Row:
    """A line of the report: a name, the result as text, and the result in figures."""

    name: str
    result: str
    failed: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)

    def show(self) -> None:
        """Print the row."""
        print(f"{'FAIL' if self.failed else '    '} {self.name:48} {self.result}", flush=True)

    @property
    def shows(self) -> bool:
        """Whether the row passed, and was not left out."""
        return not self.failed and not self.result.startswith(NOT_HERE)


Check = Callable[[], Iterable[Row]]
"""Yields its rows as it goes, so that a check that is cut short has shown some."""


def run(name: str, check: Check) -> Iterator[Row]:
    """Yield a check's rows; an exception is a failure, and so is a check without rows."""
    begin, count = time.monotonic(), 0
    try:
        for count, row in enumerate(check(), 1):  # noqa: B007
            yield row
        if not count:
            yield Row(name, "nothing was checked", failed=True)
    except Exception as error:  # noqa: BLE001  (the table is the report)
        traceback.print_exc()
        yield Row(name, first_line(error), failed=True)
    yield Row(f"  time of {name}", f"{time.monotonic() - begin:.1f} s")


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def keep(rows: Sequence[Row], path: Path) -> None:
    """Write the table to a file."""
    report = {"date": time.strftime("%Y-%m-%d"), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(report, indent=1) + "\n")


def as_line(row: Row) -> str:
    """Return a row as a line of JSON."""
    return json.dumps(asdict(row)) + "\n"


def from_line(line: str) -> Row:
    """Return the row of a line."""
    return Row(**json.loads(line))


def machine() -> Row:
    """Return a row with the card, the driver and the versions."""
    name = call("cuDeviceGetName", 96, call("cuDeviceGet", 0)).partition(b"\0")[0].decode()
    driver = int(call("cuDriverGetVersion"))
    return Row(
        "machine",
        f"{cuda.device_count()} x {name}, CUDA {driver // 1000}.{driver % 1000 // 10}, "
        f"{library().name} {dotted(library().version)}, Python {platform.python_version()}, "
        f"nc10d {version()}",
    )


def version() -> str:
    """Return the checkout's commit; the package's version in a copy, or without git."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        described = ""
    return described or nc10d.__version__
