"""Executes a notebook of ranks; see test_notebook.py.

    python notebook_cells.py

Prints the output of each cell, by number.
"""

import re

import nbformat
from nbclient import NotebookClient

CELLS = [
    """
import numpy as np
import nc10d as dist
from dataclasses import dataclass
from nc10d.testing import run_ranks

scale = 3.0

@dataclass
class Box:
    value: float

def scaled(x):
    return x * scale

def total(group, x):
    dist.all_reduce(x)
    return float(scaled(x)[0])
""",
    "run_ranks(total, 2, 'processes', [np.ones(1), np.ones(1)])",
    "run_ranks(total, 2, 'threads', [np.ones(1), np.ones(1)])",
    "run_ranks(total, 2, 'simulated', [np.ones(1), np.ones(1)])",
    """
def swapped(group, box):
    boxes = [None] * group.size
    dist.all_gather_object(boxes, box, allow_pickle=True)
    return boxes[1 - group.rank]

run_ranks(swapped, 2, 'threads', [Box(1.0), Box(2.0)])
""",
    "run_ranks(lambda group, box: box, 2, 'processes', [Box(1.0), Box(2.0)]) == [Box(1), Box(2)]",
    """
def fails(group):
    if group.rank == 1:
        raise LookupError('nothing here')
    dist.barrier()

run_ranks(fails, 2, 'processes')
""",
]

if __name__ == "__main__":
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=200, allow_errors=True).execute()
    for number, cell in enumerate(notebook.cells):
        for output in cell.outputs:
            text = output.get("data", {}).get("text/plain") or output.get("text")
            lines = [text] if text else output.get("traceback", [])
            print(number, re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines)))
