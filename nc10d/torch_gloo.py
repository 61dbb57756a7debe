"""nc10d's groups wherever torch.distributed is asked for "gloo"; the user's side: replace_gloo.md.

A class takes the place of torch's ProcessGroupGloo. torch calls the class for the backend "gloo",
and programs call it themselves: the call makes an nc10d group. torch's names and queries stay, so
`get_backend()` says "gloo". This module imports nothing: the first group imports nc10d's modules.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any, cast

from nc10d.base.run_to_end import import_to_end

GLOO = "gloo"
_log = logging.getLogger("nc10d.torch")


class _Asked(threading.local):
    """What torch makes a group from in this thread: its arguments by name; None elsewhere."""

    group: dict[str, Any] | None = None


_asked = _Asked()


class GloosPlace(type):
    """The class of ProcessGroupGloo's stand-in; `theirs` is torch's class.

    Its instances are nc10d's groups in gloo's place, and groups of torch's class.
    """

    theirs: type

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        """Make a group; see nc10d.torch.backend.creation.create_as_gloo."""
        create = import_to_end("nc10d.torch.backend.creation").create_as_gloo
        return create(cls.theirs, _asked.group, *arguments, **options)

    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, cls.theirs) or getattr(x, "torch_name", None) == GLOO

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.theirs, name)


def replace_gloo() -> None:
    """Make torch.distributed give an nc10d group wherever it is asked for "gloo"; again: no change.

    Call it on every rank before the first group is made. NC10D_AS_GLOO=1 in the environment, as
    `nc10d.run --as-gloo` sets it, does the same when torch is imported. Groups that exist stay
    gloo's. RuntimeError if torch has no gloo. Blocks nobody.

    >>> import nc10d.torch, torch.distributed as dist
    >>> nc10d.torch.replace_gloo()
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> dist.get_backend(), nc10d.torch.group_of().size()
    ('gloo', 1)
    """
    modules: list[Any] = [
        importlib.import_module(f"torch.{name}")
        for name in ("distributed.distributed_c10d", "distributed", "_C._distributed_c10d")
    ]
    c10d = modules[0]
    theirs = getattr(c10d, "ProcessGroupGloo", None)
    if theirs is None:
        raise RuntimeError('this torch has no gloo to replace; its groups can be "nc10d"')
    if isinstance(theirs, GloosPlace):
        return
    stand_in = GloosPlace(theirs.__name__, (), {"theirs": theirs, "__module__": theirs.__module__})
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
