"""Run PTX without a GPU: the very text that the driver gets, all threads of a launch side by side.

    memory = Memory({address: bytes}, writable={address})
    launch(parse(text), memory, [1, 2, 0.5], blocks=[0, 7], threads=256)
    memory.bytes_at(address), memory.stores_at(address)

A register is a NumPy array with a value for each thread. Threads that have diverged run in turn:
always those at the earliest block of code. Memory is sparse: few bytes at any 64-bit addresses.
A GPU's errors raise Fault: an address that is not mapped or not aligned, a store to read-only
memory. An instruction that is not known here raises Unknown with its line; so does a register of
another width than the instruction's, and one that nothing has been written to.

NaNs that instructions make have the GPU's bits: 0x7fffffff in float32, 0x7fff in float16.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Threads = Any
"""Indexes of threads; or a slice, for all."""

DTYPES = {"pred": np.dtype(bool)}
for _kind, _code, _sizes in (
    ("b", "u", (1, 2, 4, 8)),
    ("u", "u", (1, 2, 4, 8)),
    ("s", "i", (1, 2, 4, 8)),
    ("f", "f", (2, 4, 8)),
):
    DTYPES |= {f"{_kind}{8 * size}": np.dtype(f"{_code}{size}") for size in _sizes}
NAN = {"f16": 0x7FFF, "f32": 0x7FFFFFFF}
LITERALS = {"0f": "f4", "0d": "f8"}
NEVER_WRITTEN = 0xCD


class Fault(Exception):
    """A GPU would have stopped with an error here."""


class Unknown(Exception):
    """The interpreter lacks this."""


class Memory:
    """Bytes at 64-bit addresses; `stores` counts the stores to each byte."""

    def __init__(self, ranges: Mapping[int, Array], writable: Collection[int] = ()) -> None:
        places = sorted(ranges)
        sizes = [len(ranges[at]) for at in places]
        self._begins = np.array(places, np.uint64)
        self._sizes = np.array(sizes, np.uint64)
        self._offsets = np.cumsum([0, *sizes[:-1]]).astype(np.uint64)
        self._writable = np.array([at in writable for at in places])
        self._spans = {
            at: slice(first, first + size)
            for at, first, size in zip(places, self._offsets.tolist(), sizes, strict=True)
        }
        self._bytes = np.concatenate([ranges[at] for at in places])
        self.stores = np.zeros(len(self._bytes), np.uint8)

    def bytes_at(self, begin: int) -> Array:
        return self._bytes[self._spans[begin]]

    def stores_at(self, begin: int) -> Array:
        return self.stores[self._spans[begin]]

    def load(self, addresses: Array, nbytes: int) -> Array:
        """Return a row of `nbytes` for each address."""
        return self._bytes[self._cells(addresses, nbytes, store=False)]

    def store(self, addresses: Array, rows: Array) -> None:
        cells = self._cells(addresses, rows.shape[1], store=True)
        self._bytes[cells] = rows
        np.add.at(self.stores, cells, 1)

    def _cells(self, addresses: Array, nbytes: int, store: bool) -> Array:
        odd = addresses % np.uint64(nbytes) != 0
        if odd.any():
            raise Fault(f"misaligned address 0x{addresses[odd][0]:x} for {nbytes} bytes")
        ranges = np.searchsorted(self._begins, addresses, side="right") - 1
        inner = addresses - self._begins[ranges]
        size = self._sizes[ranges]
        outside = (ranges < 0) | (size < nbytes) | (inner > size - np.uint64(nbytes))
        if outside.any():
            raise Fault(f"no memory at 0x{addresses[outside][0]:x} for {nbytes} bytes")
        if store and not self._writable[ranges].all():
            raise Fault("a store to read-only memory")
        first = (self._offsets[ranges] + inner).astype(np.int64)
        return first[:, None] + np.arange(nbytes)


def alike(a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    """Return whether registers of both types are stored alike: ptxas insists on that."""
    return stored(a) == stored(b)


def stored(dtype: np.dtype[Any]) -> str:
    return "?" if dtype.kind == "b" else f"u{dtype.itemsize}"


@dataclass(frozen=True)
class Instruction:
    """An instruction of the text: `add.s64 %rd1, %rd2, 8` has the parts add and s64."""

    line: str
    guard: str
    parts: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def ends(self) -> bool:
        return self.parts[0] in ("bra", "ret")


@dataclass
class Kernel:
    """A kernel's code, as blocks that are entered at their first instruction only."""

    parameters: dict[str, str] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    most_threads: int = 1024
    blocks: list[list[Instruction]] = field(default_factory=lambda: [[]])
    labels: dict[str, int] = field(default_factory=dict)

    @property
    def opcodes(self) -> Counter[str]:
        """How often the text has each opcode."""
        return Counter(".".join(x.parts) for x in itertools.chain(*self.blocks))

    def type_of(self, register: str) -> str:
        """Return a register's declared type: %rd1 is declared as %rd<391>."""
        name = register if register in self.registers else register.rstrip("0123456789")
        if name not in self.registers:
            raise Unknown(f"{register} is not declared")
        return self.registers[name]


