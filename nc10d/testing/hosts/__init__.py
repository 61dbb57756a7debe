"""Ranks on several hosts of one machine: network namespaces, which need rights to make."""
