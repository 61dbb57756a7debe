"""Pictures of programs: a row for each rank, time to the right, signals and transfers as arrows.

The walk is that of timed_walk.py, on a machine made for pictures. Each step takes a little time;
moving the largest piece takes a unit of time, and folding it another unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import add_legend, bytes_label, new_figure
from benchmarks.model.collective_programs import Collective
from benchmarks.model.machine import Machine
from benchmarks.model.timed_walk import Event, Walk
from nc10d.backend.cpu.algorithms.group_shape import Topology
from nc10d.backend.cpu.program.program import SHARED, Step, StepKind

LIMIT = 30.0
"""Units of time that are drawn at most: longer programs continue in the same way."""
MOMENT, WAY = 0.15, 0.4
"""Units of time of the shortest step, and of a signal's way."""
INCHES = 0.72
"""Width of a unit of time."""
COLUMN = 2.3
"""Inches of a column of the legend."""
TALL = 0.5
"""Height of a box; rows are 1 apart."""
DARK = "#333333"
WAITS = (
    StepKind.WAIT,
    StepKind.WAIT_ALL,
    StepKind.MEET_ALL,
    StepKind.BRANCH_IF_FLAGGED,
    StepKind.FREE,
)


@dataclass(frozen=True, slots=True)
class Look:
    """A kind of step: its name in the legend, and its colour."""

    name: str
    colour: str


PUT = Look("put into my staging buffer", "#6baed6")
GET = Look("get from a peer's buffer or array", "#74c476")
FOLD = Look("fold contributions", "#fd8d3c")
FILL = Look("put into a peer's exposed array", "#3182bd")
COPY = Look("copy or scale my own", "#c7c3e3")
GIVE = Look("send to another host", "#e377c2")
TAKE = Look("take from another host", "#f7b6d2")
ASIDE = Look("enter, announce, compare", "#d9d9d9")
LOOKS = (PUT, FILL, GET, FOLD, COPY, GIVE, TAKE, ASIDE)
BY_KIND = {
    StepKind.FOLD_STAGED: FOLD,
    StepKind.FOLD_EXPOSED: FOLD,
    StepKind.PAIR: FOLD,
    StepKind.FETCH: GET,
    StepKind.FILL_EXPOSED: FILL,
    StepKind.GIVE: GIVE,
    StepKind.PUSH: GIVE,
    StepKind.TAKE: TAKE,
    StepKind.ENTER: ASIDE,
    StepKind.EXPOSE: ASIDE,
    StepKind.WITHDRAW: ASIDE,
    StepKind.CALL_HEADER: ASIDE,
    StepKind.CHECK_HEADER: ASIDE,
}


def look(step: Step, place: int) -> Look | None:
    """Return the look of a step of the rank with number `place` on its host; None for no box."""
    if step.kind not in (StepKind.COPY, StepKind.APPLY):
        return BY_KIND.get(step.kind)
    if step.src.space in SHARED and step.src.index != place:
        return GET
    return PUT if step.dst.space in SHARED else COPY


def walked(collective: Collective) -> Walk:
    """Walk a collective's programs on all ranks, once, on the machine made for pictures."""
    programs = {rank: collective.program(rank) for rank in range(collective.layout.size)}
    steps = [step for program in programs.values() for step in program.steps]
    rate = 1.0 / max(1, *(step.nbytes for step in steps if look(step, -1)))
    local_size = max(map(len, collective.hosts.hosts))
    move, fold = ((1, rate),), ((1, 2 * rate / max(1, local_size - 1)),)
    staged = Machine({"": 0.0}, MOMENT, WAY, WAY, MOMENT, move, move, fold, move, move)
    machine = replace(staged, kernel=move, fill=move, written=fold)
    walk = Walk(machine, collective.hosts, programs, collective.arrays, trace=True)
    walk.run()
    return walk


def draw(collective: Collective, path: Path) -> None:
    """Write a picture of a collective's programs as a PNG; needs matplotlib."""
    walk = walked(collective)
    end = max(ends[-1] for ends in walk.ends.values())
    shown = min(end, LIMIT)
    row_of = {rank: i for i, rank in enumerate(r for h in collective.hosts.hosts for r in h)}
    size = (2.2 + INCHES * max(shown, 7), 1.9 + 0.55 * len(row_of))
    figure = new_figure(size)
    axes: Any = figure.add_subplot()
    _rows(axes, collective, row_of, shown)
    events = [event for event in walk.events if event.begin < shown]
    for event in events:
        _event(axes, event, collective, row_of)
    for box in boxes(events, collective.hosts):
        _box(axes, box, row_of[box.rank])
    _legend(figure, collective, events)
    axes.set_title(_title(collective, end, shown), loc="left", fontsize=11)
    figure.savefig(path)


def _title(collective: Collective, end: float, shown: float) -> str:
    size, hosts = collective.layout.size, len(collective.hosts.hosts)
    where = "on one host" if hosts == 1 else f"on {hosts} hosts"
    rest = "" if shown == end else f" (the first {shown / end:.0%} of it)"
    return f"{collective.op} of {bytes_label(collective.nbytes)}, {size} ranks {where}{rest}"


