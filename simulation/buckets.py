"""A Reducer's buckets: gradients come in any order, buckets leave in the same order on all ranks.

Laws: in every pass each rank launches every bucket once, in the plan's order, and only after all
gradients of the bucket have come. All buckets have left when the last gradient has come.
"""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.reducer.schedule import Schedule
from simulation.clock import Simulation
from simulation.laws import require


def buckets(sim: Simulation) -> None:
    """Run passes of several ranks over the same plan."""
    random = sim.random
    count, size = random.randint(1, 8), random.randint(2, 4)
    params = random.sample(range(count), count)
    cuts = sorted(random.sample(range(1, count), random.randint(0, count - 1)))
    plan = [params[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    schedules = [Schedule(plan) for _ in range(size)]
    for _ in range(random.randint(1, 3)):
        marks = [random.choice((1, 1, 1, 2, 0)) for _ in range(count)]
        left = [_pass(sim, schedule, plan, marks) for schedule in schedules]
        require(all(order == left[0] for order in left), f"ranks send buckets as {left}")
        require(left[0] == list(range(len(plan))), f"buckets leave as {left[0]}")


def _pass(
    sim: Simulation, schedule: Schedule, plan: Sequence[Sequence[int]], marks: list[int]
) -> list[int]:
    left = list(schedule.begin(marks))
    missing = list(marks)
    arrivals = [param for param, times in enumerate(marks) for _ in range(times)]
    sim.random.shuffle(arrivals)
    for param in arrivals:
        missing[param] -= 1
        for bucket in schedule.mark(param):
            late = [p for p in plan[bucket] if missing[p]]
            require(not late, f"bucket {bucket} leaves before the gradients {late}")
            left.append(bucket)
    schedule.require_complete()
    return left
