"""Checks of the contracts of stores, Works and groups, for their writers."""
