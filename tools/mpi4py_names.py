"""Compare mpi4py's names with nc10d's: `python tools/mpi4py_names.py --write`.

Writes docs/from_mpi4py.md; without --write it prints the page. A test compares the page with the
installed mpi4py. The exit code is 1 where a public name has no entry in the tables below, or where
an entry names something that nc10d lacks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from_mpi4py.md"
SAME, DIFFERENT, ABSENT = "same", "different", "absent"

NUMBERS = "equal counts for all ranks; an array of equal chunks"
LISTS = "a list with an array per rank, of any sizes, in place of counts and displacements"
CALLS = {
    "Allreduce": (DIFFERENT, "`nc10d.all_reduce(x)`: in place; `out=` keeps the input"),
    "Reduce": (DIFFERENT, "`nc10d.reduce(x, dst)`: in place on the root; `out=` keeps the input"),
    "Bcast": (SAME, "`nc10d.broadcast(x, src)`"),
    "Barrier": (SAME, "`nc10d.barrier()`; `nc10d.monitored_barrier()` names the missing ranks"),
    "Allgather": (SAME, f"`nc10d.all_gather_into_tensor(out, x)`: {NUMBERS}"),
    "Allgatherv": (DIFFERENT, f"`nc10d.all_gather(outs, x)`: {LISTS}"),
    "Gather": (SAME, f"`nc10d.gather_single(out, x, dst)`: {NUMBERS}"),
    "Gatherv": (DIFFERENT, f"`nc10d.gather(x, outs, dst)`: {LISTS}"),
    "Scatter": (SAME, f"`nc10d.scatter_single(out, x, src)`: {NUMBERS}"),
    "Scatterv": (DIFFERENT, f"`nc10d.scatter(out, inputs, src)`: {LISTS}"),
    "Alltoall": (SAME, "`nc10d.all_to_all_single(out, x)`"),
    "Alltoallv": (
        DIFFERENT,
        "`nc10d.all_to_all_single(out, x, output_split_sizes, input_split_sizes)`: rows per rank",
    ),
    "Alltoallw": (DIFFERENT, "`nc10d.all_to_all(outs, inputs)`: arrays of any sizes, one dtype"),
    "Reduce_scatter_block": (SAME, "`nc10d.reduce_scatter_tensor(out, x)`"),
    "Reduce_scatter": (DIFFERENT, f"`nc10d.reduce_scatter(out, inputs)`: {LISTS}"),
    "Scan": (SAME, "`nc10d.scan(x)`: in place; `out=` keeps the input"),
    "Exscan": (SAME, "`nc10d.exscan(x)`: in place; `identity=True` fills rank 0's"),
    "Send": (SAME, "`nc10d.send(x, dst, tag=...)`"),
    "Recv": (
        DIFFERENT,
        "`nc10d.recv(x, src, tag=...)`: `x` has exactly the message's size; returns the sender",
    ),
    "Sendrecv": (SAME, "`nc10d.sendrecv(x, dst, out, src)`; returns the sender"),
    "Sendrecv_replace": (SAME, "`nc10d.sendrecv_replace(x, dst, src)`; returns the sender"),
    "Probe": (SAME, "`nc10d.probe(src, tag=...)`: a `nc10d.MessageInfo`, with a timeout"),
}
"""Calls on arrays. `Iallreduce` follows from `Allreduce`, and so on."""
STARTED = {"Isend": "`nc10d.isend(x, dst)`", "Irecv": "`nc10d.irecv(x, src)`"}
OBJECTS = {
    "allgather": "`nc10d.all_gather_object(places, obj)`",
    "bcast": "`nc10d.broadcast_object_list([obj], src)`",
    "gather": "`nc10d.gather_object(obj, places, dst)`",
    "scatter": "`nc10d.scatter_object_list(place, objs, src)`",
    "send": "`nc10d.send_object_list([obj], dst)`",
    "recv": "`nc10d.recv_object_list([None], src)`",
}
"""Calls on objects: no pickles unless both sides allow them."""
_OTHER = {
    (DIFFERENT, "`nc10d.batch_isend_irecv`, or threads: object messages block"): "isend irecv",
    (DIFFERENT, "`nc10d.all_gather_object`, then reduce in Python"): "allreduce reduce",
    (DIFFERENT, "`nc10d.all_gather_object`, then take a part"): "alltoall scan exscan",
    (DIFFERENT, "`nc10d.send_object_list` and `nc10d.recv_object_list` in an agreed order"): (
        "sendrecv"
    ),
    (SAME, "`nc10d.barrier()`"): "barrier",
    (SAME, "`nc10d.iprobe(src, tag=...)`: None if no message has come"): "Iprobe",
    (DIFFERENT, "two started messages: `nc10d.isend` and `nc10d.irecv`"): (
        "Isendrecv Isendrecv_replace"
    ),
    (SAME, "`nc10d.probe` and `nc10d.iprobe` see the size; an object's message has two parts"): (
        "probe iprobe"
    ),
    (ABSENT, "a probed message stays in the queue: `nc10d.recv` with its `src` and `tag`"): (
        "Mprobe Improbe mprobe improbe"
    ),
    (ABSENT, "`send` is the only mode; it may return before the receive, as MPI's"): """
        Bsend Ibsend bsend ibsend Rsend Irsend Ssend Issend ssend issend Attach_buffer Detach_buffer
        Flush_buffer Iflush_buffer""",
    (ABSENT, "no partitioned messages: a message per part"): "Psend_init Precv_init",
    (SAME, "`nc10d.get_rank(group)`; `group.rank`"): "Get_rank rank",
    (SAME, "`nc10d.get_world_size(group)`; `group.size`"): "Get_size size",
    (DIFFERENT, "`nc10d.new_group(ranks)`, `nc10d.split_group(group, lists)`"): (
        "Split Create Create_group Create_from_group"
    ),
    (DIFFERENT, "`nc10d.new_subgroups()`: the ranks of each host"): "Split_type",
    (DIFFERENT, "`nc10d.new_group(ranks)` with the same ranks"): (
        "Dup Clone Idup Dup_with_info Idup_with_info"
    ),
    (SAME, "`nc10d.destroy_process_group(group)`"): "Free Disconnect free",
    (DIFFERENT, "`nc10d.abort_process_group(group)`: all ranks raise, and go on"): "Abort",
    (SAME, "`nc10d.shrink_group()`: a group of the survivors"): "Shrink Ishrink",
    (DIFFERENT, "`nc10d.shrink_group()` agrees on the dead, too; `nc10d.PeerLost` names one"): (
        "Get_failed Ack_failed Agree Iagree"
    ),
    (DIFFERENT, "`nc10d.abort_process_group(group)`; a failure revokes a group by itself"): (
        "Revoke Is_revoked"
    ),
    (DIFFERENT, "`nc10d.init_device_mesh(...)`: groups along each dimension"): "Create_cart",
    (DIFFERENT, "`group.group_name`, `group.group_desc`"): "Get_name Set_name name",
    (DIFFERENT, "`nc10d.get_process_group_ranks(group)`"): "Get_group group Compare",
    (ABSENT, "errors are exceptions"): (
        "Call_errhandler Create_errhandler Get_errhandler Set_errhandler"
    ),
    (ABSENT, "a group has no attributes: keep them in a dict"): (
        "Create_keyval Free_keyval Delete_attr Get_attr Set_attr Get_info Set_info info"
    ),
    (ABSENT, "a group's ranks come from one world: no clients, no spawning"): """
        Accept Connect Join Spawn Spawn_multiple Get_parent Create_intercomm Is_inter Is_intra
        is_inter is_intra""",
    (ABSENT, "send to neighbours; a mesh has lines of ranks only"): """
        Cart_map Create_dist_graph Create_dist_graph_adjacent Create_graph Graph_map Get_topology
        topology is_topo""",
    (ABSENT, "no handles of C"): "f2py py2f fromhandle fromint toint handle",
}
OTHER = {name: entry for entry, names in _OTHER.items() for name in names.split()}
"""The other names of a communicator."""
_REQUESTS = {
    (SAME, "`nc10d.Work.wait(timeout)`"): "Wait wait",
    (SAME, "`nc10d.Work.is_completed()`"): "Test test",
    (DIFFERENT, "`nc10d.Work.is_completed()`; the Work stays"): "Get_status get_status",
    (SAME, "`nc10d.wait_any(works)`"): "Waitany waitany",
    (SAME, "`nc10d.wait_some(works)`"): "Waitsome waitsome",
    (DIFFERENT, "a loop of `Work.wait()`: works of a group end in order"): "Waitall waitall",
    (DIFFERENT, "a loop of `Work.is_completed()`"): """Testall testall Testany testany Testsome
        testsome Get_status_all Get_status_any Get_status_some get_status_all get_status_any
        get_status_some""",
    (ABSENT, "an operation that all ranks have begun is not taken back"): "Cancel cancel",
    (SAME, "a Work that nobody refers to is freed after its end"): "Free free",
    (ABSENT, "no handles of C"): "f2py py2f fromhandle fromint toint handle",
}
_STATUSES = {
    (DIFFERENT, "what `recv` returns; `nc10d.MessageInfo.src` of a probe"): (
        "Get_source source Set_source"
    ),
    (DIFFERENT, "`nc10d.MessageInfo.tag`"): "Get_tag tag Set_tag",
    (DIFFERENT, "`nc10d.MessageInfo.nbytes`"): (
        "Get_count Get_elements count Set_elements tomemory"
    ),
    (ABSENT, "errors are exceptions, and nothing is cancelled"): """
        Get_error error Set_error Is_cancelled cancelled Set_cancelled""",
    (ABSENT, "no handles of C"): "f2py py2f",
}
_VALUES = {
    (SAME, "`nc10d.SUM`, and so on"): "SUM MAX MIN BAND BOR BXOR",
    (SAME, "`nc10d.PRODUCT`"): "PROD",
    (SAME, "`nc10d.LAND`, `LOR`, `LXOR`"): "LAND LOR LXOR",
    (SAME, "`nc10d.ARGMAX`, `ARGMIN` on `(values, indices)`; a NaN wins"): "MAXLOC MINLOC",
    (ABSENT, "they serve one-sided access"): "REPLACE NO_OP OP_NULL",
    (SAME, "the default group, `nc10d.get_default_group()`"): "COMM_WORLD",
    (DIFFERENT, "`nc10d.new_group([rank], use_local_synchronization=True)`"): "COMM_SELF",
    (DIFFERENT, "`nc10d.GroupMember.NON_GROUP_MEMBER`, which calls accept"): "COMM_NULL",
    (SAME, "`src=None`"): "ANY_SOURCE",
    (DIFFERENT, "`tag=None` of `nc10d.probe`; a receive names its tag"): "ANY_TAG",
    (ABSENT, "leave the call out"): "PROC_NULL",
    (DIFFERENT, "the default: all_reduce is in place"): "IN_PLACE",
}
_FUNCTIONS = {
    (SAME, "`nc10d.init_process_group()`; a launcher of MPI needs no MPI here"): "Init Init_thread",
    (SAME, "`nc10d.destroy_process_group()`"): "Finalize",
    (SAME, "`nc10d.is_initialized()`"): "Is_initialized Is_finalized",
    (SAME, "any thread may call"): "Query_thread Is_thread_main",
    (SAME, "`time.perf_counter()`"): "Wtime Wtick",
    (DIFFERENT, "`nc10d.empty(count)`: memory that the host's ranks read directly"): (
        "Alloc_mem Free_mem"
    ),
    (SAME, "`socket.gethostname()`"): "Get_processor_name",
    (SAME, "`nc10d.__version__`"): "Get_version Get_library_version get_vendor",
    (DIFFERENT, "`nc10d.init_device_mesh` takes the shape"): "Compute_dims",
    (DIFFERENT, "`nc10d.TCPStore`: values by key"): (
        "Publish_name Lookup_name Unpublish_name Open_port Close_port"
    ),
}
_CLASSES = {
    (SAME, "`nc10d.ProcessGroup`"): "Comm Intracomm",
    (SAME, "`nc10d.Work`"): "Request",
    (DIFFERENT, "`nc10d.Future`, which any thread completes"): "Grequest",
    (DIFFERENT, "`nc10d.MessageInfo`, or the sender that `recv` returns"): "Status",
    (DIFFERENT, "a list of ranks"): "Group",
    (
        DIFFERENT,
        "`nc10d.ReduceOp`; a function by `@nc10d.reduction` ([reductions](reductions.md))",
    ): "Op",
    (DIFFERENT, "`nc10d.DType`: an array knows its dtype and strides; no derived types"): (
        "Datatype"
    ),
    (DIFFERENT, "`nc10d.DistError` and its children"): "Exception Errhandler",
    (DIFFERENT, "`nc10d.DeviceMesh`"): "Cartcomm Topocomm",
    (DIFFERENT, "calls take any array; `nc10d.as_buffer`"): "buffer memory",
    (DIFFERENT, "`nc10d.register_type`; `allow_pickle=True`"): "Pickle",
    (DIFFERENT, "calls repeat for nothing: a repeated call finds its prepared program"): "Prequest",
    (ABSENT, "no one-sided access: messages, or `nc10d.TCPStore` for counters"): "Win",
    (ABSENT, "no parallel files: h5py, zarr, torch's distributed checkpoints"): "File",
    (ABSENT, "ranks of other worlds are reached by their own group or store"): "Intercomm Session",
    (ABSENT, "send to neighbours"): "Graphcomm Distgraphcomm",
    (ABSENT, "options are arguments"): "Info",
    (ABSENT, "`nc10d.recv` takes the probed message"): "Message",
    (ABSENT, "all arrays are objects"): "BottomType InPlaceType BufferAutomaticType",
}


def by_name(table: dict[tuple[str, str], str]) -> dict[str, tuple[str, str]]:
    """Return the entry of each name of a table."""
    return {name: entry for entry, names in table.items() for name in names.split()}


def of_communicator(name: str) -> tuple[str, str]:
    """Return the state of a method of a communicator; "?" if it has no entry."""
    if name in CALLS:
        return CALLS[name]
    if name in STARTED:
        return SAME, STARTED[name]
    if name in OBJECTS:
        return SAME, f"{OBJECTS[name]}, for the objects of [objects.md](objects.md)"
    if name in OTHER:
        return OTHER[name]
    if name.endswith("_init"):
        return ABSENT, "a repeated call finds its prepared program; a block has `plan()`"
    base = name[1:].capitalize()
    if name.startswith("I") and base in CALLS:
        state, text = CALLS[base]
        call = text.partition(")`")[0]
        comma = "" if call.endswith("(") else ", "
        return state, text if state == ABSENT else f"{call}{comma}async_op=True)`"
    return ABSENT, "?"


def rows(names: list[str], entry: Any) -> Iterator[str]:
    """Yield a line for each state of a table, with the names that share it."""
    shared: dict[tuple[str, str], list[str]] = {}
    for name in names:
        shared.setdefault(entry(name), []).append(name)
    for (state, text), alike in shared.items():
        yield f"| {', '.join(f'`{name}`' for name in alike)} | {state} | {text} |"


def public(thing: Any) -> list[str]:
    """Return the names of a class or module of mpi4py that programs use."""
    return [name for name in dir(thing) if not name.startswith("_")]


def table(head: str, names: list[str], entry: Any) -> str:
    """Return a table of Markdown."""
    lines = [f"| {head} | nc10d | how |", "|---|---|---|", *rows(names, entry)]
    return "\n".join(lines)


def page() -> str:
    """Return the page for the installed mpi4py."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    def entries(entries: dict[tuple[str, str], str]) -> Any:
        return lambda name: by_name(entries).get(name, (ABSENT, "?"))

    functions = [name for name in by_name(_FUNCTIONS) if hasattr(MPI, name)]
    classes = [name for name in public(MPI) if isinstance(getattr(MPI, name), type)]
    values = [name for name in by_name(_VALUES) if hasattr(MPI, name)]
    return f"""# From mpi4py

Generated by `python tools/mpi4py_names.py --write` from mpi4py {mpi4py.__version__}; do not edit. Each public name of a
communicator, request and status has a row. *Same* means another spelling of the same thing. A method of a communicator
is also a method of `nc10d.ProcessGroup`, where ranks are the group's.

## Which rules differ?

- **Ranks are global** in `nc10d.send(x, dst)`, whatever the group. `group.send(x, dst)` takes ranks in the group.
- **Arrays say everything.** There are no counts, datatypes or buffers: `[x, n, MPI.DOUBLE]` is `x[:n]`. Strided arrays
  are sent as they are, so a column needs no vector type.
- **Results are the same bits on every rank and in every run.** Sums are folded in rank order.
- **A mistake is an error.** Ranks that make different calls all get a `CollectiveMismatch`, which names both calls. MPI
  hangs, or overwrites memory.
- **Objects are no pickles**, unless both sides say so ([objects.md](objects.md)).
- **A dead rank ends the call on all others**, with an error that names it ([failures.md](failures.md)).
- **`mpirun` still starts the job.** nc10d needs no MPI, but reads its launcher's variables ([running.md](running.md)).
  `init_process_group("mpi")` keeps MPI below, for a network that only MPI knows ([backends.md](backends.md)).

## Communicators

{table("name of a communicator", public(MPI.Intracomm), of_communicator)}

## Requests

{table("name of Request", public(MPI.Request), entries(_REQUESTS))}

## Statuses

{table("name of Status", public(MPI.Status), entries(_STATUSES))}

## Classes

{table("class", classes, entries(_CLASSES))}

## Functions

Functions that are not in the table manage MPI itself (error codes, addresses, its library) and have no place here.

{table("function", functions, entries(_FUNCTIONS))}

## Constants

MPI's names of datatypes, error codes and modes have no place here: dtypes are NumPy's, and errors are exceptions.

{table("constant", values, entries(_VALUES))}

Next: [collectives.md](collectives.md), for each call with a picture.
"""  # noqa: E501


def unknown(text: str) -> list[str]:
    """Return the rows without an entry, and the names of nc10d that do not exist."""
    wrong = [line for line in text.splitlines() if line.endswith("| ? |")]
    for name in sorted(set(re.findall(r"`nc10d\.([\w.]+)", text))):
        found: Any = import_module("nc10d")
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            wrong.append(f"nc10d.{name} does not exist")
    return wrong


def main() -> int:
    """Write or print the page; return 1 if a name has no entry."""
    text = page()
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(text)
    else:
        print(text)
    wrong = unknown(text)
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
