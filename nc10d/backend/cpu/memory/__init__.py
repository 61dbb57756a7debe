"""Shared memory: arenas, group memory, and access to the memory of peers."""
