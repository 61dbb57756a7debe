"""Measurements of nc10d for its developers: `python -m benchmarks --help`. Not in the wheel."""
