"""Programs: what one rank does in one collective, as a list of small steps.

An algorithm is a pure function that returns steps; the simulator runs them in Python, the engine
runs the same steps natively after `link` has packed them into integers. Nothing here touches
shared memory.

How ranks keep in step: every rank of a group has one counter that only grows. A round of a
program spends `ticks`; every rank's version of a program spends the same ticks, so programs mix
freely and need no protocol of their own. `signal(t)` sets my counter to (ticks spent so far + t);
`wait(peer, t)` waits until the peer's counter has come there. Boards and inline slots exist twice
and alternate from round to round; a round's `free` is the first tick (counted from its start) at
which a peer has surely left it, and `free()` waits for that before the same half is used again.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


class Kind(enum.IntEnum):
    """What a step does; the engine's switch has the same numbers."""

    END = 0
    COPY = 1
    SIGNAL = 2
    WAIT = 3
    WAITALL = 4
    FREE = 5
    REDN = 6
    MAP = 7
    ROUND = 8
    ENTER = 9
    MEET = 10
    MEETALL = 11
    AGREE = 12
    LOOP_AGREED = 13
    HEADER = 14
    PACK = 15
    UNPACK = 16
    GATE = 17
    OPEN = 18
    DIVERT = 19
    EXPOSE = 20
    FETCH = 21
    FOLD = 22
    JUMP = 23
    PICK = 24
    RECALL = 25
    PAIR = 38
    LOOP = 39
    FLOW = 40
    GIVE = 41
    TAKE = 42
    HEAD = 43
    SHOW = 44
    CHECK = 45
    EXPECT = 46
    PUSH = 47


class Space(enum.IntEnum):
    """Where an operand lies: an array of the user, or what a rank shows its peers."""

    NONE = 0
    USER = 1
    BOARD = 2
    INLINE = 3
    SCRATCH = 4


INLINE_BYTES = 16
"""Payload that travels in the cache line of the counter itself."""
GATE_BYTES = 16
"""A gate: 0 or 1, and who sleeps on it."""


@dataclass(frozen=True, slots=True)
class At:
    """An address: (space, index) + offset + segment * stride, in bytes.

    `index` is the number of the user's array, or the rank whose board it is.
    """

    space: Space
    index: int
    offset: int = 0
    stride: int = 0


NOWHERE = At(Space.NONE, 0)


def user(index: int, offset: int = 0, stride: int = 0) -> At:
    """Point into array number `index` of the call."""
    return At(Space.USER, index, offset, stride)


def board(rank: int, offset: int = 0, stride: int = 0) -> At:
    """Point into the current half of a rank's board."""
    return At(Space.BOARD, rank, offset, stride)


def inline(rank: int) -> At:
    """Point to the current inline slot of a rank."""
    return At(Space.INLINE, rank)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel by name: `link` turns it into an address, the simulator into NumPy.

    `kind` is a reduction's name ("SUM"...), "DIVIDE" (by a rank count) or "SCALE" (by a float).
    """

    kind: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Combine:
    """How contributions become one: a pairwise kernel, and a last map for averages."""

    pair: Kernel
    last: Kernel | None = None
    last_arg: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One step; which fields count depends on its kind (see the functions below)."""

    kind: Kind
    nbytes: int = 0
    tick: int = 0
    dst: At = NOWHERE
    src: At = NOWHERE
    own: At = NOWHERE
    also: At = NOWHERE
    kernel: Kernel | None = None
    last: Kernel | None = None
    arg: float = 0
    total: int = 0
    peer: int = 0
    free: int = 0
    back: int = 0
    repeat: int = 0
    skip: int = 0


def copy(dst: At, src: At, nbytes: int, total: int = 0) -> Step:
    """dst[:nbytes] = src[:nbytes]; with `total`, at most what is left of it in this segment."""
    return Step(Kind.COPY, nbytes, dst=dst, src=src, total=total)


