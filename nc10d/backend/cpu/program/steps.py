"""The steps that algorithms are written with: a function for each kind.

The head of `program` explains rounds, ticks and slots. Data from other hosts arrives in a user's
array or in scratch memory, which is private to a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nc10d.backend.cpu.native.offsets import FOLD_BLOCK
from nc10d.backend.cpu.program.program import (
    GATE_BYTES,
    NOWHERE,
    At,
    Combine,
    Kernel,
    Step,
    StepKind,
    staging,
    user,
)

HEADER_BYTES = 192
"""Bytes in a call's header: sequence number, fingerprint, and the call as text."""
SIZES_BYTES = 16
"""Bytes in the sizes for a rank: the bytes sent there, and those awaited from that rank."""
MESSAGE_BYTES = 88
"""Bytes in a message's header: tag, size and dtype, and the line that sends the message."""


def copy(dst: At, src: At, nbytes: int, total: int = 0) -> Step:
    """dst[:nbytes] = src[:nbytes]; with `total`, at most those left in this segment."""
    return Step(StepKind.COPY, nbytes, dst=dst, src=src, total=total)


def apply(dst: At, src: At, nbytes: int, kernel: Kernel, arg: float = 0, total: int = 0) -> Step:
    """dst = kernel(src, arg): a copy that scales or divides on the way."""
    return Step(StepKind.APPLY, nbytes, dst=dst, src=src, kernel=kernel, arg=arg, total=total)


def fold_staged(
    dst: At, src: At, own: At, nbytes: int, how: Combine, also: At = NOWHERE, total: int = 0
) -> Step:
    """dst = all ranks' contributions folded in rank order.

    `src` is the place of a contribution in every rank's staging buffer (or inline slot), `own` that
    of this rank's; `also` is a second destination, written while the result is in the cache. A
    result for the staging buffer is written when the fold ends; until then `dst` is unchanged.
    """
    return Step(
        StepKind.FOLD_STAGED,
        nbytes,
        dst=dst,
        src=src,
        own=own,
        also=also,
        kernel=how.pair,
        last=how.last,
        arg=how.last_arg,
        total=total,
        block=FOLD_BLOCK // how.item * how.item,
    )


def signal(tick: int) -> Step:
    """Set this rank's counter to this round's `tick`, visible to all ranks."""
    return Step(StepKind.SIGNAL, tick=tick)


def wait(peer: int, tick: int) -> Step:
    """Wait until a peer's counter has reached this round's `tick`."""
    return Step(StepKind.WAIT, tick=tick, peer=peer)


def wait_all(tick: int) -> Step:
    """Wait until every peer's counter has reached this round's `tick`."""
    return Step(StepKind.WAIT_ALL, tick=tick)


def free() -> Step:
    """Wait until every peer has left the round that last used this slot."""
    return Step(StepKind.FREE)


def enter(flag: bool = False) -> Step:
    """Begin an operation, after `free()`; the next signal shows fingerprint, flag and record."""
    return Step(StepKind.ENTER, flag=flag)


def meet_all() -> Step:
    """Wait for every rank's tick 1 and compare fingerprints; no step before writes a result.

    So a call that differs from its peers' leaves every array as it was.
    """
    return Step(StepKind.MEET_ALL, tick=1)


def branch_if_flagged(steps: int) -> Step:
    """Like meet_all; if any rank has entered with the flag, leave out the next `steps`."""
    return Step(StepKind.BRANCH_IF_FLAGGED, tick=1, skip=steps)


def jump(steps: int) -> Step:
    """Leave out the next `steps`."""
    return Step(StepKind.JUMP, skip=steps)