IGNORED = re.compile(r"//.*|\.(version|target|address_size|common|pragma|minnctapersm)\b.*|[(){}]|")
SCOPE = re.compile(r"\{ \.reg \.(\w+) (\w+); (.*;) \}")
INSTRUCTION = re.compile(r"(?:@(!?%p\d+)\s+)?([a-z][\w.]*)(?:\s+(.*))?;")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


def parse(text: str) -> Kernel:
    """Return the kernel of a PTX text, which has a single one."""
    kernel = Kernel()
    for line in map(str.strip, text.splitlines()):
        if found := re.match(r"\.visible \.entry (\w+)\(", line):
            assert not kernel.parameters, "a single kernel"
        elif found := re.fullmatch(r"\.param \.(\w+) (\w+),?", line):
            kernel.parameters[found[2]] = found[1]
        elif found := re.fullmatch(r"\.reg \.(\w+)\s+(%\w+)<\d+>;", line):
            kernel.registers[found[2]] = found[1]
        elif found := re.fullmatch(r"\.maxntid (\d+), 1, 1", line):
            kernel.most_threads = int(found[1])
        elif found := re.fullmatch(r"(\$\w+):", line):
            kernel.blocks.append([])
            kernel.labels[found[1]] = len(kernel.blocks) - 1
        elif not IGNORED.fullmatch(line):
            if found := SCOPE.fullmatch(line):  # a register that only this line has
                kernel.registers[found[2]] = found[1]
                line = found[3]
            instruction = decoded(line)
            kernel.blocks[-1].append(instruction)
            if instruction.ends:
                kernel.blocks.append([])
    return kernel


def decoded(line: str) -> Instruction:
    found = INSTRUCTION.fullmatch(line)
    if found is None:
        raise Unknown(line)
    guard, opcode, operands = found.groups(default="")
    return Instruction(line, guard, tuple(opcode.split(".")), tuple(OPERAND.findall(operands)))


def launch(
    kernel: Kernel,
    memory: Memory,
    arguments: Sequence[int | float],
    blocks: Sequence[int],
    threads: int,
) -> None:
    """Run these blocks of a grid, all at once."""
    if threads > kernel.most_threads:
        raise Fault(f"{threads} threads, where the kernel allows {kernel.most_threads}")
    with np.errstate(all="ignore"):
        _Launch(kernel, memory, arguments, blocks, threads).run()