def _rows(axes: Any, collective: Collective, row_of: dict[int, int], shown: float) -> None:
    several = len(collective.hosts.hosts) > 1
    for number, ranks in enumerate(collective.hosts.hosts):
        rows = [row_of[rank] for rank in ranks]
        if several:
            shade = "#f4f4ee" if number % 2 == 0 else "#eaf1f5"
            axes.axhspan(rows[0] - 0.5, rows[-1] + 0.5, color=shade, zorder=0)
            axes.text(
                shown * 1.005, sum(rows) / len(rows), f"host {number}", va="center", fontsize=9
            )
    for row in row_of.values():
        axes.axhline(row, color="#bbbbbb", linewidth=0.8, zorder=1)
    axes.set_yticks(list(row_of.values()), [f"rank {rank}" for rank in row_of])
    axes.set_ylim(len(row_of) - 0.5, -0.55)
    axes.set_xlim(-0.1, shown * 1.01)
    axes.set_xlabel(
        "simulated time: moving the largest piece takes 1, folding it 2, a signal 0.4", fontsize=9
    )
    axes.tick_params(left=False, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _event(axes: Any, event: Event, collective: Collective, row_of: dict[int, int]) -> None:
    row, hosts = row_of[event.rank], collective.hosts
    sort = look(event.step, hosts.places[event.rank][1])
    dark: dict[str, Any] = {"color": DARK, "zorder": 3}
    if event.step.kind is StepKind.SIGNAL:
        axes.plot(event.end, row, "o", markersize=4, **{**dark, "zorder": 5})
    elif event.step.kind in WAITS and event.causes:
        axes.plot([event.begin, event.end], [row, row], ":", linewidth=1.6, **dark)
        if (
            event.end > event.begin + 1.5 * MOMENT
        ):  # shorter waits had their signal before they began
            _arrows(axes, event, row_of)
    elif event.step.kind in (StepKind.ROUND, StepKind.LOOP):
        axes.plot([event.end] * 2, [row - 0.3, row + 0.3], linewidth=1.5, **dark)
    elif sort is TAKE:
        _arrows(axes, event, row_of)


@dataclass(slots=True)
class Box:
    """A rank's activity for a while; transfers that begin together share a box."""

    rank: int
    begin: float
    end: float
    look: Look
    label: str


def boxes(events: Sequence[Event], hosts: Topology) -> list[Box]:
    """Return the boxes of events."""
    flows: dict[tuple[int, float, Look], Box] = {}
    found = []
    for event in events:
        sort = _box_look(event, hosts)
        if sort is None:
            continue
        label = _label(event, sort, hosts.hosts[hosts.host_of(event.rank)])
        box = Box(event.rank, event.begin, event.end, sort, label)
        together = flows.setdefault((box.rank, box.begin, sort), box)
        if together is box or sort not in (GIVE, TAKE):
            found.append(box)
        else:
            together.end = max(together.end, box.end)
            together.label += f", {event.step.peer}"
    return found


def _box_look(event: Event, hosts: Topology) -> Look | None:
    """Return the look of an event's box; None if it has none, since it moves no bytes."""
    sort = look(event.step, hosts.places[event.rank][1])
    return sort if sort is ASIDE or event.nbytes else None


def _box(axes: Any, box: Box, row: int) -> None:
    # Bytes leave while the rank does other steps: transfers have a separate strip.
    middle, tall = (row - 0.38, 0.2) if box.look is GIVE else (row, TALL)
    width = box.end - box.begin
    style = {"color": box.look.colour, "edgecolor": "white", "linewidth": 0.8, "zorder": 4}
    axes.barh(middle, width, tall / (1 + (box.look is ASIDE)), left=box.begin, **style)
    text = {"ha": "center", "va": "center", "fontsize": 7, "zorder": 6, "clip_on": True}
    if width * INCHES * 72 > 4 * len(box.label):
        axes.text(box.begin + width / 2, middle, box.label, **text)


def _label(event: Event, sort: Look, peers: Sequence[int]) -> str:
    if sort is GET:
        local = event.step.peer if event.step.kind is StepKind.FETCH else event.step.src.index
        return f"of {peers[local]}"
    if sort in (GIVE, TAKE):
        return f"{'to' if sort is GIVE else 'of'} {event.step.peer}"
    return bytes_label(event.nbytes) if sort is not ASIDE else ""


def _arrows(axes: Any, event: Event, row_of: dict[int, int]) -> None:
    last = max((since for _, since in event.causes), default=0.0)
    crossing = event.step.kind is StepKind.TAKE
    for peer, since in event.causes:
        decisive = since == last
        style = {
            "arrowstyle": "-|>" if decisive else "-",
            "color": GIVE.colour if crossing else DARK,
            "alpha": 0.7 if crossing else 0.45 if decisive else 0.15,
            "linewidth": 0.9,
            "shrinkA": 1,
            "shrinkB": 1,
        }
        layer = 5 if crossing else 2
        start, end = (since, row_of[peer]), (event.end, row_of[event.rank])
        axes.annotate(
            "", xy=end, xytext=start, arrowprops=style, zorder=layer, annotation_clip=True
        )


def _legend(figure: Any, collective: Collective, events: Sequence[Event]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = {_box_look(event, collective.hosts) for event in events}
    entries: list[Any] = [
        Patch(color=sort.colour, label=sort.name) for sort in LOOKS if sort in used
    ]
    entries += [
        Line2D(
            [],
            [],
            color=DARK,
            marker="o",
            linestyle="",
            markersize=4,
            label="signal: my counter grows",
        ),
        Line2D([], [], color=DARK, linestyle=":", label="wait, and the signal that frees it"),
        Line2D([], [], color=DARK, marker="|", linestyle="", markersize=9, label="end of a round"),
    ]
    columns = int(figure.get_figwidth() / COLUMN)
    add_legend(figure, entries, columns, fontsize=8)