def expose(
    rank: int, src: At, access: int = 0, flag: bool = True, writable: int = 0, offset: int = 0
) -> Step:
    """Expose this rank's array to the peers, until they signal that they have read it.

    Goes before signal(1). If the array is not registered, peers have the kernel copy it, provided
    that the group has that `access`: READS or WRITES (0: never). If the array can't be read, this
    rank's flag is set (`branch_if_flagged`), but not without `flag`: a message branches by
    `branch_if_unreadable`, and other programs expose the array for writes only.
    Peers may also write the first `writable` bytes, until `withdraw`: if the array is registered
    and begins a page, or if the kernel copies it and all peers are other processes. The words that
    describe the array are at `offset` in this rank's staging buffer.
    """
    dst = staging(rank, offset)
    return Step(StepKind.EXPOSE, dst=dst, src=src, access=access, flag=flag, writable=writable)


def withdraw() -> Step:
    """Withdraw the memory that peers could write; goes after their last signal."""
    return Step(StepKind.WITHDRAW)


def branch_if_unreadable(rank: int, steps: int) -> Step:
    """Leave out the next `steps` if a rank's exposed array can't be read; for two ranks only."""
    return Step(StepKind.BRANCH_IF_UNREADABLE, src=staging(rank), skip=steps)


def fetch(dst: At, peer: int, offset: int, nbytes: int) -> Step:
    """dst := `nbytes` from `offset` on in the array that a peer has exposed."""
    # Bytes that this rank has exposed for writes are left out: the peer has written them already.
    return Step(StepKind.FETCH, nbytes, dst=dst, src=staging(peer), offset=offset, peer=peer)


def fill_exposed(src: At, nbytes: int, offset: int = 0) -> Step:
    """Write `src` to the start of every array that a peer exposes for writes.

    `offset` is the place of the words that describe that array, as in `expose`.
    """
    return Step(StepKind.FILL_EXPOSED, nbytes, src=staging(0, offset), own=src)


def fold_exposed(
    dst: At, own: At, offset: int, nbytes: int, how: Combine, room: At, most: int, writable: int = 0
) -> Step:
    """dst := the bytes from `offset` on of every rank's exposed array, folded in rank order.

    `own` is this rank's array, which dst may be. It must be if `writable`: peers have exposed their
    arrays' first `writable` bytes for writes and get the result there too. At most `most` bytes are
    folded at a time; `room` has twice as many.
    """
    assert not writable or dst == own, (dst, own)
    return Step(
        StepKind.FOLD_EXPOSED,
        nbytes,
        dst=dst,
        src=staging(0),
        own=own,
        also=room,
        kernel=how.pair,
        last=how.last,
        arg=how.last_arg,
        offset=offset,
        most=most,
        writable=writable,
        both=how.both if writable else None,
        block=FOLD_BLOCK // how.item * how.item,
    )


def gate(words: int, number: int) -> Step:
    """Wait until gate `number` in user array `words` is open; gates are private to a rank."""
    return Step(StepKind.GATE, dst=user(words, GATE_BYTES * number))


def open_gate(words: int, number: int) -> Step:
    """Open a gate: programs that wait for it go on."""
    return Step(StepKind.OPEN_GATE, dst=user(words, GATE_BYTES * number))


def agree(piece: int, offset: int) -> Step:
    """Compare the sizes of all pairs of ranks; compute how many rounds the exchange has."""
    # At `offset` every staging buffer has two int64 per rank: the bytes that its owner sends to
    # that rank, and the awaited bytes. `piece` bytes travel per pair and round.
    return Step(StepKind.AGREE, src=staging(0, offset), piece=piece)


def single_round(before: Sequence[Step] = (), after: Sequence[Step] = ()) -> list[Step]:
    """Return a single-round program: enter, run `before`, meet all ranks, run `after`."""
    return [free(), enter(), *before, signal(1), meet_all(), *after, end_round(1, 2)]


def alone(steps: Sequence[Step] = ()) -> list[Step]:
    """Return the program for a group with a single rank, which runs `steps`."""
    return [free(), enter(), *steps, end_round(1, 2)]


