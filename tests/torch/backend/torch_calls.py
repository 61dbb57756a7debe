"""Every public call of torch.distributed and of its groups, and how two ranks make it.

A row takes a tensor of its rank with four elements, and returns what the call gives or writes.
"""

import tempfile
from datetime import timedelta
from itertools import count
from types import BuiltinFunctionType, FunctionType

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as nn

LIMIT = timedelta(seconds=60)
turns = count()


def public_functions():
    """Return the names of torch.distributed's public functions."""
    kinds = FunctionType, BuiltinFunctionType  # isinstance asks a deprecated object for its class
    return {name for name in dir(dist) if name[0] != "_" and type(vars(dist).get(name)) in kinds}


def public_methods():
    """Return the names of a group's public methods."""
    found = {name: getattr(dist.ProcessGroup, name) for name in dir(dist.ProcessGroup)}
    return {
        name
        for name, value in found.items()
        if name[0] != "_" and callable(value) and not isinstance(value, type)
    }


def peer():
    return 1 - dist.get_rank()


def two(x):
    return [torch.zeros_like(x), torch.zeros_like(x)]


def pair(x):
    return [x, x + 1]


def blank(x, count):
    return torch.zeros(count)


def at(rank, value, otherwise=None):
    return value if dist.get_rank() == rank else otherwise


def into(function, outs, *rest, **options):
    """Make a call whose first argument is written; wait; return that argument."""
    work = function(outs, *rest, **options)
    if isinstance(work, dist.Work):
        work.wait()
    return outs


def gathered(function, own, outs):
    outs = at(0, outs)
    function(own, outs, 0)
    return outs


def message(x, receive):
    """Rank 1 receives before it sends, so that blocking messages meet."""
    y = torch.zeros_like(x)
    if dist.get_rank():
        source = receive(y, 0)
        dist.send(x, 0)
    else:
        dist.send(x, 1)
        source = receive(y, 1)
    return source, y


def messages(x):
    y = torch.zeros_like(x)
    for work in [dist.isend(x, peer()), dist.irecv(y, peer())]:
        work.wait()
    return y


def batch(x):
    y = torch.zeros_like(x)
    parts = [dist.P2POp(dist.isend, x, peer()), dist.P2POp(dist.irecv, y, peer())]
    for work in dist.batch_isend_irecv(parts):
        work.wait()
    return y


def objects_by_message(x):
    found = [{"rank": dist.get_rank()}]
    if dist.get_rank():
        dist.recv_object_list(found, 0)
    else:
        dist.send_object_list(found, 1)
    return found


def coalesced(x, **options):
    y = x + 1
    with dist._coalescing_manager(**options) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    if options:
        manager.wait()
    return x, y


def on(group, x):
    dist.all_reduce(x, group=group)
    return x


def destroyed(x):
    group = dist.new_group([0, 1])
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    return x


def begun_again(x):
    """End the default group, and make another of its backend."""
    name, rank = dist.get_backend(), dist.get_rank()
    store = dist.PrefixStore(f"turn {next(turns)}", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group(name, store=store, rank=rank, world_size=2)
    return on(None, x)


def shrunk(x):
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        return on(dist.shrink_group([1], group), x)
    dist.new_group([1], use_local_synchronization=True)  # torch counts the groups of a rank
    return x


def met(x):
    store, rank, size = next(dist.rendezvous(f"file://{tempfile.mktemp()}", 0, 1))
    store.set("key", "value")
    return rank, size, store.get("key")


def recorded(x):
    with dist.record_comm("all_reduce"):
        return on(None, x)


def future(x):
    return dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] + 1).wait()


def gradient(x):
    y = x.clone().requires_grad_()
    nn.all_reduce(y).sum().backward()
    return y.grad


