"""The steps that algorithms are written with: a function for each kind.

The head of `program` explains rounds, ticks and slots.
"""

from __future__ import annotations

from nc10d.backend.cpu.program.program import (
    GATE_BYTES,
    NOWHERE,
    At,
    Combine,
    Kernel,
    Step,
    StepKind,
    board,
    user,
)


def copy(dst: At, src: At, nbytes: int, total: int = 0) -> Step:
    """dst[:nbytes] = src[:nbytes]; with `total`, at most what is left of it in this segment."""
    return Step(StepKind.COPY, nbytes, dst=dst, src=src, total=total)


def apply(dst: At, src: At, nbytes: int, kernel: Kernel, arg: float = 0, total: int = 0) -> Step:
    """dst = kernel(src, arg): a copy that scales or divides on the way."""
    return Step(StepKind.MAP, nbytes, dst=dst, src=src, kernel=kernel, arg=arg, total=total)


def reduce_ranks(
    dst: At, src: At, own: At, nbytes: int, how: Combine, also: At = NOWHERE, total: int = 0
) -> Step:
    """dst = contributions of all ranks folded in rank order.

    `src` is the place of a contribution in every rank's staging buffer (or inline slot), `own` the
    place of this rank's; `also` is a second destination, written while the result is in the cache.
    A result for the staging buffer is written when it is folded: until then `dst` is unchanged.
    """
    return Step(
        StepKind.REDN,
        nbytes,
        dst=dst,
        src=src,
        own=own,
        also=also,
        kernel=how.pair,
        last=how.last,
        arg=how.last_arg,
        total=total,
    )


def signal(tick: int) -> Step:
    """Set this rank's counter to `tick` of this round, visible to all ranks."""
    return Step(StepKind.SIGNAL, tick=tick)


def wait(peer: int, tick: int) -> Step:
    """Wait until a peer's counter has reached `tick` of this round."""
    return Step(StepKind.WAIT, tick=tick, peer=peer)


def wait_all(tick: int) -> Step:
    """Wait until every peer's counter has reached `tick` of this round."""
    return Step(StepKind.WAITALL, tick=tick)


def free() -> Step:
    """Wait until every peer has left the round that last used this slot."""
    return Step(StepKind.FREE)


def enter(flag: bool = False) -> Step:
    """Begin an operation: show its fingerprint, a flag and its record (after `free()`)."""
    return Step(StepKind.ENTER, tick=int(flag))


def meet(peer: int) -> Step:
    """Wait for a peer's tick 1 and compare its fingerprint with this rank's."""
    return Step(StepKind.MEET, tick=1, peer=peer)


def meet_all() -> Step:
    """Wait for every rank's tick 1 and compare fingerprints."""
    return Step(StepKind.MEETALL, tick=1)


def branch_if_flagged(steps: int) -> Step:
    """Like meet_all; if any rank has entered with the flag, leave out the next `steps`."""
    return Step(StepKind.BRANCH_IF_FLAGGED, tick=1, skip=steps)


def jump(steps: int) -> Step:
    """Leave out the next `steps`."""
    return Step(StepKind.JUMP, skip=steps)


def expose(
    rank: int, src: At, access: int = 0, flag: bool = True, lent: int = 0, slot: int = 0
) -> Step:
    """Expose an array of this rank to its peers, until they signal that they have read it.

    Goes before signal(1). If the array is not registered, peers have the kernel copy it, provided
    that the group has that `access`: READS or WRITES (0: never). An array that can't be read sets
    this rank's flag (`branch_if_flagged`). Without `flag` it sets none: a message branches by
    `branch_if_unreadable`, and other programs expose the array for writes only.
    Peers may also write the first `lent` bytes, until `recall`: if the array is registered and
    begins a page, or if the kernel copies it and all peers are other processes. `slot` is the
    offset in this rank's staging buffer where the two words are shown.
    """
    return Step(StepKind.EXPOSE, lent, int(flag), board(rank, slot), src, arg=access)


