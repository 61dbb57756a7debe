"""Modules whose parameters, gradients and optimizer state are divided over a group (ZeRO-3)."""
