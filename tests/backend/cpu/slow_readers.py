"""Programs in which rank 1 rests beside a peer's array until the test lets it go on."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace

from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu.lowering.lower import LoweredOp, ProgramCache, resolve
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.program.linker import Linked, link
from nc10d.backend.cpu.program.program import Kernel, Step, StepKind, staging


def slow_reader(kind: str) -> Callable[[ProgramCache, LoweredOp], Linked]:
    """Plans that let rank 1 rest, before each step of `kind`, until `released` is set."""

    def linked(programs: ProgramCache, request: LoweredOp) -> Linked:
        program = request.build()
        if programs.shape.rank == 1:
            steps: list[Step] = []
            for step in program.steps:
                if step.kind.name == kind:
                    steps.append(Step(StepKind.APPLY, dst=staging(1), src=staging(1), kernel=REST))
                steps.append(step)
            program = replace(program, steps=tuple(steps))
        return link(program, programs.shape.size, at.C_TABLES, address_of)

    return linked


REST = Kernel("REST", DType.UINT8)
released = threading.Event()
reading = threading.Event()
left = threading.Event()


@ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
def rest(*_: int) -> None:
    reading.set()
    assert released.wait(30)


def address_of(kernel: Kernel) -> int:
    if kernel is REST:
        return int(ctypes.cast(rest, ctypes.c_void_p).value or 0)
    return resolve(kernel)