FUNCTIONS = {
    "all_gather": lambda x: into(dist.all_gather, two(x), x),
    "all_gather_coalesced": lambda x: into(dist.all_gather_coalesced, [two(x), two(x)], pair(x)),
    "all_gather_into_tensor": lambda x: into(dist.all_gather_into_tensor, blank(x, 8), x),
    "all_gather_object": lambda x: into(dist.all_gather_object, [0, 0], {"rank": dist.get_rank()}),
    "all_gather_single": lambda x: into(dist.all_gather_single, blank(x, 8), x),
    "all_reduce": lambda x: into(dist.all_reduce, x),
    "all_reduce_coalesced": lambda x: into(dist.all_reduce_coalesced, pair(x)),
    "all_to_all": lambda x: into(dist.all_to_all, two(x), pair(x)),
    "all_to_all_single": lambda x: into(dist.all_to_all_single, blank(x, 4), x, [2, 2], [2, 2]),
    "barrier": lambda x: dist.barrier(),
    "batch_isend_irecv": batch,
    "broadcast": lambda x: into(dist.broadcast, x, 1),
    "broadcast_object_list": lambda x: into(dist.broadcast_object_list, [dist.get_rank()], 1),
    "destroy_process_group": destroyed,
    "gather": lambda x: gathered(dist.gather, x, two(x)),
    "gather_object": lambda x: gathered(dist.gather_object, dist.get_rank(), [0, 0]),
    "get_backend": lambda x: len(dist.get_backend()),
    "get_backend_config": lambda x: str(dist.get_backend_config()),
    "get_backend_impl": lambda x: dist.get_backend_impl(None, torch.device("cpu")).size(),
    "get_debug_level": lambda x: dist.get_debug_level() == dist.DebugLevel.OFF,
    "get_default_backend_for_device": lambda x: dist.get_default_backend_for_device("cpu"),
    "get_global_rank": lambda x: dist.get_global_rank(dist.group.WORLD, 1),
    "get_group_rank": lambda x: dist.get_group_rank(dist.group.WORLD, 1),
    "get_node_local_rank": lambda x: dist.get_node_local_rank(3),
    "get_pg_count": lambda x: dist.get_pg_count() > 0,
    "get_process_group_ranks": lambda x: dist.get_process_group_ranks(None),
    "get_rank": lambda x: x + dist.get_rank(),
    "get_world_size": lambda x: x + dist.get_world_size(),
    "init_device_mesh": lambda x: on(dist.init_device_mesh("cpu", (2,)).get_group(), x),
    "init_process_group": begun_again,
    "irecv": messages,
    "is_available": lambda x: dist.is_available(),
    "is_backend_available": lambda x: dist.is_backend_available("nc10d"),
    "is_gloo_available": lambda x: dist.is_gloo_available(),
    "is_initialized": lambda x: dist.is_initialized(),
    "is_mpi_available": lambda x: dist.is_mpi_available(),
    "is_nccl_available": lambda x: dist.is_nccl_available(),
    "is_torchelastic_launched": lambda x: dist.is_torchelastic_launched(),
    "is_ucc_available": lambda x: dist.is_ucc_available(),
    "is_xccl_available": lambda x: dist.is_xccl_available(),
    "isend": messages,
    "monitored_barrier": lambda x: dist.monitored_barrier(timeout=LIMIT),
    "new_group": lambda x: on(dist.new_group([0, 1]), x),
    "new_subgroups": lambda x: on(dist.new_subgroups(2)[0], x),
    "new_subgroups_by_enumeration": lambda x: on(
        dist.new_subgroups_by_enumeration([[0], [1]])[0], x
    ),
    "record_comm": recorded,
    "recv": lambda x: message(x, dist.recv),
    "recv_object_list": objects_by_message,
    "reduce": lambda x: at(1, into(dist.reduce, x, 1)),
    "reduce_scatter": lambda x: into(dist.reduce_scatter, blank(x, 4), pair(x)),
    "reduce_scatter_single": lambda x: into(dist.reduce_scatter_single, blank(x, 2), x),
    "reduce_scatter_tensor": lambda x: into(dist.reduce_scatter_tensor, blank(x, 2), x),
    "rendezvous": met,
    "scatter": lambda x: into(dist.scatter, blank(x, 4), at(1, pair(x)), 1),
    "scatter_object_list": lambda x: into(dist.scatter_object_list, [0], at(0, [1, 2])),
    "send": lambda x: message(x, dist.recv),
    "send_object_list": objects_by_message,
    "set_debug_level": lambda x: dist.set_debug_level(dist.get_debug_level()),
    "set_debug_level_from_env": lambda x: dist.set_debug_level_from_env(),
    "set_timeout": lambda x: dist.set_timeout(LIMIT, dist.group.WORLD),
    "shrink_group": shrunk,
    "split_group": lambda x: on(dist.split_group(None, [[0], [1]]), x),
    "supports_complex": lambda x: dist.supports_complex(dist.ReduceOp.SUM),
}
"""The functions of torch.distributed by name."""

FORMS = {
    "a reduction": lambda x: into(dist.all_reduce, x, dist.ReduceOp.MAX),
    "all_gather, asynchronous": lambda x: into(dist.all_gather, two(x), x, async_op=True),
    "all_reduce, asynchronous": lambda x: into(dist.all_reduce, x, async_op=True),
    "broadcast, asynchronous": lambda x: into(dist.broadcast, x, 1, async_op=True),
    "barrier, asynchronous": lambda x: dist.barrier(async_op=True).wait(),
    "recv from any rank": lambda x: message(x, lambda y, _: dist.recv(y)),
    "a block": coalesced,
    "a block, asynchronous": lambda x: coalesced(x, async_ops=True),
    "a future": future,
    "functional": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) + 0,
    "nn": nn.all_reduce,
    "nn, backward": gradient,
    "the group": lambda x: (dist.group.WORLD.rank(), dist.group.WORLD.size()),
}
"""Other forms of calls, and calls of other modules."""


def call(name, outs, *rest):
    """Call a method of the default group; wait; return its first argument."""
    work = getattr(dist.group.WORLD, name)(outs, *rest)
    if work is not None:
        work.wait()
    return outs


def rooted(kind, root):
    options = kind()
    options.rootRank = root
    return options


