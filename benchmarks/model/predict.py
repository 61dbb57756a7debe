"""`python -m nc10d.bench --model` and `--draw`: predictions, held against measurements; pictures.

`read`, `worlds`, `predicted`, `table` and `verdicts` are pure; `run` measures, prints and draws.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.model.cases import MAKERS, MATES, Collective, layout_of, spread
from benchmarks.model.charts import Line, chart
from benchmarks.model.draw import amount, draw
from benchmarks.model.machine import DEVELOPMENT, Machine, changed, load, save
from benchmarks.model.model import algorithm, seconds, switches
from benchmarks.model.samples import Cell, Round, constants
from nc10d.backend.cpu.algorithms.topology import Topology

DESCRIPTION = """
What collectives should cost by a model that walks their programs: latencies and seconds a byte
are those of --machine, of this machine with --measure, else of the machine nc10d is developed on.
"""
SIZES = tuple(1 << power for power in range(10, 25, 2))
CHECKED = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
ROUNDS = 9
NEAR = 0.3
"""How far off a prediction may be."""
TWO_HOSTS = spread(2, 1)
FEW = 4
"""Of worlds with more ranks than this many hosts have, every other size is predicted."""


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; SystemExit with usage if it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m nc10d.bench", description=DESCRIPTION)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", action="store_true", help="print and plot predicted times")
    what.add_argument("--draw", metavar="OP", choices=[*MAKERS], help="draw programs as a picture")
    what.add_argument(
        "--check-model", action="store_true", help="measure, and hold predictions against it"
    )
    parser.add_argument(
        "--op", dest="ops", action="append", choices=[*MAKERS], help="for --model (all_reduce)"
    )
    parser.add_argument("--ranks", type=ranks, default=[8], help="8, or 8..65536 by factors of 8")
    parser.add_argument("--hosts", type=hosts, help="2x4: two hosts of four ranks each")
    parser.add_argument("--bytes", type=int, default=64 << 10, help="for --draw (65536)")
    parser.add_argument("--measure", action="store_true", help="measure this machine's constants")
    parser.add_argument("--machine", type=Path, help="JSON with constants; measuring writes it")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="NAME=SECONDS"
    )
    parser.add_argument(
        "--far", action="store_true", help="--check-model on two hosts too, by TCP over loopback"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of measuring ({ROUNDS})")
    parser.add_argument("--out", type=Path, help="the picture, a PNG")
    options = parser.parse_args(arguments)
    if options.check_model and options.hosts and options.hosts[1] != 1:
        parser.error("--check-model takes --hosts HOSTSx1: network namespaces of one rank each")
    return options


def main(arguments: Sequence[str]) -> int:
    """Read the command line and do what it says; return the exit code."""
    return run(read(arguments))


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
    count, _, mates = text.partition("x")
    if not (count.isdecimal() and mates.isdecimal() and int(count) and int(mates)):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOSTSxRANKS, such as 2x4")
    return int(count), int(mates)


def worlds(options: argparse.Namespace) -> list[Topology]:
    """Return who is where in each world that is asked for."""
    if options.hosts is not None:
        count, mates = options.hosts
        return [spread(count * mates, mates)]
    return [spread(size, MATES) for size in options.ranks]


def run(options: argparse.Namespace) -> int:
    """Do what the options ask for; return the exit code. Blocks while it measures."""
    if options.draw:
        return _draw(options)
    if options.check_model:
        return _check(options)
    try:
        machine = _machine(options)
    except (OSError, ValueError) as error:
        raise SystemExit(f"python -m nc10d.bench: {error}") from error
    return _model(options, machine)


def _measured(cells: Sequence[Cell], rounds: int, *, far: bool) -> list[Round]:
    from benchmarks.model.calibrate import survey_here  # predictions and pictures need no engine

    return survey_here(cells, rounds, far=far)


def _draw(options: argparse.Namespace) -> int:
    world = worlds(options)[-1]
    path = options.out or Path(f"{options.draw}-{world.size}.png")
    draw(Collective(options.draw, options.bytes, layout_of(world)), path)
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


def _whose(options: argparse.Namespace) -> str:
    """Say which machine's constants are used."""
    if options.measure:
        whose = "this machine, measured just now"
    elif options.machine:
        whose = str(options.machine)
    else:
        whose = "the machine nc10d is developed on (--measure takes this one's)"
    return ", with ".join([whose, *options.settings])


