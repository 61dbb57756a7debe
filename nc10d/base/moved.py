"""Names the new command where an old module is imported or run with `python -m`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "nc10d.bench.compare": "benchmarks compare",
    "nc10d.bench.coalescing": "benchmarks coalescing",
    "nc10d.bench.ddp": "benchmarks ddp",
    "nc10d.bench.engine": "benchmarks engine",
    "nc10d.bench.first_use": "benchmarks first-use",
    "nc10d.bench.flatten": "benchmarks flatten",
    "nc10d.bench.imports": "benchmarks imports",
    "nc10d.bench.kernels": "benchmarks kernels",
    "nc10d.bench.objects": "benchmarks objects",
    "nc10d.bench.overlap": "benchmarks overlap",
    "nc10d.bench.predict": "benchmarks model",
    "nc10d.bench.calibrate": "benchmarks check-model",
    "nc10d.bench.registered": "benchmarks registered",
    "nc10d.bench.store": "benchmarks store",
    "nc10d.debug.faults": "benchmarks faults",
    "nc10d.debug.kills": "benchmarks kills",
    "nc10d.testing.simulation": "simulation",
}
"""Commands of a checkout, by the module that they had in the package."""


class _MovedFinder:
    """A finder that finds nothing, and raises for modules in MOVED."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError with the new command, if the module has moved."""
        if name in MOVED:
            raise ModuleNotFoundError(
                f"{name} has moved: in a checkout, python -m {MOVED[name]}", name=name
            )
        return None


def install() -> None:
    """Ask this finder last, so that it costs nothing where a module exists; idempotent."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())
