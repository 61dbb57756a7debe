"""The phases of a fully sharded module follow the table in nc10d/torch/sharded/phase.py."""

import pytest

from nc10d.torch.sharded.phase import PassState, Phase

EVENTS = {
    "forward": lambda state: state.forward(True, graph=True),
    "forward in no_sync": lambda state: state.forward(False, graph=True),
    "evaluation": lambda state: state.forward(True, graph=False),
    "evaluation in no_sync": lambda state: state.forward(False, graph=False),
    "recompute": lambda state: state.recompute(),
    "hook": lambda state: state.backward(False),
    "hook that creates a graph": lambda state: state.backward(True),
    "end": lambda state: state.end(),
    "exception in forward": lambda state: state.leave(Phase.EXPECTED),
    "exception in backward": lambda state: state.leave(Phase.RUNNING),
}


def after(*events):
    state = PassState()
    for event in events:
        EVENTS[event](state)
    return state


@pytest.mark.parametrize(
    ("events", "phase", "reducing"),
    [
        ((), Phase.IDLE, False),
        (("forward",), Phase.EXPECTED, True),
        (("forward in no_sync",), Phase.EXPECTED, False),
        (("forward", "forward in no_sync"), Phase.EXPECTED, True),
        (("forward", "hook", "end", "forward in no_sync"), Phase.EXPECTED, False),
        (("forward", "hook", "exception in backward", "forward in no_sync"), Phase.EXPECTED, False),
        (("forward", "exception in forward", "forward in no_sync"), Phase.EXPECTED, False),
        (("evaluation",), Phase.IDLE, False),
        (("forward in no_sync", "evaluation"), Phase.EXPECTED, False),
        (("evaluation", "recompute"), Phase.EXPECTED, True),
        (("evaluation in no_sync", "recompute"), Phase.EXPECTED, False),
        (("evaluation", "recompute", "hook", "end", "recompute"), Phase.IDLE, True),
        (("recompute",), Phase.IDLE, False),
        (("forward", "hook"), Phase.RUNNING, True),
        (("forward", "hook", "evaluation in no_sync", "recompute"), Phase.RUNNING, True),
        (("forward", "hook", "exception in forward"), Phase.RUNNING, True),
        (("forward", "exception in backward"), Phase.EXPECTED, True),
        (("forward", "hook", "end"), Phase.IDLE, True),
        (("forward", "hook", "end", "hook"), Phase.RUNNING, True),
    ],
)
def test_events_lead_to_the_phases_of_the_table(events, phase, reducing):
    state = after(*events)
    assert (state.phase, state.reducing) == (phase, reducing)


def test_only_the_first_hook_of_a_backward_pass_queues_its_end():
    state = after("forward")
    assert [state.backward(False), state.backward(False)] == [True, False]
    state.end()
    assert state.backward(False), "a second pass of a kept graph"


def test_memory_is_held_until_a_pass_without_create_graph_has_ended():
    state, held = after("forward"), []
    for event in ("hook that creates a graph", "end", "hook", "end"):
        EVENTS[event](state)
        held.append(state.holds_memory)
    assert held == [True, True, True, False]
