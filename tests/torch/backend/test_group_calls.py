"""What a torch group on nc10d has beside plain collectives; test_torch_conformance has those."""

import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from nc10d.errors import CollectiveMismatch, CollectiveTimeout
from nc10d.group.world import World
from nc10d.testing import Ranks
from nc10d.torch.backend.python_backend import PythonBackend
from nc10d.torch.backend.python_group import PythonGroup
from nc10d.torch.backend.torch_versions import PYTHON_BACKENDS

SIZE = 3
RANKS = {"world_size": SIZE}


def torch_group(group):
    return (PythonBackend if PYTHON_BACKENDS else PythonGroup)(group, World())


def on(ranks, body):
    return ranks.run(lambda group: body(torch_group(group), group.rank()))


def waited(work):
    assert work.wait()
    return work.result()


def mine(rank, *shape):
    return torch.full(shape, rank + 1.0)


def all_reduce_by_convention(group, rank):
    (x,) = waited(group.allreduce(mine(rank, 4), dist.ReduceOp.MAX))
    return x, torch.full((4,), 3.0)


def all_gather_coalesced(group, rank):
    outs = [[torch.zeros(1), torch.zeros(2)] for _ in range(SIZE)]
    waited(group.allgather_coalesced(outs, [mine(rank, 1), mine(rank, 2)]))
    return torch.cat([x for xs in outs for x in xs]), torch.arange(1, 4.0).repeat_interleave(3)


def all_to_all_by_sizes(group, rank):
    out = torch.zeros(rank * SIZE)
    sizes = [*range(SIZE)]
    waited(group.all_to_all_single(out, mine(rank, sum(sizes)), [rank] * SIZE, sizes))
    return out, torch.arange(1, 4.0).repeat_interleave(rank)


def message(group, rank):
    x = mine(rank, 2)
    if rank:
        group.send([x], 0, 5 + rank).wait()
        return x, x
    waited(group.recv([x], 1, 6))
    work = group.recv_anysource([x], 7)
    work.wait()
    return torch.tensor([work._source_rank(), *x]), torch.tensor([2.0, 3.0, 3.0])


def all_reduces_together(group, rank):
    xs = [mine(rank, 2), mine(rank, 3)]
    waited(group.allreduce_coalesced(xs))
    return torch.cat(xs), torch.full((5,), 6.0)


def a_tensor_twice_in_a_list(group, rank):
    x = mine(rank, 2, 2)
    found = waited(group.allreduce_coalesced([x, x, x.view(4)]))
    assert [y.data_ptr() for y in found] == [x.data_ptr()] * 3
    return x, torch.full((2, 2), 6.0)


def a_tensor_twice_in_a_block(group, rank):
    """Calls in a block are in order, as blocks of nc10d are."""
    x = mine(rank, 2)
    group._start_coalescing(torch.device("cpu"))
    group.allreduce([x])
    group.allreduce([x])
    assert group._end_coalescing(torch.device("cpu")).wait()
    return x, torch.full((2,), 18.0)


def gathers_together(group, rank):
    outs = [torch.zeros(SIZE), torch.zeros(SIZE, 2)]
    waited(group.all_gather_single_coalesced(outs, [mine(rank, 1), mine(rank, 2)]))
    return outs[1], torch.stack([mine(r, 2) for r in range(SIZE)])


def reduce_scatters_together(group, rank):
    outs = [torch.zeros(1), torch.zeros(2)]
    waited(group.reduce_scatter_single_coalesced(outs, [mine(rank, SIZE), mine(rank, SIZE, 2)]))
    return torch.cat(outs), torch.full((3,), 6.0)


def sparse(group, rank):
    x = torch.sparse_coo_tensor([[0, rank]], [1.0, 2.0], (SIZE,), check_invariants=True)
    (x,) = waited(group.allreduce([x]))
    return x.to_dense(), torch.tensor([5.0, 2.0, 2.0])


def blocking(group, rank):
    options = c10d.AllreduceOptions()
    options.asyncOp = False
    x = mine(rank, 2)
    assert group.allreduce([x], options) is None
    assert group.barrier() is not None
    return x, torch.full((2,), 6.0)


