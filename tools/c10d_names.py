"""Compare torch.distributed's public names with nc10d's: `python tools/c10d_names.py --write`.

Writes docs/c10d_names.md; without --write it prints the page. A name is absent with a reason of the
table below; a name without a reason makes the exit code 1. Parameters are those of
inspect.signature, without private ones; classes of C++ have none that can be read. A test compares
the page with the installed torch, if that is of the page's version.
"""

from __future__ import annotations

import enum
import inspect
import sys
import types
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "c10d_names.md"

_ABSENT = {
    "an options struct of C++; here options are arguments": """AllToAllOptions
        AllreduceCoalescedOptions AllreduceOptions BarrierOptions BroadcastOptions GatherOptions
        ReduceOptions ReduceScatterOptions ScatterOptions""",
    "torch's own plumbing": """RankType c10d_logger config log logging_handlers record_comm
        utils ProcessGroup.boxed ProcessGroup.unbox ProcessGroup.use_pg_for_symm_mem_rendezvous
        Work.boxed Work.get_future_result Work.unbox""",
    "the hooks of nc10d.reducer.hooks take its place": "BuiltinCommHookType",
    "the type of a group's name: a str": "GroupName",
    "torch's own hooks run on nc10d's DistributedDataParallel ([training.md](training.md))": (
        "algorithms"
    ),
    "differentiable collectives are not there yet": "autograd",
    "a debugger's prompt on a single rank is no purpose of nc10d": "breakpoint",
    "`default_pg_timeout` is a name of nc10d itself": "constants",
    "remote calls are no purpose of nc10d": "remote_device rpc",
    "c10d's form with lists and options: the group's methods have the names of the calls": """
        ProcessGroup.all_gather_single_coalesced ProcessGroup.allgather
        ProcessGroup.allgather_coalesced ProcessGroup.allgather_into_tensor_coalesced
        ProcessGroup.allreduce ProcessGroup.allreduce_coalesced ProcessGroup.alltoall
        ProcessGroup.alltoall_base ProcessGroup.recv_anysource
        ProcessGroup.reduce_scatter_single_coalesced
        ProcessGroup.reduce_scatter_tensor_coalesced ProcessGroupGloo.allgather_coalesced
        ProcessGroupGloo.allreduce_coalesced ProcessGroupGloo.alltoall
        ProcessGroupGloo.alltoall_base ProcessGroupGloo.recv_anysource""",
    "its only option is `timeout`": "ProcessGroupGloo.Options",
    "`NC10D_SOCKET_IFNAME` names the interface ([environment.md](environment.md))": """
        ProcessGroupGloo.Device ProcessGroupGloo.create_default_device
        ProcessGroupGloo.create_device""",
    "`nc10d.shrink_group`": "ProcessGroupGloo.shrink",
    "torch's own questions to a group of C++": """ProcessGroupGloo.allocate_tensor
        ProcessGroupGloo.eager_connect_single_device ProcessGroupGloo.mem_allocator
        ProcessGroupGloo.memory_stats ProcessGroupGloo.resume ProcessGroupGloo.suspend
        ProcessGroupGloo.setUsePgForSymmMemRendezvous ProcessGroupGloo.supports_coalescing
        ProcessGroupGloo.supports_shrinking ProcessGroupGloo.supports_splitting
        ProcessGroupGloo.supports_tensor_alloc ProcessGroupGloo.supports_time_estimate""",
    "names of Backend": """ProcessGroup.BackendType ProcessGroup.CUSTOM ProcessGroup.GLOO
        ProcessGroup.MPI ProcessGroup.NCCL ProcessGroup.UCC ProcessGroup.UNDEFINED
        ProcessGroup.XCCL""",
    "`device_id`": "ProcessGroup.bound_device_id",
    "a backend's type is its name": "Backend.backend_type_map",
    "`nc10d.register_backend`, whose backends derive from nc10d's": "Backend.register_backend",
    "groups are made of their parent's ranks": "ProcessGroup.merge_remote_group",
    "`nc10d.monitored_barrier(group)`": """ProcessGroup.monitored_barrier
        ProcessGroupGloo.monitored_barrier""",
    "`result()` of a receive is the sender's rank": "Work.source_rank",
    "`begin`": "Reducer.prepare_for_backward",
    "the logger reads a pass when it is over": """Logger.set_construction_data_and_log
        Logger.set_error_and_log Logger.set_runtime_stats_and_log""",
    "`nc10d.premul_sum(factor)`": "ReduceOp.PREMUL_SUM",
    "`nc10d.ops.ReductionKind`": "ReduceOp.RedOpType",
    "`kind`": "ReduceOp.op",
}
ABSENT = {name: reason for reason, names in _ABSENT.items() for name in names.split()}
"""Names that nc10d lacks, with the reason or the name to take instead."""
DIFFERENT = {
    "BackendConfig": "a name, pairs or None",
    "DeviceMesh": "its groups have the default group's backends",
    "init_device_mesh": "its groups have the default group's backends",
    "rendezvous": "a method's URL",
    "shrink_group": "the survivors agree on the ranks that are left",
}
"""Why parameters differ."""
NEWER = "gather_single gather_into_tensor get_backend_impl set_timeout"
"""The public names that torch 2.14 adds."""
_NOT_NAMES = {"sys", "torch", "traceback", "typing", "logging", "contextlib", "timedelta"}


