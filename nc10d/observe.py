"""nc10d.group.flight_recorder under its public name: `import nc10d.observe`."""

import sys

from nc10d.group import flight_recorder
from nc10d.group.flight_recorder import *  # noqa: F403  (for type checkers)

sys.modules[__name__] = flight_recorder