class _Launch:
    def __init__(
        self,
        kernel: Kernel,
        memory: Memory,
        arguments: Sequence[int | float],
        blocks: Sequence[int],
        threads: int,
    ) -> None:
        self.kernel, self.memory = kernel, memory
        self.count = len(blocks) * threads
        self.parameters = {
            name: np.array(value).astype(DTYPES[kind])
            for (name, kind), value in zip(kernel.parameters.items(), arguments, strict=True)
        }
        self.special = {
            "%ctaid.x": np.repeat(np.array(blocks, np.uint32), threads),
            "%tid.x": np.tile(np.arange(threads, dtype=np.uint32), len(blocks)),
            "%ntid.x": np.full(self.count, threads, np.uint32),
        }
        self.registers: dict[str, Array] = {}
        self.at: Threads = slice(None)

    def run(self) -> None:
        end = len(self.kernel.blocks)
        places = np.zeros(self.count, np.int64)
        while (place := int(places.min())) < end:
            here = np.flatnonzero(places == place)
            self.at = slice(None) if len(here) == self.count else here
            places[here] = place + 1
            for instruction in self.kernel.blocks[place]:
                try:
                    if instruction.ends:
                        self.leave(instruction, places, here)
                    else:
                        self.execute(instruction)
                except (Fault, Unknown) as error:
                    raise type(error)(f"{error}: {instruction.line}") from None

    def leave(self, x: Instruction, places: Array, here: Array) -> None:
        target = self.kernel.labels[x.operands[0]] if x.operands else len(self.kernel.blocks)
        if not x.guard:
            places[here] = target
            return
        goes = np.broadcast_to(self.read(x.guard.lstrip("!"), "pred"), len(here))
        places[here[goes ^ x.guard.startswith("!")]] = target

    def execute(self, x: Instruction) -> None:
        name, *kinds = x.parts
        if x.guard or name not in INSTRUCTIONS:
            raise Unknown("an instruction that the interpreter lacks")
        INSTRUCTIONS[name](self, tuple(kinds), x.operands)

    def read(self, operand: str, kind: str, narrow: bool = False) -> Array:
        """Return an operand's values in the threads that run; `narrow`: of its low bits."""
        dtype = DTYPES[kind]
        if operand[:2] in LITERALS:
            code = LITERALS[operand[:2]]
            return np.array(int(operand[2:], 16), f"u{code[1]}").view(code).view(dtype)
        if operand.lstrip("-").isdigit():
            if kind == "pred":
                return np.array(bool(int(operand)))
            bits = int(operand) & (1 << 8 * dtype.itemsize) - 1
            return np.array(bits, f"u{dtype.itemsize}").view(dtype)
        if operand in self.special:
            return self.special[operand][self.at].view(dtype)
        declared = DTYPES[self.kernel.type_of(operand)]
        if operand not in self.registers:
            raise Unknown(f"{operand} has no value")
        found = self.registers[operand][self.at]
        if narrow and declared.itemsize > dtype.itemsize:
            found = found.astype(f"u{dtype.itemsize}")
        if not alike(found.dtype, dtype):
            raise Unknown(f"{operand} is not {kind}")
        return found.view(dtype)

    def write(self, operand: str, values: Array, wide: bool = False) -> None:
        """Set a register in the threads that run; `wide`: it may have more bits, by the sign."""
        declared = DTYPES[self.kernel.type_of(operand)]
        if wide and declared.itemsize > values.dtype.itemsize:
            values = values.astype(f"{values.dtype.kind}{declared.itemsize}")
        if not alike(values.dtype, declared):
            raise Unknown(f"{operand} is not {values.dtype}")
        held = stored(declared)
        if operand not in self.registers:
            garbage = np.full(self.count * declared.itemsize, NEVER_WRITTEN, np.uint8)
            self.registers[operand] = garbage.view(held)
        self.registers[operand][self.at] = values.view(held)

    def addresses(self, operand: str) -> Array:
        base, _, offset = operand.strip("[]").partition("+")
        return np.atleast_1d(self.read(base, "u64") + np.uint64(int(offset or 0) % 2**64))


Emulation = Callable[[_Launch, tuple[str, ...], tuple[str, ...]], None]


def canonical(values: Array, kind: str) -> Array:
    """Return values with the NaN that a GPU makes."""
    if kind in NAN:
        nan = np.array(NAN[kind], f"u{values.dtype.itemsize}").view(values.dtype)
        return np.where(np.isnan(values), nan, values)
    return values


def computing(function: Callable[..., Any], *allowed: str) -> Emulation:
    """Return the emulation of an operator, on operands of a type or of two such halves."""

    def emulate(run: _Launch, kinds: tuple[str, ...], operands: tuple[str, ...]) -> None:
        *modes, kind = kinds
        rounds = kind[0] == "f" and function in ROUNDED
        if kind not in allowed or modes != ["rn"] * rounds:
            raise Unknown("a type or mode that the interpreter lacks")
        one = kind.removesuffix("x2")
        held = one if one == kind else "b32"
        values = [np.atleast_1d(run.read(x, held)).view(DTYPES[one]) for x in operands[1:]]
        result = np.asarray(function(*values)).astype(DTYPES[one])
        run.write(operands[0], canonical(result, one).view(DTYPES[held]))

    return emulate


def quotient(a: Array, b: Array) -> Array:
    """Return a / b towards zero."""
    if (b == 0).any():
        raise Fault("a division by zero")
    if a.dtype.kind == "u":
        return a // b
    floor = a // b
    return floor + ((a % b != 0) & ((a < 0) != (b < 0)))


def div(run: _Launch, kinds: tuple[str, ...], operands: tuple[str, ...]) -> None:
    floats = kinds[-1][0] == "f"
    emulate = computing(operator.truediv, *FLOATS) if floats else computing(quotient, *WHOLE)
    emulate(run, kinds, operands)


