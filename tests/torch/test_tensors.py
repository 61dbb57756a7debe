"""Tensors work as arrays: in every call, with every dtype and layout, without copies."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d as dist
import nc10d.torch
from nc10d import ops as O
from nc10d.errors import DistError
from nc10d.testing import reference, run_local, run_ranks, strategies
from nc10d.torch.tensors import DTYPES, as_numpy, as_tensor, is_dense, like

FIELDS = ("x", "out", "inp")
RANKS = {"world_size": 3}


def as_tensors(op):
    """Return the operation on tensors, in the memory of its arrays."""
    for name in FIELDS:
        x = getattr(op, name, None)
        if x is not None:
            seen = [as_tensor(item) for item in x] if isinstance(x, list) else as_tensor(x)
            setattr(op, name, seen)
    return op


def performed(group, calls, modes):
    ops = [as_tensors(call.make(group.rank)) for call in calls]
    if modes == "block":
        with group.coalescing_manager():
            for op in ops:
                strategies.issue(group, op)
    else:
        works = [strategies.issue(group, op, modes == "async") for op in ops]
        for work, op in zip(works, ops, strict=True):
            written = work.result() if work is not None else []
            assert all(map(lambda a, b: a is b, written, strategies.outputs(op)))
    return [[as_numpy(x) for x in strategies.outputs(op)] for op in ops]


@pytest.mark.ranks(2, strict=False)
def test_a_completed_message_of_a_tensor_refers_to_the_tensor(world):
    """Exchange a prepared message until it completes immediately on both ranks."""
    ended = []
    for turn in range(12):
        x = torch.full((8,), float(turn))
        if world.rank == 0:
            work = world.isend(x, 1)
            world.barrier()
        else:
            world.barrier()  # the whole message has arrived
            x, expected = torch.zeros(8), x
            work = world.irecv(x, 0)
        ended.append(type(work).__name__)
        (op,) = work.ops
        assert op.x is x
        assert work.result() == (0 if world.rank else [])
        assert world.rank == 0 or torch.equal(x, expected)
    assert "CompletedCall" in ended


@settings(deadline=None, max_examples=60)
@given(calls=strategies.programs(3), mode=st.sampled_from(["sync", "async", "block"]))
def test_any_program_of_collectives_on_tensors(ranks, calls, mode):
    answers = ranks.run(performed, [calls] * 3, [mode] * 3)
    for index, call in enumerate(calls):
        for rank, expected in enumerate(call.expected()):
            if not (call.kind in (O.Gather,) and rank != call.root):
                assert all(map(reference.same_bits, answers[rank][index], expected))


def test_messages_are_tensors_too():
    def run(group):
        if group.rank == 0:
            dist.send(torch.full((3,), 5.0, dtype=torch.bfloat16), dst=1)
            got = torch.empty(3, dtype=torch.int64)
            return dist.recv(got), got.tolist()
        x = torch.empty(3, dtype=torch.bfloat16)
        dist.recv(x, src=0)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.arange(3), 0)]):
            work.wait()
        return x.tolist()

    assert run_local(run, 2) == [(1, [0, 1, 2]), [5.0] * 3]


@pytest.mark.ranks(2)
def test_parameters_are_used_as_memory_and_autograd_records_nothing():
    p = torch.nn.Parameter(torch.ones(3))
    y = p * 1
    dist.all_reduce(p)
    dist.all_reduce(y)
    y.sum().backward()
    assert p.tolist() == [2.0] * 3
    assert p.grad.tolist() == [1.0] * 3
    assert y.requires_grad


@pytest.mark.ranks(2, strict=False)
def test_a_tensor_with_new_memory_is_noticed():
    x = torch.ones(2)
    dist.all_reduce(x)
    x.set_(torch.full((5,), 3.0))
    dist.all_reduce(x)
    x.resize_(1000).fill_(1)
    dist.all_reduce(x)
    assert x.sum().item() == 2000.0


@pytest.mark.parametrize("kind", list(DTYPES), ids=str)
def test_objects_may_contain_tensors_and_received_tensors_are_writable(kind):
    def run(group):
        mine = {"w": torch.eye(2).to(kind).t(), "p": torch.nn.Parameter(torch.ones(1))}
        found = [mine if group.rank == 0 else None]
        dist.broadcast_object_list(found, src=0)
        again = [mine if group.rank == 0 else None]
        dist.broadcast_object_list(again, src=0, map_location=torch.Tensor.numel, device="cpu")
        assert group.rank == 0 or again == [{"w": 4, "p": 1}]
        found[0]["w"][0, 0] = 0
        assert type(found[0]["p"]) is torch.nn.Parameter
        return found[0]["w"].dtype, found[0]["w"].to(torch.complex64).tolist()

    assert run_local(run, 2)[1] == (kind, [[0, 0], [0, 1]])


@pytest.mark.parametrize("kind", list(DTYPES), ids=str)
def test_every_type_there_and_back_is_the_same_memory(kind):
    x = torch.zeros(2, 3).to(kind)
    seen = as_numpy(x)
    assert seen.dtype == DTYPES[kind].numpy
    assert seen.ctypes.data == x.data_ptr() == as_tensor(seen).data_ptr()
    assert as_tensor(seen).dtype is kind
    found = dist.as_buffer(x.t())
    assert (found.address, found.dtype, found.owner[0].shape) == (
        x.data_ptr(),
        DTYPES[kind],
        (3, 2),
    )
    assert not found.contiguous
    assert found.strides == seen.T.strides


class Broken:
    """A backend whose fast path fails while a peer may still read the arrays."""

    words, in_flight = None, ()

    def __init__(self):
        self.latest = {O.AllReduce: {dist.ReduceOp.SUM: self}}

    def run(self, words, x, y):
        assert isinstance(x, np.ndarray)
        raise dist.PeerLost("gone")

    def abandon(self, prepared, x, y):
        assert prepared is self


@pytest.mark.ranks(1)
def test_a_tensor_of_a_failed_call_stays_alive(world):
    world._preparing = Broken()
    x = torch.ones(2)
    with pytest.raises(dist.PeerLost):
        world.all_reduce(x)
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is not None


@settings(deadline=None)
@given(order=st.permutations([0, 1, 2, 3]), shape=st.tuples(*[st.integers(0, 3)] * 4))
def test_dense_tensors_keep_their_strides_in_a_bucket(order, shape):
    x = torch.zeros(shape).permute(order)
    assert is_dense(x)
    flat = torch.arange(float(x.numel()))
    assert like(flat, x).stride() == x.stride()
    assert sorted(like(flat, x).flatten().tolist()) == flat.tolist()


def test_other_tensors_are_contiguous_in_a_bucket():
    x = torch.zeros(4, 4)[:, ::2]
    assert not is_dense(x)
    assert like(torch.arange(8.0), x).tolist() == np.arange(8.0).reshape(4, 2).tolist()


@pytest.mark.ranks(2, strict=False)
def test_a_tensor_of_a_failed_call_is_kept_until_the_group_is_closed(world):
    x = torch.ones(4 + world.rank)
    with contextlib.suppress(DistError):
        world.all_reduce(x)
    reference = weakref.ref(x)
    del x
    held = [reference() is not None]
    world.close()
    gc.collect()
    assert [*held, reference() is not None] == [True, False]


def storage_in_flight(group) -> bool:
    x, peer = torch.zeros(1 << 17), 1 - group.rank
    for _ in range(2):
        group.send(x, peer) if group.rank else group.recv(x, peer)
    if group.rank:
        group.barrier()
        group.send(x, peer)
        return True
    storage = x.untyped_storage()
    work = group.irecv(x, peer)
    channel = group.backend("cpu").group.links.inbox(peer).channel
    ((_, kept),) = [submission.keep for submission in channel.in_flight.values()]
    held = kept[0].data_ptr() == storage.data_ptr()
    assert work.ops[0].x is x
    x.data = torch.zeros(1)  # the tensor gets other memory, and the message still comes
    group.barrier()
    return bool(held and work.wait())


def test_a_message_in_flight_keeps_the_memory_of_its_tensor() -> None:
    assert run_ranks(storage_in_flight, 2) == [True, True]