def own_messages(x, receive="recv"):
    group, y = dist.group.WORLD, torch.zeros_like(x)
    got = group.recv([y], peer(), 3) if receive == "recv" else group.recv_anysource([y], 3)
    for work in [group.send([x], peer(), 3), got]:
        work.wait()
    return y


def own_gather(x):
    outs = at(0, [two(x)], [])
    dist.group.WORLD.gather(outs, [x], rooted(dist.GatherOptions, 0)).wait()
    return outs


def own_group(x, end):
    group = dist.new_group([0, 1])
    dist.all_reduce(x, group=group)
    return getattr(group, end)()


METHODS = {
    "abort": lambda x: own_group(x, "abort"),
    "all_gather_single": lambda x: call("all_gather_single", blank(x, 8), x),
    "all_gather_single_coalesced": lambda x: call(
        "all_gather_single_coalesced", [blank(x, 8)], [x]
    ),
    "all_to_all_single": lambda x: call("all_to_all_single", blank(x, 4), x, [], []),
    "allgather": lambda x: call("allgather", [two(x)], [x]),
    "allgather_coalesced": lambda x: call("allgather_coalesced", [[y] for y in two(x)], [x]),
    "allgather_into_tensor_coalesced": lambda x: call(
        "allgather_into_tensor_coalesced", [blank(x, 8)], [x]
    ),
    "allreduce": lambda x: call("allreduce", [x]),
    "allreduce_coalesced": lambda x: call("allreduce_coalesced", pair(x)),
    "alltoall": lambda x: call("alltoall", two(x), pair(x)),
    "alltoall_base": lambda x: call("alltoall_base", blank(x, 4), x, [], []),
    "barrier": lambda x: dist.group.WORLD.barrier().wait(),
    "broadcast": lambda x: call("broadcast", [x], rooted(dist.BroadcastOptions, 1)),
    "gather": own_gather,
    "get_backend": lambda x: dist.group.WORLD.get_backend(torch.device("cpu")).size(),
    "monitored_barrier": lambda x: dist.group.WORLD.monitored_barrier(LIMIT),
    "name": lambda x: len(dist.group.WORLD.name()),
    "rank": lambda x: dist.group.WORLD.rank(),
    "recv": own_messages,
    "recv_anysource": lambda x: own_messages(x, "recv_anysource"),
    "reduce": lambda x: at(1, call("reduce", [x], rooted(dist.ReduceOptions, 1))),
    "reduce_scatter": lambda x: call("reduce_scatter", [blank(x, 4)], [pair(x)]),
    "reduce_scatter_single": lambda x: call("reduce_scatter_single", blank(x, 2), x),
    "reduce_scatter_single_coalesced": lambda x: call(
        "reduce_scatter_single_coalesced", [blank(x, 2)], [x]
    ),
    "reduce_scatter_tensor_coalesced": lambda x: call(
        "reduce_scatter_tensor_coalesced", [blank(x, 2)], [x]
    ),
    "scatter": lambda x: call(
        "scatter", [blank(x, 4)], at(1, [pair(x)], []), rooted(dist.ScatterOptions, 1)
    ),
    "send": own_messages,
    "set_timeout": lambda x: dist.group.WORLD.set_timeout(LIMIT),
    "shutdown": lambda x: own_group(x, "shutdown"),
    "size": lambda x: dist.group.WORLD.size(),
}
"""The methods of a group by name."""


def methods(x):
    """Return what each method gives."""
    return {name: METHODS[name](x.clone()) for name in METHODS if hasattr(dist.ProcessGroup, name)}


BELOW = [call, rooted, own_messages, own_gather, own_group, two, pair, blank, at, peer, methods]
"""The functions that call the methods: torch's compiler refuses a group's method on any backend."""

UNCALLED = {
    "breakpoint": "waits for a terminal",
    "register_rendezvous_handler": "takes a name once",
    "gather_single": "no backend of the CPU has it",
    "gather_into_tensor": "no backend of the CPU has it",
    "boxed": "of torch's C++ code",
    "unbox": "of torch's C++ code",
    "get_group_store": "gives an object",
    "merge_remote_group": "no backend of the CPU has it",
    "get_reconfigure_handle": "no backend of the CPU has it",
    "reconfigure": "no backend of the CPU has it",
    "new_window": "no backend of the CPU has it",
    "supports_reconfigure": "a question about reconfigure",
    "supports_window": "a question about new_window",
    "register_abort_hook": "keeps a function of the program",
    "register_post_hook": "keeps a function of the program",
    "register_pre_hook": "keeps a function of the program",
    "unregister_abort_hook": "takes what register_abort_hook gives",
    "unregister_post_hook": "takes what register_post_hook gives",
    "unregister_pre_hook": "takes what register_pre_hook gives",
    "split_group": "of torch.distributed is in FUNCTIONS",
    "use_pg_for_symm_mem_rendezvous": "of GPUs",
}
"""The public calls without a row, and why."""

REFUSED = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "get_backend_impl",
    "init_device_mesh",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
    "set_timeout",
}
"""The functions that torch's compiler refuses on every backend: it meets attributes of a group."""
