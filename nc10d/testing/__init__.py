"""A kit for testing code that communicates: ranks, reference results, strategies.

    from nc10d.testing import Ranks, reference, strategies

    with Ranks(4) as ranks:                        # threads; or kind="processes"
        ranks.run(lambda group, x: group.all_reduce(x), arrays)

| name | use |
|---|---|
| `run_ranks`, `Ranks` | a group of ranks that runs a function: threads, processes, simulated |
| `Kill`, `Pause`, `Partition`, `ClockJump`, `draw_faults` | faults for simulated ranks |
| `explore` | every order in which simulated ranks can be scheduled |
| `Launcher` | the same, with ranks that mpirun or another launcher starts |
| `HostRanks` | ranks on several hosts of this machine, as network namespaces |
| `run_local` | the same on a backend that only assigns arrays: simple, slow, nothing to compile |
| `assert_same_bits`, `assert_replicated`, ... | assertions that name rank, index and values |
| `reference` | the results that every rank must end with, in a few lines of NumPy |
| `strategies` | hypothesis strategies for arrays, reductions, calls and programs of calls |
| `check_backend`, `conformance` | checks on every backend's contract |
| `check_store`, `check_work`, `check_process_group` | the same for stores, Works and groups |
| `layouts`, `pairwise` | arrays in guarded memory; covers of all pairs |

Names are imported on first use: `reference` needs no hypothesis, and only the CPU backend compiles.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nc10d.base.call_site import count_as_users

if TYPE_CHECKING:
    from nc10d.testing import conformance as conformance
    from nc10d.testing import layouts as layouts
    from nc10d.testing import reference as reference
    from nc10d.testing import strategies as strategies
    from nc10d.testing.asserts import assert_gathered as assert_gathered
    from nc10d.testing.asserts import assert_partition as assert_partition
    from nc10d.testing.asserts import assert_reduced as assert_reduced
    from nc10d.testing.asserts import assert_replicated as assert_replicated
    from nc10d.testing.asserts import assert_same_bits as assert_same_bits
    from nc10d.testing.checks.group_laws import check_process_group as check_process_group
    from nc10d.testing.checks.store_laws import check_store as check_store
    from nc10d.testing.checks.work_laws import check_work as check_work
    from nc10d.testing.conformance import check_backend as check_backend
    from nc10d.testing.hosts.external_ranks import Launcher as Launcher
    from nc10d.testing.hosts.host_ranks import HostRanks as HostRanks
    from nc10d.testing.local_backend import run_local as run_local
    from nc10d.testing.pair_cover import pairwise as pairwise
    from nc10d.testing.rank_kinds import run_ranks as run_ranks
    from nc10d.testing.ranks import Ranks as Ranks
    from nc10d.testing.simulated.explore import explore as explore
    from nc10d.testing.simulated.faults import ClockJump as ClockJump
    from nc10d.testing.simulated.faults import Kill as Kill
    from nc10d.testing.simulated.faults import Partition as Partition
    from nc10d.testing.simulated.faults import Pause as Pause
    from nc10d.testing.simulated.faults import draw_faults as draw_faults

_MODULES = ("conformance", "layouts", "reference", "strategies")
_HOME = {
    "HostRanks": "hosts.host_ranks",
    "Launcher": "hosts.external_ranks",
    "Ranks": "ranks",
    "assert_gathered": "asserts",
    "assert_partition": "asserts",
    "assert_reduced": "asserts",
    "assert_replicated": "asserts",
    "assert_same_bits": "asserts",
    "check_backend": "conformance",
    "check_process_group": "checks.group_laws",
    "check_store": "checks.store_laws",
    "check_work": "checks.work_laws",
    "draw_faults": "simulated.faults",
    "explore": "simulated.explore",
    "Kill": "simulated.faults",
    "Pause": "simulated.faults",
    "Partition": "simulated.faults",
    "ClockJump": "simulated.faults",
    "pairwise": "pair_cover",
    "run_local": "local_backend",
    "run_ranks": "rank_kinds",
}
__all__ = sorted([*_HOME, *_MODULES])


count_as_users(__file__, libraries=("asserts.py", "simulated"))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'nc10d.testing' has no attribute {name!r}")
    module = importlib.import_module(f"nc10d.testing.{_HOME.get(name, name)}")
    value = globals()[name] = getattr(module, name) if name in _HOME else module
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
