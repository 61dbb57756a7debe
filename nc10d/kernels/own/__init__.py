"""Reductions of one's own: kernels that Numba makes from functions."""
