"""The tables of the cost model: predictions, predictions against measurements, and pictures.

`read`, `worlds`, `predicted`, `table` and `prediction_errors` are pure.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Line, bytes_label, predictions
from benchmarks.model.collective_programs import LOCAL_SIZE, MAKERS, Collective, layout_of, spread
from benchmarks.model.draw import draw
from benchmarks.model.machine import DEVELOPMENT, Machine, changed, load, save
from benchmarks.model.measurements import Round, TimedCall, constants
from benchmarks.model.model import algorithm, seconds, switches
from nc10d.backend.cpu.algorithms.group_shape import Topology
from nc10d.base.text import byte_size

DESCRIPTION = """
The cost of collectives by a model that walks their programs. Latencies and seconds a byte are those
of --machine, of this machine if it is measured, else of the machine nc10d is developed on.
"""
SIZES = tuple(1 << power for power in range(10, 25, 2))
CHECKED = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
ROUNDS = 9
NEAR = 0.3
"""The allowed relative error of a prediction."""
TWO_HOSTS = spread(2, 1)
FEW = 4
"""In worlds of more hosts than this, only every other size is predicted."""


def read(table: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Read the options of a table: model, check-model or draw; SystemExit for wrong usage."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {table}", description=DESCRIPTION)
    parser.add_argument("--ranks", type=ranks, default=[8], help="8, or 8..65536 by factors of 8")
    parser.add_argument("--hosts", type=hosts, help="2x4: two hosts of four ranks each")
    if table == "draw":
        parser.add_argument("op", metavar="OP", choices=[*MAKERS], help=f"of {', '.join(MAKERS)}")
        parser.add_argument("--bytes", type=byte_size, default=64 << 10, help="(65536)")
    else:
        parser.add_argument("--op", dest="ops", action="append", choices=[*MAKERS])
        parser.add_argument("--machine", type=Path, help="JSON with constants; measuring writes it")
        parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of measuring ({ROUNDS})")
    if table == "model":
        parser.add_argument("--measure", action="store_true", help="measure this machine first")
        parser.add_argument(
            "--set", dest="settings", action="append", default=[], metavar="NAME=SECONDS"
        )
    if table == "check-model":
        parser.add_argument(
            "--far", action="store_true", help="on two hosts too, by TCP over loopback"
        )
    else:
        parser.add_argument("--out", type=Path, help="the picture, a PNG")
    options = parser.parse_args(arguments)
    if table == "check-model" and options.hosts and options.hosts[1] != 1:
        parser.error("check-model takes --hosts HOSTSx1: network namespaces of one rank each")
    return options


def main(table: str, arguments: Sequence[str]) -> int:
    """Run a table by its name; return the exit code. Blocks while it measures."""
    return RUN[table](read(table, arguments))


def ranks(text: str) -> list[int]:
    """Read 8, or 8..4096: from the first to the last by factors of 8."""
    first, dots, last = text.partition("..")
    if not first.isdecimal() or not (last if dots else first).isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither like 8 nor like 8..4096")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text!r} has no ranks")
    found = [low]
    while found[-1] * 8 < high:
        found.append(found[-1] * 8)
    return found if found[-1] == high else [*found, high]


def hosts(text: str) -> tuple[int, int]:
    """Read 2x4: hosts and ranks on each."""
    count, _, local_size = text.partition("x")
    if not (count.isdecimal() and local_size.isdecimal() and int(count) and int(local_size)):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOSTSxRANKS, such as 2x4")
    return int(count), int(local_size)


def worlds(options: argparse.Namespace) -> list[Topology]:
    """Return the topology of each requested world."""
    if options.hosts is not None:
        count, local_size = options.hosts
        return [spread(count * local_size, local_size)]
    return [spread(size, LOCAL_SIZE) for size in options.ranks]


def _measured(cells: Sequence[TimedCall], rounds: int, *, far: bool) -> list[Round]:
    from benchmarks.model.calibrate import survey_here  # predictions and pictures need no engine

    return survey_here(cells, rounds, far=far)


def _draw(options: argparse.Namespace) -> int:
    world = worlds(options)[-1]
    path = options.out or Path(f"{options.op}-{world.size}.png")
    draw(Collective(options.op, options.bytes, layout_of(world)), path)
    print(path)
    return 0


def _machine(options: argparse.Namespace) -> Machine:
    if options.measure:
        machine = constants(_measured((), options.rounds, far=True))
        if options.machine:
            save(machine, options.machine)
    else:
        machine = load(options.machine) if options.machine else DEVELOPMENT
    for setting in options.settings:
        machine = changed(machine, setting)
    return machine


def _origin(options: argparse.Namespace) -> str:
    """Return the origin of the constants."""
    if options.measure:
        origin = "this machine, measured just now"
    elif options.machine:
        origin = str(options.machine)
    else:
        origin = "the machine nc10d is developed on (--measure takes this one's)"
    return ", with ".join([origin, *options.settings])


def _model(options: argparse.Namespace) -> int:
    try:
        machine = _machine(options)
    except (OSError, ValueError) as error:
        raise SystemExit(f"python -m benchmarks model: {error}") from error
    print(f"# by the constants of {_origin(options)}")
    lines = []
    for op in options.ops or ["all_reduce"]:
        for world in worlds(options):
            line = predicted(machine, op, world)
            print("\n".join(table(machine, line, world)), flush=True)
            lines.append(line)
    path = options.out or Path("model.png")
    predictions(lines, path)
    print(f"# {path}")
    return 0


def predicted(machine: Machine, op: str, world: Topology) -> Line:
    """Return the predicted times of a collective over bytes."""
    sizes = SIZES if world.size <= FEW * LOCAL_SIZE else (*SIZES[::2], SIZES[-1])
    times = [seconds(machine, op, nbytes, world) for nbytes in sizes]
    found = list(switches(machine, op, world, (4, *SIZES)))
    return Line(f"{op}, {where(world)}", list(sizes), times, [switch.nbytes for switch in found])


def where(world: Topology) -> str:
    """Return the numbers of ranks and hosts, as text."""
    count = len(world.hosts)
    return f"{world.size} ranks" + (f" on {count} hosts" if count > 1 else "")


def table(machine: Machine, line: Line, world: Topology) -> Iterator[str]:
    """Yield a world's predictions as text."""
    op = line.label.partition(",")[0]
    yield f"# {line.label}"
    for nbytes, time in zip(line.sizes, line.times, strict=True):
        name = algorithm(machine, op, nbytes, world)
        yield f"{bytes_label(nbytes):>10} {time * 1e6:>12.1f} us   {name}"
    for switch in switches(machine, op, world, (4, *SIZES)):
        change = f"{switch.below * 1e6:.1f} -> {switch.above * 1e6:.1f} us"
        yield f"# from {switch.nbytes} bytes: {switch.after}, before: {switch.before} ({change})"