CALLS = [
    all_reduce_by_convention,
    all_gather_coalesced,
    all_to_all_by_sizes,
    message,
    all_reduces_together,
    a_tensor_twice_in_a_list,
    a_tensor_twice_in_a_block,
    gathers_together,
    reduce_scatters_together,
    sparse,
    blocking,
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_gives_torch_s_result(ranks, call):
    for found, expected in on(ranks, call):
        assert torch.equal(found, expected)


def test_a_wait_for_a_work_ends_its_future_with_its_callbacks(ranks):
    def body(group, rank):
        for _ in range(200):
            x = mine(rank, 1000)
            work = group.allreduce([x])
            child = work.get_future().then(lambda done: done.value()[0][0].item())
            work.wait()
            assert work.get_future().done()
            assert child.value() == 6.0

    on(ranks, body)


def test_a_callback_may_wait_for_a_work_whose_future_was_asked_for_before(ranks):
    def body(group, rank):
        first, second = (group.allreduce([mine(rank, 2)]) for _ in range(2))
        later = second.get_future()

        def callback(_):
            second.wait()
            return later.value()[0].tolist()

        return first.get_future().then(callback).wait()

    assert on(ranks, body) == [[6.0, 6.0]] * SIZE


def test_the_future_of_a_failed_work_has_its_error_once_it_was_waited_for():
    def body(group):
        work = disagree(torch_group(group), group.rank())
        future = work.get_future()
        with pytest.raises(dist.DistBackendError):
            work.wait()
        with pytest.raises(RuntimeError, match="all_reduce"):
            future.value()

    with Ranks(2) as two:
        two.run(body)


def disagree(group, rank):
    return group.allreduce([mine(rank, 2 + (rank == 1))])


def test_a_mismatch_is_torch_s_error_with_nc10d_s_as_its_cause():
    def body(group):
        work = disagree(torch_group(group), group.rank())
        with pytest.raises(dist.DistBackendError) as caught:
            work.wait()
        assert isinstance(work.exception(), dist.DistBackendError)
        assert not work.is_success()
        return caught.value.__cause__

    with Ranks(2) as two:
        assert {type(cause) for cause in two.run(body)} == {CollectiveMismatch}


def test_a_failed_future_raises_and_so_does_what_is_chained_to_it():
    def body(group):
        future = disagree(torch_group(group), group.rank()).get_future()
        with pytest.raises(RuntimeError, match="all_reduce"):
            future.then(lambda done: done.value()).wait()

    with Ranks(2) as two:
        two.run(body)


def test_a_timeout_of_a_call_says_so_in_torch_s_words():
    over = threading.Event()

    def body(group):
        if group.rank():
            assert over.wait(60)  # a rank that has returned would be reported instead
            return None
        options = c10d.BarrierOptions()
        options.timeout = timedelta(milliseconds=10)
        with pytest.raises(dist.DistBackendError, match=r" timed out .* timeout ") as caught:
            torch_group(group).barrier(opts=options).wait()
        over.set()
        return type(caught.value.__cause__)

    with Ranks(2) as two:
        assert two.run(body)[0] is CollectiveTimeout


def test_options_have_the_timeout_and_the_ranks(ranks):
    def body(group, rank):
        options = (group if PYTHON_BACKENDS else group._get_backend(torch.device("cpu"))).options
        return options._timeout, options.global_ranks_in_group, options.backend

    assert on(ranks, body) == [(timedelta(seconds=30), [0, 1, 2], "nc10d")] * SIZE


def test_a_wait_may_be_shorter_than_the_operation():
    def body(group):
        calls = torch_group(group)
        if group.rank():
            calls.recv([torch.zeros(1)], 0).wait()
            return calls.barrier().wait()
        work = calls.barrier()
        with pytest.raises(dist.DistBackendError, match=r"it goes on$"):
            work.wait(timedelta(milliseconds=1))
        calls.send([torch.zeros(1)], 1).wait()
        return work.wait()

    with Ranks(2) as two:
        assert two.run(body) == [True, True]


def test_a_barrier_names_the_missing_rank_in_gloo_s_words():
    def body(group):
        if group.rank() == 1:
            return ""
        with pytest.raises(dist.DistBackendError) as caught:
            torch_group(group).monitored_barrier(timedelta(milliseconds=50))
        return str(caught.value)

    with Ranks(3) as three:
        first, _, last = three.run(body)
    assert first.startswith("Rank 1 failed to pass monitoredBarrier")
    assert last.startswith("Rank 2 successfully reached monitoredBarrier, but received errors")


ZEROS, ONE = torch.zeros(SIZE), torch.ones(1)
MISTAKES = {
    "two tensors": lambda group: group.allreduce([torch.zeros(1), torch.zeros(1)]),
    "no tensor": lambda group: group.broadcast([]),
    "wrong root": lambda group: group.broadcast(torch.zeros(1), SIZE),
    "wrong sizes": lambda group: group.all_gather_single(torch.zeros(2), torch.zeros(1)),
    "no tensor to send": lambda group: group.send([], 1, 0),
    "a list too few": lambda group: group.allgather_coalesced([], [torch.zeros(1)]),
    "tensors that overlap": lambda group: group.allreduce_coalesced([ZEROS[:2], ZEROS[1:]]),
    "an output twice": lambda group: group.all_gather_single_coalesced([ZEROS] * 2, [ONE, ONE]),
    "an output twice, of sums": lambda group: group.reduce_scatter_single_coalesced(
        [ONE, ONE], [ZEROS, ZEROS]
    ),
    "a list twice": lambda group: group.allgather_coalesced([[ONE, ONE]] * SIZE, [ONE, ONE]),
    "sparse maximum": lambda group: group.allreduce(torch.zeros(1).to_sparse(), dist.ReduceOp.MAX),
    "options of another call": lambda group: group.barrier(c10d.AllreduceOptions()),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_before_anything_is_sent(ranks, mistake):
    def body(group, rank):
        with pytest.raises((ValueError, TypeError)) as caught:
            MISTAKES[mistake](group)
        assert "unpack" not in str(caught.value), "a text about the caller's own arguments"
        return waited(group.allreduce([mine(rank, 1)]))[0].item()

    assert on(ranks, body) == [6.0] * SIZE


def test_works_that_have_ended_keep_no_tensors(ranks):
    def body(group, rank):
        tensors = [mine(rank, 1) for _ in range(10)]
        for x in tensors:
            group.allreduce([x]).wait()
        references = [weakref.ref(x) for x in tensors]
        tensors.clear()
        del x
        return sum(reference() is not None for reference in references)

    assert max(on(ranks, body)) <= 1


def test_launches_are_counted(ranks):
    def body(group, rank):
        before = group._get_sequence_number_for_group()
        group.barrier().wait()
        return group._get_sequence_number_for_group() - before

    assert on(ranks, body) == [1] * SIZE
