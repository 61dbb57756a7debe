"""The compiled part of the CPU backend: machine words in, machine words changed."""
