"""Connections between hosts: addresses, connect, accept, streams, links."""
