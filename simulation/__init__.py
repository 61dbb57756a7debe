"""The protocols of a job, run in virtual time on a virtual network, each run from one integer.

`run(seed)` plays one schedule: a scenario, sizes, weather and faults are drawn from the seed. It
returns when the scenario's laws held, and raises a Failure with the seed and a trace otherwise.
`python -m simulation SEED` plays it again. The product's code is the real one; only
sockets, clocks, threads and processes are not. `bugs` are faults that it must find.
"""

from __future__ import annotations

from simulation.clock import Simulation, virtual
from simulation.schedules import SCENARIOS, Failure, play, run, scenario_of

__all__ = ["SCENARIOS", "Failure", "Simulation", "play", "run", "scenario_of", "virtual"]
