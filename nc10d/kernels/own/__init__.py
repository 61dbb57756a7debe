"""Kernels that Numba makes from users' functions, for reductions."""
