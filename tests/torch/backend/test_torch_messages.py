"""A receive from any source names its sender; hooks of torch 2.14 are called."""

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import nc10d.torch
from nc10d.torch.backend.torch_versions import PYTHON_BACKENDS

RANKS = {"world_size": 2, "kind": "processes"}


def start(group):
    nc10d.torch.as_torch_group()


def receives(group):
    """Return the senders that a rank is told: by irecv, by recv, and by the group's own method."""
    x = torch.full((2,), 7.0)
    if dist.get_rank() == 0:
        for _ in range(3):
            dist.send(x, 1)
        return [0, 0, 0]
    y = torch.zeros(2)
    work = dist.irecv(y)
    work.wait()
    by_method = dist.group.WORLD.recv_anysource([y], 0)
    by_method.wait()
    assert torch.equal(x, y)
    return [work._source_rank(), by_method._source_rank(), dist.recv(y)]


def test_a_receive_from_any_source_names_its_sender(ranks):
    assert ranks.run(receives) == [[0, 0, 0]] * 2


def meets_a_failure(group):
    """Return how often each hook was called when calls differ."""
    pair = dist.new_group([0, 1])
    called = []
    pair.register_abort_hook(1, lambda: called.append("abort"))
    pair.register_abort_hook(2, lambda: called.append("never"))
    pair.unregister_abort_hook(2)
    pair.register_pre_hook(3, lambda given: called.append("before"))
    pair.register_post_hook(4, lambda given: called.append("after"))
    x = torch.ones(2)
    dist.all_reduce(x, group=pair)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(2 + dist.get_rank()), group=pair)
    return called[:2], called.count("abort"), "never" in called


@pytest.mark.skipif(not PYTHON_BACKENDS, reason="hooks are new in torch 2.14")
def test_hooks_are_called_before_and_after_a_call_and_at_a_failure(ranks):
    assert hasattr(c10d.ProcessGroup, "register_pre_hook")
    assert ranks.run(meets_a_failure) == [(["before", "after"], 1, False)] * 2


def messages_with_hooks(group):
    """Return what the hooks of a group saw of messages, and the sender that a receive names."""
    pair = dist.new_group([0, 1])
    seen = []
    pair.register_pre_hook(1, lambda given: seen.append((given.name.name, given.op_id)))
    pair.register_post_hook(2, lambda given: seen.append((given.name.name, given.op_id)))
    x = torch.full((2,), 3.0)
    if dist.get_rank() == 0:
        dist.send(x, 1, pair)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1, pair)])
        sender = 0
    else:
        y, z = torch.zeros(2), torch.zeros(2)
        sender = dist.recv(y, None, pair)
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, z, 0, pair)])
    for work in works:
        work.wait()
    assert dist.get_rank() == 0 or (torch.equal(x, y) and torch.equal(x, z))
    return sender, [name for name, _ in seen], len({number for _, number in seen})


@pytest.mark.skipif(not PYTHON_BACKENDS, reason="hooks are new in torch 2.14")
def test_hooks_see_messages(ranks):
    expected = [(0, [name] * 4, 2) for name in ("SEND", "RECV")]
    assert ranks.run(messages_with_hooks) == expected


def starts_after_a_refused_call(group):
    """Return whether messages that nobody takes yet start without blocking, after an error."""
    rank = dist.get_rank()
    for call in (dist.send, dist.recv):
        with pytest.raises(ValueError, match="rank"):
            call(torch.ones(2), rank)
    large = torch.full((1 << 18,), float(rank))
    work = dist.isend(large, 1 - rank, tag=5)
    dist.barrier()
    early = work.is_completed()
    dist.barrier()
    received = torch.empty_like(large)
    dist.recv(received, 1 - rank, tag=5)
    work.wait()
    return early, bool((received == 1 - rank).all())


def test_only_blocking_calls_wait_for_their_message(ranks):
    """isend does not block, even after a send that was refused before it reached the group."""
    assert ranks.run(starts_after_a_refused_call) == [(False, True)] * 2


def compiled_messages(group):
    """Return what a compiled function computes around a message of torch.distributed."""

    @torch.compile(backend="eager")
    def step(x):
        x = x * 2
        if dist.get_rank() == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        return x + 1

    return step(torch.full((2,), 1.0 + dist.get_rank())).tolist()


def test_a_compiled_function_may_send_and_receive(ranks):
    assert ranks.run(compiled_messages) == [[3.0, 3.0]] * 2


def leave(x, device):
    """Begin calls in a block, and raise."""
    if device is not None:
        dist.send(x, 1 - dist.get_rank())
    dist.all_reduce(torch.full((2,), 100.0))
    raise KeyError


def blocks(group):
    """Exchange in a block by torch's waiting calls; then leave blocks by an exception."""
    peer, x, y = 1 - dist.get_rank(), torch.full((2,), float(dist.get_rank())), torch.zeros(2)
    with dist._coalescing_manager(device=x.device):
        dist.send(x, peer)
        dist.recv(y, peer)
    for device in (x.device, None):
        with pytest.raises(KeyError), dist._coalescing_manager(device=device):
            leave(x, device)
    total = y.clone()
    dist.all_reduce(total)
    return y.tolist(), total.tolist()


def test_waiting_messages_join_a_block_and_an_exception_ends_it(ranks):
    assert ranks.run(blocks) == [([1.0, 1.0], [1.0, 1.0]), ([0.0, 0.0], [1.0, 1.0])]
