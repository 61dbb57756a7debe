"""Exact sums: kernels that add floats as integers."""
