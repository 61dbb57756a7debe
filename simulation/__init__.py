"""The protocols of a job in virtual time on a virtual network; a seed determines each run.

`run(seed)` plays one schedule: it draws a scenario, sizes, weather and faults from the seed. It
returns if the scenario's laws held, and raises a Failure with the seed and a trace otherwise.
`python -m simulation SEED` plays the same schedule again. The product's code is real; sockets,
clocks, threads and processes are simulated. `bugs` holds seeded bugs that the laws must find.
"""

from __future__ import annotations

from simulation.clock import Simulation
from simulation.schedules import SCENARIOS, Failure, run, scenario_of

__all__ = ["SCENARIOS", "Failure", "Simulation", "run", "scenario_of"]
