"""One rank of a measured job: `python -m benchmarks.libraries.rank MODULE LIBRARY ARGUMENTS OUT`.

The rank calls `MODULE.rows(library, *ARGUMENTS)`, where ARGUMENTS is a JSON list. Rank 0 writes the
returned rows to the file OUT, as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from benchmarks.libraries import make


def main() -> None:
    """Join the job, measure, and leave; blocks until all ranks have measured."""
    module, name, arguments, out = sys.argv[1:]
    library = make(name)
    library.start()
    rows = importlib.import_module(module).rows(library, *json.loads(arguments))
    if library.rank == 0:
        Path(out).write_text(json.dumps(rows))
    library.close()


if __name__ == "__main__":
    main()
