"""Collectives of one host as pure functions: (call, layout) -> Program of one rank."""
