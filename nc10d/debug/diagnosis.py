"""What the dumps of a group's ranks say together: who is missing, different or late. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nc10d.group.flight_recorder import Dump, Traffic

MOST_ROWS = 24
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings about one group. `different` is (number, {what was called: by which ranks})."""

    group: str
    size: int
    whys: list[str]
    missing: list[int]
    late: list[int]
    last: dict[int, int]
    different: tuple[int, dict[str, list[int]]] | None
    messages: list[str]

    @property
    def clean(self) -> bool:
        """Whether all ranks are there, in step, and none has failed."""
        return not (self.missing or self.late or self.different or self.messages)


def judge(dumps: Sequence[Dump]) -> Diagnosis:
    """Return what the dumps of one group say; the newest counts of each rank."""
    by_rank = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.written)}
    size = max(dump.size for dump in dumps)
    last = _last(by_rank.values())
    farthest = max(last.values(), default=0)
    failed = {dump.failed for dump in by_rank.values() if dump.failed is not None}
    absent = [rank for rank in range(size) if rank not in by_rank]
    return Diagnosis(
        group=dumps[0].group,
        size=size,
        whys=[why for why, _ in Counter(dump.why for dump in by_rank.values()).most_common()],
        missing=sorted(absent, key=lambda rank: (rank not in failed, rank)),
        late=[rank for rank in range(size) if last.get(rank, farthest) < farthest],
        last=last,
        different=_different(by_rank),
        messages=[*_messages(by_rank)],
    )


def _messages(by_rank: dict[int, Dump]) -> Iterator[str]:
    """Say which messages are waited for, and how far the other end of the link is."""
    begun = {
        (rank, one.direction, one.peer): one.count
        for rank, dump in by_rank.items()
        for one in dump.traffic
    }
    for rank, dump in sorted(by_rank.items()):
        for one in dump.traffic:
            if one.waits:
                yield _waiting(rank, one, by_rank, begun)


def _waiting(
    rank: int, one: Traffic, by_rank: dict[int, Dump], begun: dict[tuple[int, str, int], int]
) -> str:
    sending = one.direction == "to"
    what = "to send to" if sending else "for a message from"
    told = f"  message    rank {rank} waits {what} rank {one.peer} after {one.count}"
    if one.peer not in by_rank:
        return told
    theirs = begun.get((one.peer, "from" if sending else "to", rank), 0)
    return f"{told}; rank {one.peer} has {'received' if sending else 'sent'} {theirs}"


def _last(dumps: Iterable[Dump]) -> dict[int, int]:
    """Return each rank's latest number: by its own word, or as others saw it."""
    last: dict[int, int] = {}
    for dump in dumps:
        # Calls of other groups may have pushed this one's out of the record, not out of `last`.
        own = dump.calls[-1].seq if dump.calls else 0
        for rank, seq in [*dump.last.items(), (dump.rank, own)]:
            last[rank] = max(seq, last.get(rank, 0))
    return last


def _different(by_rank: dict[int, Dump]) -> tuple[int, dict[str, list[int]]] | None:
    """Return the first number at which ranks called different things."""
    calls: dict[int, dict[str, list[int]]] = {}
    for rank, dump in sorted(by_rank.items()):
        for entry in dump.calls:
            calls.setdefault(entry.seq, {}).setdefault(entry.call, []).append(rank)
    return next(((seq, what) for seq, what in sorted(calls.items()) if len(what) > 1), None)


def report(dumps: Sequence[Dump]) -> str:
    """Return one group's findings, and a row for each rank, for a screen."""
    verdict = judge(dumps)
    by_rank = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.written)}
    shown = _rows(verdict)
    lines = [f"group {verdict.group!r}, {verdict.size} ranks", *_findings(verdict)]
    lines += [_row(rank, by_rank.get(rank), verdict.last.get(rank)) for rank in shown]
    if len(shown) < verdict.size:
        lines.append(f"  and {verdict.size - len(shown)} ranks in step with the others")
    return "\n".join(lines)


def _findings(verdict: Diagnosis) -> list[str]:
    found = []
    if verdict.missing:
        found.append(f"  missing    {_ranks(verdict.missing)} left no dump")
    if verdict.different:
        seq, calls = verdict.different
        told = "; ".join(f"{_ranks(ranks)} called {call}" for call, ranks in calls.items())
        found.append(f"  different  at #{seq}: {told}")
    if verdict.late:
        farthest = max(verdict.last.values())
        told = ", ".join(f"{rank} (#{verdict.last[rank]})" for rank in verdict.late)
        found.append(f"  late       rank {told}; the others are at #{farthest}")
    found += verdict.messages
    if verdict.clean:
        found.append("  all ranks left a dump, and are in step")
    return found + [f"  why        {_cut(why)}" for why in verdict.whys[:3]]


def _rows(verdict: Diagnosis) -> list[int]:
    """Return the ranks to show: all of them, or of many those that stand out first."""
    odd = {*verdict.missing, *verdict.late}
    if verdict.different:
        calls = sorted(verdict.different[1].values(), key=len)
        odd |= {rank for ranks in calls[:-1] for rank in ranks}
    first = sorted(range(verdict.size), key=lambda rank: (rank not in odd, rank))
    return sorted(first[:MOST_ROWS])


def _row(rank: int, dump: Dump | None, last: int | None) -> str:
    if dump is None:
        return f"  rank {rank:<4} #{last or '?':<6} no dump"
    latest = dump.calls[-1] if dump.calls else None
    nothing = "a call that the record has no more" if last else "nothing yet"
    call = nothing if latest is None else latest.where
    waits = f", waits for rank {dump.waits_for}" if dump.waits_for is not None else ""
    state = latest.state if latest else ""
    return _cut(
        f"  rank {rank:<4} #{last:<6} {call} {state}{waits} (pid {dump.pid} on {dump.host})"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
