"""Shared memory: arenas, group memory, and access to peers' memory."""
