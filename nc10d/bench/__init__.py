"""Benchmarks: what things cost on this machine, results checked."""