def _model(options: argparse.Namespace, machine: Machine) -> int:
    print(f"# by the constants of {_whose(options)}")
    lines = []
    for op in options.ops or ["all_reduce"]:
        for world in worlds(options):
            line = predicted(machine, op, world)
            print("\n".join(table(machine, line, world)), flush=True)
            lines.append(line)
    path = options.out or Path("model.png")
    chart(lines, path)
    print(f"# {path}")
    return 0


def predicted(machine: Machine, op: str, world: Topology) -> Line:
    """Return the predicted times of a collective over bytes."""
    sizes = SIZES if world.size <= FEW * MATES else (*SIZES[::2], SIZES[-1])
    times = [seconds(machine, op, nbytes, world) for nbytes in sizes]
    found = list(switches(machine, op, world, (4, *SIZES)))
    return Line(f"{op}, {where(world)}", list(sizes), times, [one.nbytes for one in found])


def where(world: Topology) -> str:
    """Say how many ranks there are, and on how many hosts."""
    count = len(world.hosts)
    return f"{world.size} ranks" + (f" on {count} hosts" if count > 1 else "")


def table(machine: Machine, line: Line, world: Topology) -> Iterator[str]:
    """Yield a world's predictions as text."""
    op = line.label.partition(",")[0]
    yield f"# {line.label}"
    for nbytes, time in zip(line.sizes, line.times, strict=True):
        name = algorithm(machine, op, nbytes, world)
        yield f"{amount(nbytes):>10} {time * 1e6:>12.1f} us   {name}"
    for one in switches(machine, op, world, (4, *SIZES)):
        change = f"{one.below * 1e6:.1f} -> {one.above * 1e6:.1f} us"
        yield f"# from {one.nbytes} bytes: {one.after}, before: {one.before} ({change})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A cell's prediction and measurement, medians over rounds; the error is in parts of 1."""

    cell: Cell
    predicted: float
    measured: float
    error: float


def verdicts(
    rounds: Sequence[Round], cells: Sequence[Cell], apart: Topology = TWO_HOSTS
) -> list[Verdict]:
    """Hold what each round's constants predict against what was measured in that very round.

    `apart` is where the ranks of cells that are `far` were.
    """
    found = []
    for cell in cells:
        world = apart if cell.far else spread(2)
        told = [seconds(constants([one]), cell.op, cell.nbytes, world) for one in rounds]
        seen = [one.times[cell] for one in rounds]
        ratio = statistics.median(p / m for p, m in zip(told, seen, strict=True))
        found.append(Verdict(cell, statistics.median(told), statistics.median(seen), ratio - 1))
    return found


def _check(options: argparse.Namespace) -> int:
    apart = worlds(options)[0] if options.hosts else TWO_HOSTS
    places = [True] if options.hosts else [False, True] if options.far else [False]
    ops = options.ops or CHECKED
    cells = [Cell(op, nbytes, far) for far in places for op in ops for nbytes in SIZES]
    before = os.getloadavg()[0]
    if options.hosts:
        from benchmarks.model.distant import survey_apart

        rounds = survey_apart(cells, apart.size, options.rounds)
    else:
        rounds = _measured(cells, options.rounds, far=options.far)
    if options.machine:
        save(constants(rounds), options.machine)
    found = verdicts(rounds, cells, apart)
    after = os.getloadavg()[0]
    print(f"# {options.rounds} rounds; load {before:.1f} before, {after:.1f} after")
    print(f"{'collective':<16}{'bytes':>10}{'predicted us':>14}{'measured us':>13}{'error':>8}")
    for one in found:
        place = where(apart) if one.cell.far else "2 ranks"
        print(
            f"{one.cell.op:<16}{amount(one.cell.nbytes):>10}{one.predicted * 1e6:>14.1f}"
            f"{one.measured * 1e6:>13.1f}{one.error:>+8.0%}  {place}"
        )
    near = sum(abs(one.error) <= NEAR for one in found)
    print(f"# {near} of {len(found)} within {NEAR:.0%}")
    return 0
