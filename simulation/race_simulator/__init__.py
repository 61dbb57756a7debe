"""A simulator that runs the programs of all ranks in a process, and finds races and deadlocks."""
