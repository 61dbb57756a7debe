"""Micro-benchmarks of parts of nc10d."""
