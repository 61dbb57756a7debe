"""Run torch's own tests of ZeroRedundancyOptimizer with nc10d's class and hooks in their place.

    python tools/torch_zero_suite.py FILE                  # the tests that torch runs on a CPU
    python tools/torch_zero_suite.py FILE --devices        # and those for GPUs, on the CPU
    python tools/torch_zero_suite.py FILE --ddp             # with nc10d's DistributedDataParallel

FILE is test/distributed/optim/test_zero_redundancy_optimizer.py of torch's repository, at the tag
of the installed version; wheels do not contain it. Groups of torch.distributed have the backend
"nc10d". Ranks are forked from this process, which has imported torch but computed nothing. The exit
code is the number of tests that failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import unittest
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_suite import Outcome, replace_ddp


def replace(devices: bool, ranks: int) -> None:
    """Put nc10d's names where torch's tests import theirs."""
    import torch
    import torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook as hooks
    import torch.distributed.optim
    from torch.testing._internal import common_distributed as common

    import nc10d.backend.cpu.backend
    import nc10d.torch.backend.creation
    from nc10d.torch import (
        ZeroRedundancyOptimizer,
        hook_with_zero_step,
        hook_with_zero_step_interleaved,
    )

    assert nc10d.backend.cpu.backend
    assert nc10d.torch.backend.creation

    class OnTorchsGroup(ZeroRedundancyOptimizer):
        """Its default group is torch's, as torch's Join and the tests expect."""

        def __init__(self, params: Any, *arguments: Any, **options: Any) -> None:
            group = options.pop("process_group", None) or torch.distributed.group.WORLD
            options["process_group"] = group
            super().__init__(params, *arguments, **options)

    torch.distributed.optim.ZeroRedundancyOptimizer = OnTorchsGroup
    hooks.hook_with_zero_step = hook_with_zero_step
    hooks.hook_with_zero_step_interleaved = hook_with_zero_step_interleaved

    class Base(common.DistributedTestBase):  # type: ignore[misc]
        def _spawn_processes(self) -> None:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def backend(self, device: str) -> str:
            return "nc10d"

    common.DistributedTestBase = Base
    torch.cpu.device_count = lambda: ranks
    if devices:

        def on_the_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
            return function

        common.skip_if_no_gpu = on_the_cpu
        common.requires_accelerator_dist_backend = lambda *_, **__: on_the_cpu


def load(path: Path) -> ModuleType:
    """Import torch's file as a module."""
    spec = importlib.util.spec_from_file_location("torchs_zero_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torchs_zero_tests"] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """Run the tests and print their counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("words", nargs="*", help="letters in the names of tests")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--devices", action="store_true", help="also tests for GPUs, on the CPU")
    parser.add_argument("--ddp", action="store_true", help="with nc10d's DDP in place of torch's")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a test")
    given = parser.parse_intermixed_args()
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(given.limit)
    replace(given.devices, given.ranks)
    import torch

    if given.ddp:
        replace_ddp(torch.nn.parallel)
    outcome, suite = Outcome(), unittest.TestSuite()
    tests: Any = unittest.TestLoader().loadTestsFromModule(load(given.file))
    for test in tests:
        for case in test:
            if not given.words or any(word in case.id() for word in given.words):
                suite.addTest(case)
    suite.run(outcome)
    count = Counter(line["outcome"] for line in outcome.lines)
    print(
        f"torch {torch.__version__}, {given.ranks} ranks{', DDP of nc10d' * given.ddp}: "
        f"{count['passed']} of {count['passed'] + count['failed']} passed, "
        f"{count['skipped']} skipped"
    )
    return count["failed"]


if __name__ == "__main__":
    sys.exit(main())