def shifted(left: bool) -> Emulation:
    def emulate(run: _Launch, kinds: tuple[str, ...], operands: tuple[str, ...]) -> None:
        (kind,) = kinds
        values, by = run.read(operands[1], kind), run.read(operands[2], "u32")
        bits = 8 * values.dtype.itemsize
        shift = np.minimum(by, bits - 1).astype(values.dtype)
        result = values << shift if left else values >> shift
        if left or values.dtype.kind == "u":
            result = np.where(by < bits, result, 0)
        run.write(operands[0], result.astype(values.dtype))

    return emulate


COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


def setp(run: _Launch, kinds: tuple[str, ...], operands: tuple[str, ...]) -> None:
    comparison, kind = kinds
    if comparison not in COMPARISONS or (comparison == "ne" and kind[0] == "f"):
        raise Unknown("a comparison that the interpreter lacks")
    a, b = (run.read(x, kind) for x in operands[1:])
    run.write(operands[0], COMPARISONS[comparison](a, b))


def selp(run: _Launch, kinds: tuple[str, ...], operands: tuple[str, ...]) -> None:
    (kind,) = kinds
    a, b = (run.read(x, kind) for x in operands[1:3])
    run.write(operands[0], np.where(run.read(operands[3], "pred"), a, b))


def mov(run: _Launch, kinds: tuple[str, ...], operands: tuple[str, ...]) -> None:
    """Copy a value; or take a word apart, or put two halves together."""
    (kind,) = kinds
    to, at = operands
    half = f"b{4 * DTYPES[kind].itemsize}"
    if to.startswith("{"):
        word = np.atleast_1d(run.read(at, kind))
        low, high = word.view(DTYPES[half]).reshape(-1, 2).T
        for part, values in zip(OPERAND.findall(to.strip("{}")), (low, high), strict=True):
            run.write(part, np.ascontiguousarray(values))
    elif at.startswith("{"):
        parts = [run.read(x, half) for x in OPERAND.findall(at.strip("{}"))]
        both = np.stack(np.broadcast_arrays(*parts), axis=-1)
        run.write(to, both.view(DTYPES[kind])[..., 0])
    else:
        run.write(to, run.read(at, kind))


def mul(run: _Launch, kinds: tuple[str, ...], operands: tuple[str, ...]) -> None:
    """Multiply: floats; or whole numbers, with either half or all of the product."""
    *modes, kind = kinds
    if kind[0] == "f":
        computing(operator.mul, *FLOATS)(run, kinds, operands)
        return
    if modes == ["hi"] and kind == "u64":
        run.write(operands[0], upper_half(*(run.read(x, kind) for x in operands[1:])))
        return
    if modes not in (["lo"], ["wide"]):
        raise Unknown("a mode that the interpreter lacks")
    values = [run.read(x, kind) for x in operands[1:3]]
    if modes == ["wide"]:
        code = f"{values[0].dtype.kind}{2 * values[0].dtype.itemsize}"
        values = [x.astype(code) for x in values]
    product = np.multiply(*values)
    added = [run.read(x, kind) for x in operands[3:]]
    run.write(operands[0], sum(added, start=product))


def upper_half(a: Array, b: Array) -> Array:
    """Return the upper halves of products of two uint64."""
    half, low = np.uint64(32), np.uint64(2**32 - 1)
    middle = (a >> half) * (b & low) + ((a & low) * (b & low) >> half)
    carry = (a & low) * (b >> half) + (middle & low) >> half
    return (a >> half) * (b >> half) + (middle >> half) + carry


def mad(run: _Launch, kinds: tuple[str, ...], operands: tuple[str, ...]) -> None:
    if kinds[0] != "lo" or kinds[1][0] == "f":
        raise Unknown("a mode that the interpreter lacks")
    mul(run, kinds, operands)


def cvt(run: _Launch, kinds: tuple[str, ...], operands: tuple[str, ...]) -> None:
    """Convert: whole numbers by their low bits or their sign, others to the nearest even one."""
    *modes, to, at = kinds
    if to == "f16x2":
        high, low = (canonical(run.read(x, at).astype("f2"), "f16") for x in operands[1:])
        both = np.stack(np.broadcast_arrays(low, high), axis=-1)
        run.write(operands[0], both.view("u4")[..., 0])
        return
    same = (to[0] == "f") == (at[0] == "f")
    rounds = to[0] == "f" and (not same or DTYPES[to].itemsize < DTYPES[at].itemsize)
    if modes != ["rzi" if not same and to[0] != "f" else "rn"] * (rounds or not same):
        raise Unknown("a conversion that the interpreter lacks")
    values = run.read(operands[1], at, narrow=True)
    if modes == ["rzi"] and not (np.abs(values) < 2.0**62).all():
        raise Unknown("a number that is too large to convert here")
    run.write(operands[0], canonical(values.astype(DTYPES[to]), to), wide=True)


