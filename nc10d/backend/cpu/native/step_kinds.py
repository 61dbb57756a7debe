"""The kinds of steps, as programs, the linker and compiled code number them."""

import enum


class StepKind(enum.IntEnum):
    """The kinds of steps, in the order of the modules that run them."""

    # interpreter.py
    END = 0
    COPY = enum.auto()
    SIGNAL = enum.auto()
    WAIT = enum.auto()
    WAIT_ALL = enum.auto()
    FREE = enum.auto()
    FOLD_STAGED = enum.auto()
    APPLY = enum.auto()
    PAIR = enum.auto()
    ENTER = enum.auto()
    MEET_ALL = enum.auto()
    ROUND = enum.auto()
    LOOP_AGREED = enum.auto()
    LOOP = enum.auto()
    WRITE_HEADER = enum.auto()
    # slow_steps.py: called by the interpreter for AGREE up to FLOW
    AGREE = enum.auto()
    PACK = enum.auto()
    UNPACK = enum.auto()
    GATE = enum.auto()
    OPEN_GATE = enum.auto()
    BRANCH_IF_FLAGGED = enum.auto()
    BRANCH_IF_UNREADABLE = enum.auto()
    JUMP = enum.auto()
    EXPOSE = enum.auto()
    WITHDRAW = enum.auto()
    FETCH = enum.auto()
    FOLD_EXPOSED = enum.auto()
    FILL_EXPOSED = enum.auto()
    # tcp_streams.py: called by the interpreter from FLOW on
    FLOW = enum.auto()
    GIVE = enum.auto()
    TAKE = enum.auto()
    PUSH = enum.auto()
    SEND_HEADER = enum.auto()
    CALL_HEADER = enum.auto()
    CHECK_HEADER = enum.auto()
    CHECK_SIZES = enum.auto()
