"""Ranks on several hosts of one machine: network namespaces, for those who may make them."""
