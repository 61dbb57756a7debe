"""nc10d.api.nccl under its public name: `import nc10d.nccl`."""

import sys

from nc10d.api import nccl
from nc10d.api.nccl import *  # noqa: F403  (for type checkers)

sys.modules[__name__] = nccl
