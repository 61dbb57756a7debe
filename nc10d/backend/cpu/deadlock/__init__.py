"""Deadlock detection: what each rank waits for, and cycles in the wait graph."""
