"""Optimizers of torch whose state is divided over the ranks of a group, or whose steps overlap."""