def recall() -> Step:
    """Withdraw the memory that peers could write; goes after their last signal."""
    return Step(StepKind.RECALL)


def branch_if_unreadable(rank: int, steps: int) -> Step:
    """Leave out the next `steps` if a rank's exposed array can't be read; for two ranks only."""
    return Step(StepKind.BRANCH_IF_UNREADABLE, src=board(rank), skip=steps)


def fetch(dst: At, peer: int, offset: int, nbytes: int) -> Step:
    """dst := `nbytes` from `offset` on of the array that a peer has exposed.

    Bytes that this rank has exposed for writes are left out: the peer has put them there already.
    """
    return Step(StepKind.FETCH, nbytes, dst=dst, src=board(peer), arg=offset, peer=peer)


def fill_lent(src: At, nbytes: int, slot: int = 0) -> Step:
    """Write `nbytes` of this rank to every array that a peer exposes for writes at `slot`."""
    return Step(StepKind.FILL, nbytes, src=board(0, slot), own=src)


def fold_exposed(
    dst: At, own: At, offset: int, nbytes: int, how: Combine, room: At, most: int, lent: int = 0
) -> Step:
    """dst := the bytes from `offset` on of every rank's exposed array, folded in rank order.

    `own` is this rank's array, which dst may be. It must be if `lent`: peers have exposed the first
    `lent` bytes of their arrays for writes and get the result there too. At most `most` bytes are
    folded at a time; `room` has twice as many.
    """
    assert not lent or dst == own, (dst, own)
    return Step(
        StepKind.FOLD,
        nbytes,
        lent,
        dst=dst,
        src=board(0),
        own=own,
        also=room,
        kernel=how.pair,
        last=how.last,
        arg=how.last_arg,
        total=offset,
        repeat=most,
        both=how.both if lent else None,
    )


def gate(words: int, number: int) -> Step:
    """Wait until gate `number` of user array `words` is open; gates are private to a rank."""
    return Step(StepKind.GATE, dst=user(words, GATE_BYTES * number))


def open_gate(words: int, number: int) -> Step:
    """Open a gate: programs that wait for it go on."""
    return Step(StepKind.OPEN, dst=user(words, GATE_BYTES * number))


def agree(send: int, expect: int, slot: int) -> Step:
    """Compare announced with expected sizes; compute the number of rounds of the exchange.

    Every staging buffer starts with an int64 per rank: the bytes that its owner sends to that rank.
    User array `expect` holds the bytes that this rank awaits from each; `slot` bytes travel per
    pair and round.
    """
    return Step(StepKind.AGREE, src=board(0), own=user(expect), dst=user(send), arg=slot)


def end_round(ticks: int, free_at: int, repeat: int = 1, body: int = 0) -> Step:
    """End a round; run the last `body` steps `repeat` times in all, one segment further each."""
    return Step(StepKind.ROUND, tick=ticks, free=free_at, repeat=repeat, back=body)


def header() -> Step:
    """Show a message's tag, size and dtype, taken from its descriptor, beside the counter."""
    return Step(StepKind.HEADER)


def pack(flat: int, strided: int, shape: int) -> Step:
    """User array `flat`, contiguous, := user array `strided`, laid out as in `shape`.

    `shape` is the number of a user array of words: bytes of an element, number of dimensions, then
    sizes, strides in bytes, and as many words again for the engine.
    """
    return Step(StepKind.PACK, dst=user(flat), src=user(strided), own=user(shape))


def unpack(strided: int, flat: int, shape: int) -> Step:
    """User array `strided` := user array `flat`; the inverse of `pack`."""
    return Step(StepKind.UNPACK, dst=user(strided), src=user(flat), own=user(shape))


def loop_agreed(ticks: int, free_at: int, body: int) -> Step:
    """Like end_round, but repeats for the number of rounds of the last `agree`."""
    return Step(StepKind.LOOP_AGREED, tick=ticks, free=free_at, back=body)
