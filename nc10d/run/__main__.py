"""`python -m nc10d.run` and the console script `nc10d-run`."""

from __future__ import annotations

import sys

from nc10d.run.cli import main

if __name__ == "__main__":
    sys.exit(main())
