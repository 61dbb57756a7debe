"""Simulated ranks' operations: how they match, and their texts in errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nc10d import ops as O
from nc10d.ops.facts import name_of
from nc10d.testing.local_backend import _PostedOp


def copied(send: _PostedOp) -> _PostedOp:
    """Return a message as it is now: the sender may change the array when the call has ended."""
    op = send.op
    return send._replace(op=O.Send(np.array(op.x), op.peer, op.tag))


def fits(send: _PostedOp, receive: _PostedOp) -> bool:
    """Return whether a receive may take a message."""
    named = receive.op.peer in (None, send.rank) and send.op.peer == receive.rank
    return bool(named and send.op.tag == receive.op.tag)


def calls_text(ops: Sequence[Any]) -> str:
    """Return "recv from 1", or "a batch of 3"."""
    names = [
        f"{name_of(op)} {'to' if isinstance(op, O.Send) else 'from'} {op.peer}"
        if isinstance(op, (O.Send, O.Recv))
        else name_of(op)
        for op in ops
    ]
    return names[0] if len(names) == 1 else f"a batch of {len(names)}"
