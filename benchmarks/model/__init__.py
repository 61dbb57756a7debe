"""A cost model of the CPU engine: machine constants, predictions, drawings of programs."""
