"""A world for tests: ranks as tasks in a process, virtual time, a network with faults."""
