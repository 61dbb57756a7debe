"""Ranks that a launcher starts, and ranks on several hosts: network namespaces."""