def prmt(run: _Launch, kinds: tuple[str, ...], operands: tuple[str, ...]) -> None:
    """Choose each byte out of eight, or that byte's sign eight times."""
    (kind,) = kinds
    a, b, selector = (run.read(x, kind) for x in operands[1:])
    pool = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(pool)
    for byte in range(4):
        choice = selector.astype(np.uint64) >> np.uint64(4 * byte)
        found = pool >> (choice & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        signs = np.where(found & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        found = np.where(choice & np.uint64(8), signs, found)
        result = result | found << np.uint64(8 * byte)
    run.write(operands[0], result.astype(np.uint32))


def bfe(run: _Launch, kinds: tuple[str, ...], operands: tuple[str, ...]) -> None:
    """Take `length` bits from `first` on."""
    if kinds != ("u32",):
        raise Unknown("a type that the interpreter lacks")
    word, first, length = (run.read(x, "u32").astype(np.uint64) for x in operands[1:])
    first, length = (np.minimum(x & np.uint64(0xFF), np.uint64(32)) for x in (first, length))
    result = word >> first & (np.uint64(1) << length) - np.uint64(1)
    run.write(operands[0], result.astype(np.uint32))


def ld(run: _Launch, kinds: tuple[str, ...], operands: tuple[str, ...]) -> None:
    space, *vector, kind = kinds
    to, at = operands
    if space == "param":
        value = run.parameters[at.strip("[]")]
        assert value.dtype == DTYPES[kind], "a parameter of its type"
        run.write(to, value)
        return
    parts = parts_of(space, vector, to)
    item = DTYPES[kind].itemsize
    rows = run.memory.load(run.addresses(at), item * len(parts))
    for index, part in enumerate(parts):
        column = np.ascontiguousarray(rows[:, index * item : (index + 1) * item])
        run.write(part, column.view(DTYPES[kind])[:, 0], wide=True)


def st(run: _Launch, kinds: tuple[str, ...], operands: tuple[str, ...]) -> None:
    space, *vector, kind = kinds
    at, source = operands
    parts = parts_of(space, vector, source)
    addresses = run.addresses(at)
    values = [np.broadcast_to(run.read(part, kind, narrow=True), addresses.shape) for part in parts]
    rows = np.ascontiguousarray(np.stack(values, axis=-1))
    run.memory.store(addresses, rows.view(np.uint8))


def parts_of(space: str, vector: Sequence[str], operand: str) -> list[str]:
    """Return the registers of a word in a GPU's memory."""
    parts = OPERAND.findall(operand.strip("{}"))
    if space != "global" or list(vector) != [f"v{len(parts)}"] * (len(parts) > 1):
        raise Unknown("a kind of memory or word that the interpreter lacks")
    return parts


WHOLE = ("s16", "u16", "s32", "u32", "s64", "u64")
FLOATS = ("f16", "f16x2", "f32", "f64")
ROUNDED = (operator.add, operator.sub, operator.mul, operator.truediv)
BITS = ("pred", "b16", "b32", "b64")
INSTRUCTIONS: dict[str, Emulation] = {
    "add": computing(operator.add, *WHOLE, *FLOATS, "s16x2"),
    "sub": computing(operator.sub, *WHOLE, *FLOATS),
    "div": div,
    "rem": computing(lambda a, b: a - quotient(a, b) * b, *WHOLE),
    "min": computing(np.minimum, *WHOLE),
    "max": computing(np.maximum, *WHOLE),
    "neg": computing(operator.neg, "s32", "s64"),
    "abs": computing(np.abs, "f32"),
    "not": computing(np.invert, *BITS),
    "and": computing(operator.and_, *BITS),
    "or": computing(operator.or_, *BITS),
    "xor": computing(operator.xor, *BITS),
    "shl": shifted(left=True),
    "shr": shifted(left=False),
    "setp": setp,
    "selp": selp,
    "mov": mov,
    "mul": mul,
    "mad": mad,
    "cvt": cvt,
    "prmt": prmt,
    "bfe": bfe,
    "ld": ld,
    "st": st,
}
