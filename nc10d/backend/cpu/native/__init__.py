"""The CPU backend's compiled part: machine words in, machine words changed."""
