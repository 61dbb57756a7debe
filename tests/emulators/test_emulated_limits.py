"""A device with less room than endless: few hardware queues."""

from __future__ import annotations

import numpy as np
import pytest
from aside import Aside
from driving import Gpu
from emulated import needs_emulators

from nc10d.group.process_group import ProcessGroup
from nc10d.testing import Ranks

GEQ = 0

pytestmark = needs_emulators


def passed(gpu: Gpu, between: int, records: bool) -> bool:
    """Say whether a stream passes a held one, with so many streams made between them."""
    held = gpu.stream()
    for _ in range(between):
        gpu.stream()
    beside, done = gpu.stream(), gpu.event()
    address, word = gpu.pinned(np.zeros(1, np.uint32))
    gpu("cuStreamWaitValue32", held, address, 1, GEQ)
    if records:
        gpu("cuEventRecord", gpu.event(), held)
    gpu("cuMemsetD8Async", gpu.out("cuMemAlloc", 4), 1, 4, beside)
    gpu("cuEventRecord", done, beside)
    over = not Aside(lambda: gpu.enter()("cuEventSynchronize", done)).is_stuck()
    word[0] = 1
    gpu("cuCtxSynchronize")
    return over


def passes(group: ProcessGroup) -> list[bool]:
    gpu = Gpu()
    return [passed(gpu, between, records) for between in (0, 1, 2) for records in (False, True)]


@pytest.mark.parametrize(
    ("queues", "wanted"),
    [
        ("0", [True, True, True, True, True, True]),
        ("1", [True, False, True, False, True, False]),
        ("2", [True, True, True, False, True, True]),
    ],
)
def test_a_record_holds_its_queue_until_its_stream_comes_there(
    monkeypatch: pytest.MonkeyPatch, queues: str, wanted: list[bool]
) -> None:
    monkeypatch.setenv("NC10D_EMULATED_QUEUES", queues)
    with Ranks(1, "processes", "fake") as one:
        assert one.run(passes) == [wanted]
