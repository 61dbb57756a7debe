"""What runs operations: the protocol, the registry of names, and the backends."""
