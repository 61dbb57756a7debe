"""nc10d.api.functional under its public name: `import nc10d.functional`."""

import sys

from nc10d.api import functional
from nc10d.api.functional import *  # noqa: F403  (for type checkers)

sys.modules[__name__] = functional
