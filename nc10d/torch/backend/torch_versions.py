"""What differs between the torch versions that nc10d supports: 2.13.0, 2.14.1 and 2.15.0.

| | 2.13 | 2.14 | 2.15 |
|---|---|---|---|
| base class for a backend in Python | ProcessGroup | Backend | Backend |
| order of ranks in `split_group` | ascending | as given | as given |
| what `split_group` returns outside all lists | None | -100 | -100 |
| `gather_single`, groups' hooks | no | yes | yes |
| torch's flight recorder for backends in Python | no | if attached | attached by default |

Code that depends on a row asks a name below, or whether torch has the method, and no number.
"""

from __future__ import annotations

import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.distributed import distributed_c10d

PYTHON_BACKENDS = hasattr(_c10d.Backend, "register_abort_hook")
"""Whether this torch takes a Backend that is written in Python; else a ProcessGroup."""

SPLIT_KEEPS_ORDER = PYTHON_BACKENDS
"""Whether a group's ranks after `split_group` have the order of their list."""

NO_MEMBER = dist.GroupMember.NON_GROUP_MEMBER if PYTHON_BACKENDS else None
"""What `split_group` returns to a rank that is in no list."""

SELF_RECORDING: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
"""The backends to which torch attaches no recorder itself."""
