"""Programs of all ranks in one process under any interleaving, with vector clocks."""
