"""The launcher: starts the ranks of this machine, watches them, and says who failed first."""
