"""The launcher: start this machine's ranks, watch them, and report the first failure."""
