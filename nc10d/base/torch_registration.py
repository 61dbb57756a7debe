"""The registration with torch.distributed, without an import of torch: as "nc10d", or for "gloo".

In gloo's place, a class stands where torch's ProcessGroupGloo was. torch calls it for the backend
"gloo", and programs call it themselves: the call makes a group of nc10d's. torch's names and
queries stay, so `get_backend()` says "gloo".
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

NAME = "nc10d"
GLOO = "gloo"
_log = logging.getLogger("nc10d.torch")


def register(create: Callable[..., object], create_as_gloo: Callable[..., object]) -> None:
    """Register the backend "nc10d", whose groups `create` makes; again: no change.

    The backend serves the CPU, and CUDA where torch finds a GPU. With NC10D_AS_GLOO=1,
    `create_as_gloo` makes groups in gloo's place. Nothing happens where torch.distributed has not
    been imported, or is not available.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if NAME.upper() not in distributed.Backend._plugins:
        # torch allocates tensors on a device other than the CPU if a backend claims to serve one.
        found = sys.modules["torch"].cuda.device_count()
        devices = ["cpu", "cuda"] if found else ["cpu"]
        distributed.Backend.register_backend(NAME, create, extended_api=True, devices=devices)
    if os.environ.get("NC10D_AS_GLOO") == "1":
        replace_gloo(create_as_gloo)


class _Asked(threading.local):
    """What torch makes a group from in this thread: its arguments by name; None elsewhere."""

    group: dict[str, Any] | None = None


_asked = _Asked()


class GloosPlace(type):
    """The type of ProcessGroupGloo's stand-in, whose instances are torch's and nc10d's groups.

    A class that a program derives from the stand-in has torch's class as base, and makes gloo's
    groups. `theirs` is torch's class. `create(theirs, asked, *arguments, **options)` makes a group
    from the arguments of a call; `asked` are torch's own, or None if a program makes the call.
    """

    theirs: type
    create: Callable[..., Any]

    def __new__(cls, name: str, bases: tuple[type, ...], members: dict[str, Any]) -> Any:
        """Make the stand-in, or a program's class that is derived from it."""
        gloos = tuple(base.theirs if isinstance(base, GloosPlace) else base for base in bases)
        if gloos == bases:
            return super().__new__(cls, name, bases, members)
        return type(gloos[0])(name, gloos, members)

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        """Make a group."""
        return cls.create(cls.theirs, _asked.group, *arguments, **options)

    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, cls.theirs) or getattr(x, "torch_name", None) == GLOO

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.theirs, name)


def replace_gloo(create: Callable[..., Any]) -> None:
    """Put the stand-in, whose groups `create` makes, into torch.distributed; again: no change.

    Logs a warning if torch has no gloo.
    """
    modules: list[Any] = [
        importlib.import_module(f"torch.{name}")
        for name in ("distributed.distributed_c10d", "distributed", "_C._distributed_c10d")
    ]
    c10d = modules[0]
    theirs = getattr(c10d, "ProcessGroupGloo", None)
    if theirs is None:
        _log.warning('this torch has no gloo to replace; ask for the backend "nc10d"')
    if theirs is None or isinstance(theirs, GloosPlace):
        return
    members = {"theirs": theirs, "create": staticmethod(create), "__module__": theirs.__module__}
    stand_in = GloosPlace(theirs.__name__, (), members)
    for module in modules:
        module.ProcessGroupGloo = stand_in
    c10d._new_process_group_helper = _asking(c10d._new_process_group_helper, seen=True)
    c10d._create_process_group_wrapper = _asking(c10d._create_process_group_wrapper, seen=False)
    _log.debug("nc10d makes torch.distributed's groups in gloo's place")


def _asking(theirs: Callable[..., Any], seen: bool) -> Callable[..., Any]:
    """Return torch's function, in which the stand-in sees its arguments, or none."""
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        outer = _asked.group
        _asked.group = signature.bind(*arguments, **options).arguments if seen else None
        try:
            return theirs(*arguments, **options)
        finally:
            _asked.group = outer

    return cast(Callable[..., Any], wrapper)
