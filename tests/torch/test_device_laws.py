"""The laws that tools/gpu_check.py holds torch to on GPUs, here on the CPU."""

import device_laws
import pytest

from nc10d.testing import run_ranks


@pytest.mark.parametrize("law", device_laws.LAWS, ids=lambda law: law.__name__)
def test_laws_of_torch_on_devices_hold_on_the_cpu(law):
    run_ranks(law, 2, "threads")
