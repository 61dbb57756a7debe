"""Kernels for NVIDIA GPUs: bodies that also run on the CPU, and PTX made from them."""
