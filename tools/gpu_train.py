"""The rows of tools/gpu_check.py that train: DistributedDataParallel on GPUs beside torch's.

Two ranks train, on the same card if there is no other. torch reduces gradients by gloo, nc10d by
the staged backend and by NCCL. Models and comparison are those of tests/torch: all bits must match.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import device_ranks as on
from gpu_laws import in_its_own_group
from gpu_rows import NOT_HERE, Row, first_line

from nc10d.group.process_group import ProcessGroup
from nc10d.testing.ranks import Ranks

TIMEOUT = 60.0
MODELS = ("perceptron", "transformer", "convolution", "branches")
PASSES = (True, False, True, True)


def keeps_laws() -> list[Row]:
    """Run the laws of nc10d.torch on two ranks' devices, each in a group of its own."""
    if importlib.util.find_spec("torch") is None:
        return [Row("torch on devices", f"{NOT_HERE}torch is not installed")]
    from device_laws import LAWS

    rows = []
    with Ranks(2, "processes", "cpu:cpu,cuda:nccl", TIMEOUT) as ranks:
        ranks.run(on.be_a_host_of_ones_own)
        if not all(ranks.run(has_cuda)):
            return [Row("torch on devices", f"{NOT_HERE}torch is installed without CUDA")]
        for law in LAWS:
            try:
                ranks.run(in_its_own_group, [law] * 2)
                rows.append(Row(f"{law.__name__}, 2", "ok"))
            except Exception as error:  # noqa: BLE001  (the other laws still run)
                rows.append(Row(f"{law.__name__}, 2", first_line(error), failed=True))
    return rows


def trains(models: Sequence[str] = MODELS) -> list[Row]:
    """Train each model by both libraries, with gradients as bucket views and as own tensors."""
    if importlib.util.find_spec("torch") is None:
        return [Row("training by torch", f"{NOT_HERE}torch is not installed")]
    rows: list[Row] = []
    for backend in ("staged", "nccl"):
        with (
            Ranks(2, "processes", f"cpu:cpu,cuda:{backend}", TIMEOUT) as ranks,
            tempfile.TemporaryDirectory() as folder,
        ):
            if not all(ranks.run(has_cuda)):
                return [Row("training by torch", f"{NOT_HERE}torch is installed without CUDA")]
            ranks.run(prepare, [str(Path(folder) / "meet")] * 2)
            for name in models:
                rows += [compared(ranks, backend, name, views) for views in (False, True)]
    return rows


def compared(ranks: Ranks, backend: str, name: str, views: bool) -> Row:
    """Return the row of a model."""
    options = {"gradient_as_bucket_view": views, "find_unused_parameters": name == "branches"}
    row = f"{name} by {backend}, {'in buckets' if views else 'of its own'}"
    try:
        found = ranks.run(first_difference, [name] * 2, [options] * 2)
    except Exception as error:  # noqa: BLE001  (the other models still run)
        return Row(row, first_line(error), failed=True)
    same = found == [None, None]
    return Row(row, "torch's gradients" if same else f"differs: {found}", failed=not same)


def has_cuda(_group: ProcessGroup) -> bool:
    """Return whether torch can use the card."""
    import torch

    return bool(torch.cuda.is_available())


def prepare(group: ProcessGroup, path: str) -> None:
    """Form torch's process group, and make sums reproducible to the bit."""
    import torch
    from beside_torch import join_gloo

    on.be_a_host_of_ones_own(group)
    torch.cuda.set_device(on.device(group))
    torch.backends.cudnn.deterministic = True
    join_gloo(group, path)


def first_difference(group: ProcessGroup, name: str, options: dict[str, Any]) -> str | None:
    """Return where gradients first differ from those of torch's DDP."""
    from beside_torch import both

    found = both(group, name, PASSES, {**options, "device_ids": [on.device(group)]})
    return None if found is None else f"step {found[0]}, tensor {found[1]}"
