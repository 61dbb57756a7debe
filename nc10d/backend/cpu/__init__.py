"""The built-in engine: collectives in shared memory, and over TCP between hosts."""
