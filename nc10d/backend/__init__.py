"""Backends run operations: the protocol, the registry of names, and the built-in backends."""
