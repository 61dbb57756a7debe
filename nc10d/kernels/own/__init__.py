"""Reductions of one's own: the decorator, and the kernels that Numba makes from functions."""
