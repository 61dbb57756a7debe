"""Every operator in a graph with symbolic shapes: recorded, exported, saved; shapes those of eager.

The group has 4 ranks of the backend "fake", since shapes and tracing need no peers.
"""

import io
import re

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import nc10d as dist
from nc10d.torch import functional as F
from nc10d.torch.nn import functional as NN

SIZE = 4
CALLS = {
    "all_reduce": lambda x: F.all_reduce(x, "sum"),
    "broadcast": lambda x: F.broadcast(x, 1),
    "all_gather_into_tensor": lambda x: F.all_gather_tensor(x, 1),
    "reduce_scatter_tensor": lambda x: F.reduce_scatter_tensor(x, "avg", 0),
    "all_to_all_single": lambda x: F.all_to_all_single(x, None, None),
    "all_to_all_single of rows": lambda x: F.all_to_all_single(x, [1, 2, 3, 4], rows(x)),
    "permute_tensor": lambda x: F.permute_tensor(x, [1, 2, 3, 0]),
    "all_reduce_coalesced": lambda x: F.all_reduce_coalesced([x, x[1:]], "max"),
    "all_gather_into_tensor_coalesced": lambda x: F.all_gather_into_tensor_coalesced([x, x[1:]]),
    "reduce_scatter_tensor_coalesced": lambda x: F.reduce_scatter_tensor_coalesced(
        [x, x.mT], "sum", [0, 1]
    ),
    "all_reduce in place": lambda x: F.all_reduce_inplace(x * 1, "sum"),
    "reduce": lambda x: NN.reduce(x, 2),
    "gather": lambda x: torch.stack(NN.gather(x)),
    "scatter": lambda x: NN.scatter(list(x.chunk(SIZE))),
    "recv": lambda x: F.recv(x, 1),
    "send": lambda x: passed(x, F.send(x, 1)),
    "barrier": lambda x: passed(x, F.barrier()),
    "isend": lambda x: F.wait_tensor(F.isend(x, 1)),
    "irecv": lambda x: F.wait_tensor(F.irecv(x, 1)),
    "batch_p2p": lambda x: F.batch_p2p(["isend", "irecv"], [1, 3], [0, 0], [x, x[1:]]),
}


def rows(x):
    return [x.shape[0] - 3, 1, 1, 1]


def passed(x, _):
    return x + 1


@pytest.fixture(scope="module", autouse=True)
def four():
    dist.init_process_group("fake", rank=0, world_size=SIZE, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Trace without what torch keeps of traces in other tests' threads, in a global variable."""
    monkeypatch.setattr(torch.fx.traceback, "current_meta", {})


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


def made(call):
    return make_fx(call, tracing_mode="symbolic")(torch.ones(8, 4))


def exported(call):
    dims, memory = ({0: torch.export.Dim.DYNAMIC},), io.BytesIO()
    program = torch.export.export(Module(call), (torch.ones(8, 4),), dynamic_shapes=dims)
    torch.export.save(program, memory)
    memory.seek(0)
    return torch.export.load(memory).module()


WAYS = {"make_fx": made, "exported, saved and loaded": exported}


def shapes(outs):
    return [tuple(x.shape) for x in (outs if isinstance(outs, (list, tuple)) else [outs])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_a_graph_has_its_operator_and_eager_modes_shapes_for_any_rows(name, way):
    graph, call = WAYS[way](CALLS[name]), CALLS[name]
    operator = name.partition(" ")[0]
    assert len(re.findall(rf"ops\.nc10d\.{operator}(?:\.default)?\(", graph.code)) == 1
    for count in (8, 16):
        assert shapes(graph(torch.ones(count, 4))) == shapes(call(torch.ones(count, 4)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_with_dynamic_shapes_is_compiled_once(name):
    torch._dynamo.reset()
    graphs, call = [], CALLS[name]

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=True)
    for count in (8, 16, 24):
        assert shapes(compiled(torch.ones(count, 4))) == shapes(call(torch.ones(count, 4)))
    assert len(graphs) == 1
