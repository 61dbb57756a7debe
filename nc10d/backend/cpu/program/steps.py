"""The steps that algorithms are written with: one function for each, which says what it does.

What a round, a tick and a half are is said at the head of `program`.
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

    `src` says where in everyone's board (or inline slot) a contribution lies, `own` where mine
    does; `also` is a second destination, written while the result is hot. What goes on a board is
    written there when it is folded: until then `dst` is as it was.
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
    """Set my counter to `tick` of this round, visible to everyone."""
    return Step(StepKind.SIGNAL, tick=tick)


def wait(peer: int, tick: int) -> Step:
    """Wait until a peer's counter has reached `tick` of this round."""
    return Step(StepKind.WAIT, tick=tick, peer=peer)


def wait_all(tick: int) -> Step:
    """Wait until every peer's counter has reached `tick` of this round."""
    return Step(StepKind.WAITALL, tick=tick)


def free() -> Step:
    """Wait until every peer has left the round that last used this half."""
    return Step(StepKind.FREE)


def enter(flag: bool = False) -> Step:
    """Begin an operation: show my fingerprint, a flag and a record of it (after `free()`)."""
    return Step(StepKind.ENTER, tick=int(flag))


def meet(peer: int) -> Step:
    """Wait for a peer's tick 1 and compare its fingerprint with mine."""
    return Step(StepKind.MEET, tick=1, peer=peer)


def meet_all() -> Step:
    """Wait for everyone's tick 1 and compare fingerprints."""
    return Step(StepKind.MEETALL, tick=1)


def divert(steps: int) -> Step:
    """Like meet_all; if anybody has entered with the flag, leave out the next `steps`."""
    return Step(StepKind.DIVERT, tick=1, skip=steps)


def jump(steps: int) -> Step:
    """Leave out the next `steps`."""
    return Step(StepKind.JUMP, skip=steps)


def expose(
    rank: int, src: At, access: int = 0, flag: bool = True, lent: int = 0, slot: int = 0
) -> Step:
    """Let peers read an array of mine where it lies, until they say that they have.

    Goes before signal(1). If it is not registered the kernel is asked to copy it, where it gives
    the group that `access`: READS or WRITES (0: never). An array that can't be read sets my flag
    (`divert`); without `flag` it is shown only for peers to write.
    The first `lent` bytes peers may also write, until `recall`: if it is registered and begins a
    page, or if the kernel copies it and all mates are other processes. `slot` is where on my board
    it is shown.
    """
    return Step(StepKind.EXPOSE, lent, int(flag), board(rank, slot), src, arg=access)


def recall() -> Step:
    """Peers have written all of what I have lent them: it is mine again."""
    return Step(StepKind.RECALL)


def pick(rank: int, steps: int) -> Step:
    """If what a rank has exposed can't be read, leave out the next `steps`; for two ranks alone."""
    return Step(StepKind.PICK, src=board(rank), skip=steps)


def fetch(dst: At, peer: int, offset: int, nbytes: int) -> Step:
    """dst := `nbytes` from `offset` on of the array that a peer has exposed.

    What I have lent, the peer has put there already.
    """
    return Step(StepKind.FETCH, nbytes, dst=dst, src=board(peer), arg=offset, peer=peer)


def fill_lent(src: At, nbytes: int, slot: int = 0) -> Step:
    """Put `nbytes` of mine into every array that is lent to me, and shown at `slot`."""
    return Step(StepKind.FILL, nbytes, src=board(0, slot), own=src)


def fold_exposed(
    dst: At, own: At, offset: int, nbytes: int, how: Combine, room: At, most: int, lent: int = 0
) -> Step:
    """dst := the bytes from `offset` on of everyone's exposed array, folded in rank order.

    `own` is where mine are. dst may be the same place, and is where peers have lent the first
    `lent` bytes of their arrays and get the result too. At `most` so many bytes are folded at a
    time; `room` is for twice as many.
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
    """Wait until gate `number` of user array `words` is open. Only this rank knows of it."""
    return Step(StepKind.GATE, dst=user(words, GATE_BYTES * number))


def open_gate(words: int, number: int) -> Step:
    """Open a gate: what waits for it may go on."""
    return Step(StepKind.OPEN, dst=user(words, GATE_BYTES * number))


def agree(send: int, expect: int, slot: int) -> Step:
    """Compare announced sizes with those expected; settle how many rounds the exchange takes.

    Every board starts with one int64 per rank: the bytes that its owner sends there. User array
    `expect` holds what I await from each, `slot` is how many bytes travel per pair and round.
    """
    return Step(StepKind.AGREE, src=board(0), own=user(expect), dst=user(send), arg=slot)


def end_round(ticks: int, free_at: int, repeat: int = 1, body: int = 0) -> Step:
    """End a round; run the last `body` steps `repeat` times in all, one segment further each."""
    return Step(StepKind.ROUND, tick=ticks, free=free_at, repeat=repeat, back=body)


def header() -> Step:
    """Show a message's tag, size and dtype, taken from its descriptor, beside my counter."""
    return Step(StepKind.HEADER)


def pack(flat: int, strided: int, shape: int) -> Step:
    """User array `flat`, contiguous, := user array `strided`; `shape` says how that lies.

    `shape` is the number of a user array of words: bytes of an element, dimensions, then sizes,
    strides in bytes, and as many words again for the engine.
    """
    return Step(StepKind.PACK, dst=user(flat), src=user(strided), own=user(shape))


def unpack(strided: int, flat: int, shape: int) -> Step:
    """User array `strided` := user array `flat`; the inverse of `pack`."""
    return Step(StepKind.UNPACK, dst=user(strided), src=user(flat), own=user(shape))


def loop_agreed(ticks: int, free_at: int, body: int) -> Step:
    """Like end_round, but repeats as often as the last `agree` settled."""
    return Step(StepKind.LOOP_AGREED, tick=ticks, free=free_at, back=body)
