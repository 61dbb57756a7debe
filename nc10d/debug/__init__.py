"""Finding faults: what a job's dumps say, and how failures are told, measured.

`python -m nc10d.debug DIR` reads the dumps of all ranks; `python -m benchmarks.faults`
ends ranks
in many ways and prints what the survivors were told, beside torch's gloo.
"""
