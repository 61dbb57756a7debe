"""Checks on the contracts for stores, Works and groups, for their writers."""