def parameters(function: Any) -> list[tuple[str, bool]] | None:
    """Return each parameter and whether it must be given; None if they can't be read."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        (p.name, p.default is p.empty)
        for p in found
        if not p.name.startswith("_") and p.kind not in skipped
    ]


def compared(name: str, theirs: Any, ours: Any) -> str:
    """Return how a name of nc10d compares: equal parameters, more, or others."""
    if isinstance(theirs, types.ModuleType) or not callable(theirs):
        return "present"
    torchs, own = parameters(theirs), parameters(ours)
    if torchs is None or own is None or not callable(ours):
        return "present"
    names, more = [n for n, _ in torchs], [n for n, _ in own]
    needed = {n for n, must in own if must} - {n for n, must in torchs if must}
    if more[: len(names)] == names and not needed:
        extra = more[len(names) :]
        return f"same, and {', '.join(extra)}" if extra else "same"
    reason = DIFFERENT.get(name)
    text = f"different: ({', '.join(more)}) for torch's ({', '.join(names)})"
    return f"{text}; {reason}" if reason else text


def public(module: Any) -> list[str]:
    """Return the names of torch.distributed that programs use."""
    found = {name for name in dir(module) if not name.startswith("_")}
    return sorted((found | {*module.distributed_c10d.__all__}) - _NOT_NAMES, key=str.lower)


def rows(torchs: Any, nc10d: Any) -> Iterator[tuple[str, str]]:
    """Yield each public name of torch.distributed with the state of nc10d's."""
    for name in public(torchs):
        if hasattr(nc10d, name):
            theirs = getattr(torchs, name, None)
            yield name, compared(name, theirs, getattr(nc10d, name))
        else:
            yield name, f"absent: {ABSENT.get(name, '?')}"
    for name in NEWER.split():
        if not hasattr(torchs, name):
            yield name, "of torch 2.14: present" if hasattr(nc10d, name) else "absent: ?"


_OWN_NAME = "NC10D"
"""The attribute of torch's Backend that nc10d has registered, where it is installed."""


def attributes(torchs: Any, nc10d: Any) -> Iterator[tuple[str, str]]:
    """Yield each attribute that a class of torch.distributed has and nc10d's lacks."""
    for kind in public(torchs):
        theirs, ours = getattr(torchs, kind, None), getattr(nc10d, kind, None)
        if not (isinstance(theirs, type) and isinstance(ours, type)):
            continue
        own = {*dir(ours), *_instance_names(ours)}
        for name in dir(theirs):
            known = name in own or hasattr(ours, name) or name == _OWN_NAME
            if not (name.startswith("_") or known):
                yield f"{kind}.{name}", ABSENT.get(f"{kind}.{name}", "?")


def _instance_names(kind: type) -> set[str]:
    """Return the attributes of an enum's members, or those that constructors assign."""
    if issubclass(kind, enum.Enum):
        return {"name", "value"}
    codes = (vars(base).get("__init__") for base in kind.__mro__)
    found = (getattr(init, "__code__", None) for init in codes)
    return {name for code in found if code for name in code.co_names}


def table(head: tuple[str, str], lines: Iterable[tuple[str, str]]) -> str:
    """Return a table of Markdown."""
    body = "".join(f"| `{name}` | {text} |\n" for name, text in lines)
    return f"| {head[0]} | {head[1]} |\n|---|---|\n{body}"


def page() -> str:
    """Return the page for the installed torch."""
    warnings.simplefilter("ignore")
    import torch

    import nc10d
    import nc10d.torch

    names = table(("name of torch.distributed", "nc10d"), rows(torch.distributed, nc10d))
    lacking = table(("attribute", "why, or its name here"), attributes(torch.distributed, nc10d))
    private = ", ".join(f"`{name}`" for name in nc10d.distributed_c10d.__all__)
    version = torch.__version__.partition("+")[0]
    return f"""# torch.distributed's names and nc10d's

Generated by `python tools/c10d_names.py --write` from torch {version}; do not edit. *Same* means a name with the same
parameters in the same order, the same ones optional. *Present* means that parameters can't be compared. Every `timeout`
takes seconds or a timedelta, every tensor may be another library's array.

{names}
`nc10d.distributed_c10d` also has the private names that programs use: {private}.
It lacks `_object_to_tensor` and `_tensor_to_object`: an object travels as a message, which may be several arrays. The
object calls, such as `broadcast_object_list`, take their place.

## Attributes of classes

Those that a class of torch.distributed has and nc10d's class of this name lacks:

{lacking}
Next: [training.md](training.md), for programs that use torch.
"""  # noqa: E501


def main() -> int:
    """Write or print the page; return 1 if a name has no reason."""
    text = page()
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(text)
    else:
        print(text)
    unknown = [line for line in text.splitlines() if line.endswith("? |")]
    print(*unknown, sep="\n", file=sys.stderr)
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