def apply(dst: At, src: At, nbytes: int, kernel: Kernel, arg: float = 0, total: int = 0) -> Step:
    """dst = kernel(src, arg): a copy that scales or divides on the way."""
    return Step(Kind.MAP, nbytes, dst=dst, src=src, kernel=kernel, arg=arg, total=total)


def reduce_ranks(
    dst: At, src: At, own: At, nbytes: int, how: Combine, also: At = NOWHERE, total: int = 0
) -> Step:
    """dst = contributions of all ranks folded in rank order.

    `src` says where in everyone's board (or inline slot) a contribution lies, `own` where mine
    does; `also` is a second destination, written while the result is hot.
    """
    return Step(
        Kind.REDN,
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
    return Step(Kind.SIGNAL, tick=tick)


def wait(peer: int, tick: int) -> Step:
    """Wait until a peer's counter has reached `tick` of this round."""
    return Step(Kind.WAIT, tick=tick, peer=peer)


def wait_all(tick: int) -> Step:
    """Wait until every peer's counter has reached `tick` of this round."""
    return Step(Kind.WAITALL, tick=tick)


def free() -> Step:
    """Wait until every peer has left the round that last used this half."""
    return Step(Kind.FREE)


def enter(flag: bool = False) -> Step:
    """Begin an operation: show my fingerprint, a flag and a record of it (after `free()`)."""
    return Step(Kind.ENTER, tick=int(flag))


def meet(peer: int) -> Step:
    """Wait for a peer's tick 1 and compare its fingerprint with mine."""
    return Step(Kind.MEET, tick=1, peer=peer)


def meet_all() -> Step:
    """Wait for everyone's tick 1 and compare fingerprints."""
    return Step(Kind.MEETALL, tick=1)


def divert(steps: int) -> Step:
    """Like meet_all; if anybody has entered with the flag, leave out the next `steps`."""
    return Step(Kind.DIVERT, tick=1, skip=steps)


def jump(steps: int) -> Step:
    """Leave out the next `steps`."""
    return Step(Kind.JUMP, skip=steps)


def expose(rank: int, src: At, readable: bool, flag: bool = True, lent: int = 0) -> Step:
    """Let peers read an array of mine where it lies, until they say that they have.

    Goes before signal(1). `readable` says whether the kernel may be asked to copy it, if it is not
    registered and the group can do that. An array that can't be read sets my `flag` (`divert`).
    The first `lent` bytes, if it is registered and begins a page, peers may also write, until
    `recall`.
    """
    return Step(Kind.EXPOSE, lent, int(flag), board(rank), src, arg=int(readable))


def recall() -> Step:
    """Peers have written all of what I have lent them: it is mine again."""
    return Step(Kind.RECALL)


def pick(rank: int, steps: int) -> Step:
    """If what a rank has exposed can't be read, leave out the next `steps`; for two ranks alone."""
    return Step(Kind.PICK, src=board(rank), skip=steps)


def fetch(dst: At, peer: int, offset: int, nbytes: int) -> Step:
    """dst := `nbytes` from `offset` on of the array that a peer has exposed.

    What I have lent, the peer has put there already.
    """
    return Step(Kind.FETCH, nbytes, dst=dst, src=board(peer), arg=offset, peer=peer)


def fold_exposed(dst: At, own: At, offset: int, nbytes: int, how: Combine, lent: int = 0) -> Step:
    """dst := the bytes from `offset` on of everyone's exposed array, folded in rank order.

    `own` is where mine are. dst may be the same place. Where peers have lent the first `lent`
    bytes of their arrays, they get the result too.
    """
    return Step(
        Kind.FOLD,
        nbytes,
        lent,
        dst=dst,
        src=board(0),
        own=own,
        kernel=how.pair,
        last=how.last,
        arg=how.last_arg,
        total=offset,
    )


def gate(words: int, number: int) -> Step:
    """Wait until gate `number` of user array `words` is open. Only this rank knows of it."""
    return Step(Kind.GATE, dst=user(words, GATE_BYTES * number))


def open_gate(words: int, number: int) -> Step:
    """Open a gate: what waits for it may go on."""
    return Step(Kind.OPEN, dst=user(words, GATE_BYTES * number))


def agree(send: int, expect: int, slot: int) -> Step:
    """Compare announced sizes with those expected; settle how many rounds the exchange takes.

    Every board starts with one int64 per rank: the bytes that its owner sends there. User array
    `expect` holds what I await from each, `slot` is how many bytes travel per pair and round.
    """
    return Step(Kind.AGREE, src=board(0), own=user(expect), dst=user(send), arg=slot)


def end_round(ticks: int, free_at: int, repeat: int = 1, body: int = 0) -> Step:
    """End a round; run the last `body` steps `repeat` times in all, one segment further each."""
    return Step(Kind.ROUND, tick=ticks, free=free_at, repeat=repeat, back=body)


def header() -> Step:
    """Show a message's tag, size and dtype, taken from its descriptor, beside my counter."""
    return Step(Kind.HEADER)


def pack(flat: int, strided: int, shape: int) -> Step:
    """User array `flat`, contiguous, := user array `strided`; `shape` says how that lies.

    `shape` is the number of a user array of words: bytes of an element, dimensions, then sizes,
    strides in bytes, and as many words again for the engine.
    """
    return Step(Kind.PACK, dst=user(flat), src=user(strided), own=user(shape))


def unpack(strided: int, flat: int, shape: int) -> Step:
    """User array `strided` := user array `flat`; the inverse of `pack`."""
    return Step(Kind.UNPACK, dst=user(strided), src=user(flat), own=user(shape))


def loop_agreed(ticks: int, free_at: int, body: int) -> Step:
    """Like end_round, but repeats as often as the last `agree` settled."""
    return Step(Kind.LOOP_AGREED, tick=ticks, free=free_at, back=body)


@dataclass(frozen=True, slots=True)
class Call:
    """What a program is for: what ranks compare, and what errors tell.

    `count` is -1 where ranks may differ in it.
    """

    op: str
    dtype: str = "-"
    count: int = 0
    reduce: str = "-"
    root: int = -1
    detail: str = ""

    def fingerprint(self) -> int:
        """Return 62 bits that differ, in practice always, when calls differ."""
        text = repr((self.op, self.dtype, self.count, self.reduce, self.root, self.detail))
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2

    def describe(self) -> str:
        """Return the call as an error message shows it."""
        parts = [self.op]
        if self.dtype != "-":
            parts.append(f"dtype={self.dtype}")
            if self.count >= 0:
                parts.append(f"count={self.count}")
        if self.reduce != "-":
            parts.append(f"op={self.reduce}")
        if self.root >= 0:
            parts.append(f"root={self.root}")
        if self.detail:
            parts.append(self.detail)
        return f"{parts[0]}({', '.join(parts[1:])})"


@dataclass(frozen=True, slots=True)
class Program:
    """Steps of one rank, and the call that they carry out. `users` arrays come with each launch."""

    call: Call
    steps: tuple[Step, ...]
    users: int


def concatenate(call: Call, programs: Sequence[Program]) -> Program:
    """Run programs one after another as one; their arrays are numbered through."""
    steps: list[Step] = []
    base = 0
    for program in programs:
        steps += [_shift(step, base) for step in program.steps]
        base += program.users
    return Program(call, tuple(steps), base)


def _shift(step: Step, base: int) -> Step:
    def moved(at: At) -> At:
        if at.space is not Space.USER:
            return at
        return At(at.space, at.index + base, at.offset, at.stride)

    return Step(
        step.kind,
        step.nbytes,
        step.tick,
        moved(step.dst),
        moved(step.src),
        moved(step.own),
        moved(step.also),
        step.kernel,
        step.last,
        step.arg,
        step.total,
        step.peer,
        step.free,
        step.back,
        step.repeat,
        step.skip,
    )
