"""A group's diagnosis from the ranks' dumps: missing, different or late ranks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nc10d.group.flight_recorder import Dump, Traffic

MOST_ROWS = 24
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings about a group."""

    # `missing` ranks left no dump, `late` ranks have made fewer calls than others. `last` is rank →
    # number of its latest call. `different` is (number, {call: ranks that made it}) for the first
    # number at which calls differ. `reasons` come from the dumps, the most frequent first;
    # `messages` are lines about messages that ranks wait for.

    group: str
    size: int
    reasons: list[str]
    missing: list[int]
    late: list[int]
    last: dict[int, int]
    different: tuple[int, dict[str, list[int]]] | None
    messages: list[str]

    @property
    def clean(self) -> bool:
        """Whether all ranks are there, in step, and none has failed."""
        return not (self.missing or self.late or self.different or self.messages)


def diagnose(dumps: Sequence[Dump]) -> Diagnosis:
    """Return the findings from a group's dumps; each rank's newest dump counts."""
    by_rank = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.written)}
    size = max(dump.size for dump in dumps)
    last = _last(by_rank.values())
    farthest = max(last.values(), default=0)
    failed = {dump.failed for dump in by_rank.values() if dump.failed is not None}
    absent = [rank for rank in range(size) if rank not in by_rank]
    return Diagnosis(
        group=dumps[0].group,
        size=size,
        reasons=[why for why, _ in Counter(dump.why for dump in by_rank.values()).most_common()],
        missing=sorted(absent, key=lambda rank: (rank not in failed, rank)),
        late=[rank for rank in range(size) if last.get(rank, farthest) < farthest],
        last=last,
        different=_different(by_rank),
        messages=[*_messages(by_rank)],
    )


def _messages(by_rank: dict[int, Dump]) -> Iterator[str]:
    """Yield a line for each message that a rank waits for, with the peer's progress."""
    begun = {
        (rank, link.direction, link.peer): link.count
        for rank, dump in by_rank.items()
        for link in dump.traffic
    }
    for rank, dump in sorted(by_rank.items()):
        for link in dump.traffic:
            if link.waits:
                yield _waiting(rank, link, by_rank, begun)


def _waiting(
    rank: int, link: Traffic, by_rank: dict[int, Dump], begun: dict[tuple[int, str, int], int]
) -> str:
    sending = link.direction == "to"
    purpose = "to send to" if sending else "for a message from"
    line = f"  message    rank {rank} waits {purpose} rank {link.peer} after {link.count}"
    if link.peer not in by_rank:
        return line
    theirs = begun.get((link.peer, "from" if sending else "to", rank), 0)
    return f"{line}; rank {link.peer} has {'received' if sending else 'sent'} {theirs}"


def _last(dumps: Iterable[Dump]) -> dict[int, int]:
    """Return the number of each rank's latest call, by that rank's dump or its peers' dumps."""
    last: dict[int, int] = {}
    for dump in dumps:
        # Other groups' calls may have displaced this group's from the record; `last` keeps them.
        own = dump.calls[-1].seq if dump.calls else 0
        for rank, seq in [*dump.last.items(), (dump.rank, own)]:
            last[rank] = max(seq, last.get(rank, 0))
    return last


def _different(by_rank: dict[int, Dump]) -> tuple[int, dict[str, list[int]]] | None:
    """Return the first number at which ranks made different calls; None if there is none."""
    calls: dict[int, dict[str, list[int]]] = {}
    for rank, dump in sorted(by_rank.items()):
        for entry in dump.calls:
            calls.setdefault(entry.seq, {}).setdefault(entry.call, []).append(rank)
    return next(((seq, ranks) for seq, ranks in sorted(calls.items()) if len(ranks) > 1), None)


def report(dumps: Sequence[Dump]) -> str:
    """Return a group's findings, and a row for each rank, as text for a screen."""
    diagnosis = diagnose(dumps)
    by_rank = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.written)}
    shown = _rows(diagnosis)
    lines = [f"group {diagnosis.group!r}, {diagnosis.size} ranks", *_findings(diagnosis)]
    lines += [_row(rank, by_rank.get(rank), diagnosis.last.get(rank)) for rank in shown]
    if len(shown) < diagnosis.size:
        lines.append(f"  and {diagnosis.size - len(shown)} ranks in step with the others")
    return "\n".join(lines)


def _findings(diagnosis: Diagnosis) -> list[str]:
    found = []
    if diagnosis.missing:
        found.append(f"  missing    {_ranks(diagnosis.missing)} left no dump")
    if diagnosis.different:
        seq, calls = diagnosis.different
        made = "; ".join(f"{_ranks(ranks)} called {call}" for call, ranks in calls.items())
        found.append(f"  different  at #{seq}: {made}")
    if diagnosis.late:
        farthest = max(diagnosis.last.values())
        late = ", ".join(f"{rank} (#{diagnosis.last[rank]})" for rank in diagnosis.late)
        found.append(f"  late       rank {late}; the others are at #{farthest}")
    found += diagnosis.messages
    if diagnosis.clean:
        found.append("  all ranks left a dump, and are in step")
    return found + [f"  why        {_cut(why)}" for why in diagnosis.reasons[:3]]


def _rows(diagnosis: Diagnosis) -> list[int]:
    """Return the ranks to show: at most MOST_ROWS, those with findings first."""
    odd = {*diagnosis.missing, *diagnosis.late}
    if diagnosis.different:
        calls = sorted(diagnosis.different[1].values(), key=len)
        odd |= {rank for ranks in calls[:-1] for rank in ranks}
    first = sorted(range(diagnosis.size), key=lambda rank: (rank not in odd, rank))
    return sorted(first[:MOST_ROWS])


def _row(rank: int, dump: Dump | None, last: int | None) -> str:
    if dump is None:
        return f"  rank {rank:<4} #{last or '?':<6} no dump"
    latest = dump.calls[-1] if dump.calls else None
    nothing = "a call that the record has no more" if last else "nothing yet"
    call = nothing if latest is None else latest.where
    waits = f", waits for rank {dump.waits_for}" if dump.waits_for is not None else ""
    state = latest.state if latest else ""
    where = f"(pid {dump.pid} on {dump.host})"
    return _cut(f"  rank {rank:<4} #{last:<6} {call} {state}{waits} {where}")


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
