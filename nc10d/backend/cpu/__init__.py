"""The built-in engine for one host: collectives in shared memory."""