def end_round(ticks: int, free_at: int, repeat: int = 1, body: int = 0) -> Step:
    """End a round; run the last `body` steps `repeat` times in all, one segment further each."""
    # `free_at` is the tick, counted from the round's start, that a peer signals only after leaving
    # the round. A `free_at` beyond `ticks` is a later round's signal.
    return Step(StepKind.ROUND, tick=ticks, free_at=free_at, repeat=repeat, back=body)


def write_header() -> Step:
    """Write a message's tag, size and dtype into the cell; the next signal publishes them."""
    return Step(StepKind.WRITE_HEADER)


def pack(flat: int, strided: int, shape: int) -> Step:
    """User array `flat`, contiguous, := user array `strided`, laid out as in `shape`.

    `shape` is the number of a user array of words: item bytes, number of dimensions, then sizes,
    strides in bytes, and as many words again for the engine.
    """
    return Step(StepKind.PACK, dst=user(flat), src=user(strided), own=user(shape))


def unpack(strided: int, flat: int, shape: int) -> Step:
    """User array `strided` := user array `flat`; the inverse of `pack`."""
    return Step(StepKind.UNPACK, dst=user(strided), src=user(flat), own=user(shape))


def loop_agreed(ticks: int, free_at: int, body: int) -> Step:
    """Like end_round, but repeats for as many rounds as the last `agree` found."""
    return Step(StepKind.LOOP_AGREED, tick=ticks, free_at=free_at, back=body)


def give(peer: int, src: At, nbytes: int) -> Step:
    """Send bytes to a rank on another host; a row in a `flow`."""
    return Step(StepKind.GIVE, nbytes, src=src, peer=peer)


def take(peer: int, dst: At, nbytes: int) -> Step:
    """Receive bytes from a rank on another host; a row in a `flow`."""
    return Step(StepKind.TAKE, nbytes, dst=dst, peer=peer)


def push(peer: int, src: At, nbytes: int) -> Step:
    """Send as much as fits into the socket; a later push or give for the same bytes continues."""
    return Step(StepKind.PUSH, nbytes, src=src, peer=peer)


def send_header() -> Step:
    """Send a message's header; a row in a `flow`."""
    return Step(StepKind.SEND_HEADER, MESSAGE_BYTES)


def flow(rows: Iterable[Step]) -> list[Step]:
    """Run all transfers at the same time; at most a single transfer from, and to, each rank."""
    rows = [row for row in rows if row.nbytes]
    for kind in ((StepKind.TAKE,), (StepKind.GIVE, StepKind.SEND_HEADER, StepKind.PUSH)):
        peers = [row.peer for row in rows if row.kind in kind]
        assert len(set(peers)) == len(peers), rows
    return [Step(StepKind.FLOW, rows=len(rows)), *rows] if rows else []


def call_header(dst: At) -> Step:
    """dst := this call's header."""
    return Step(StepKind.CALL_HEADER, HEADER_BYTES, dst=dst)


def check_header(src: At, peer: int) -> Step:
    """Compare the header that came from a rank with this call's."""
    return Step(StepKind.CHECK_HEADER, HEADER_BYTES, src=src, peer=peer)


def check_sizes(src: At, own: At, peer: int) -> Step:
    """Compare the two sizes from a rank on another host, as in `agree`, with this rank's own."""
    return Step(StepKind.CHECK_SIZES, SIZES_BYTES, src=src, own=own, peer=peer)


def pair(dst: At, a: At, b: At, nbytes: int, kernel: Kernel) -> Step:
    """dst = kernel(a, b)."""
    return Step(StepKind.PAIR, nbytes, dst=dst, src=a, own=b, kernel=kernel)


def loop(body: Sequence[Step], repeat: int) -> list[Step]:
    """Run steps `repeat` times, each time a segment further; they end no round."""
    if repeat == 0:
        return []
    return [*body, Step(StepKind.LOOP, repeat=repeat, back=len(body))] if repeat > 1 else [*body]