@dataclass(frozen=True, slots=True)
class PredictionError:
    """A call's prediction and measurement, medians over rounds; `error` is relative."""

    call: TimedCall
    predicted: float
    measured: float
    error: float


def prediction_errors(
    rounds: Sequence[Round], calls: Sequence[TimedCall], apart: Topology = TWO_HOSTS
) -> list[PredictionError]:
    """Compare each round's measurements with predictions by the same round's constants.

    `apart` is the topology of calls that are `far`.
    """
    found = []
    for call in calls:
        world = apart if call.far else spread(2)
        predicted = [seconds(constants([round_]), call.op, call.nbytes, world) for round_ in rounds]
        measured = [round_.times[call] for round_ in rounds]
        error = statistics.median(p / m for p, m in zip(predicted, measured, strict=True)) - 1
        middle = statistics.median(predicted), statistics.median(measured)
        found.append(PredictionError(call, *middle, error))
    return found


def _check(options: argparse.Namespace) -> int:
    apart = worlds(options)[0] if options.hosts else TWO_HOSTS
    places = [True] if options.hosts else [False, True] if options.far else [False]
    ops = options.ops or CHECKED
    calls = [TimedCall(op, nbytes, far) for far in places for op in ops for nbytes in SIZES]
    before = os.getloadavg()[0]
    if options.hosts:
        from benchmarks.model.hosts_survey import survey_hosts

        rounds = survey_hosts(calls, apart.size, options.rounds)
    else:
        rounds = _measured(calls, options.rounds, far=options.far)
    if options.machine:
        save(constants(rounds), options.machine)
    found = prediction_errors(rounds, calls, apart)
    after = os.getloadavg()[0]
    print(f"# {options.rounds} rounds; load {before:.1f} before, {after:.1f} after")
    print(f"{'collective':<16}{'bytes':>10}{'predicted us':>14}{'measured us':>13}{'error':>8}")
    for row in found:
        place = where(apart) if row.call.far else "2 ranks"
        print(
            f"{row.call.op:<16}{bytes_label(row.call.nbytes):>10}{row.predicted * 1e6:>14.1f}"
            f"{row.measured * 1e6:>13.1f}{row.error:>+8.0%}  {place}"
        )
    near = sum(abs(row.error) <= NEAR for row in found)
    print(f"# {near} of {len(found)} within {NEAR:.0%}")
    return 0


RUN: dict[str, Callable[[argparse.Namespace], int]] = {
    "model": _model,
    "check-model": _check,
    "draw": _draw,
}
