"""Names the new command where an old module is imported or run with `python -m`."""

from __future__ import annotations

import sys

_SAME_NAME = (
    *("compare", "coalescing", "ddp", "engine", "first_use", "flatten", "imports", "kernels"),
    *("objects", "overlap", "registered", "store"),
)
MOVED = {f"nc10d.bench.{name}": f"benchmarks {name.replace('_', '-')}" for name in _SAME_NAME} | {
    "nc10d.bench.predict": "benchmarks model",
    "nc10d.bench.calibrate": "benchmarks check-model",
    "nc10d.debug.faults": "benchmarks faults",
    "nc10d.debug.kills": "benchmarks kills",
    "nc10d.testing.simulation": "simulation",
}
"""Commands of a checkout, by the module that they had in the package."""


class _MovedFinder:
    """A finder that finds nothing, and raises for modules in MOVED."""

    def find_spec(self, name: str, *_: object) -> None:
        """Raise ModuleNotFoundError with the new command, if the module has moved."""
        if name in MOVED:
            message = f"{name} has moved: in a checkout, python -m {MOVED[name]}"
            raise ModuleNotFoundError(message, name=name)


def install() -> None:
    """Ask this finder last, so that it costs nothing where a module exists; idempotent."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())
