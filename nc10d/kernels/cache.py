"""Compile a function once per machine and load it everywhere else.

Contract: `compiled` makes an entry point that Python calls, `compiled_callback` a C function that
compiled code calls by its address. Each has a single signature and a unique name, and lies in a
file that has a key and a checksum and is replaced whole. So a process loads or compiles the
function that was asked for, and never another one, even while other processes write.

Numba's own on-disk cache is not used: Numba writes an index and then a data file, and two writers
can leave an index entry that points at another function's code. NUMBA_CACHE_DIR and the user's own
Numba functions are untouched.

Rule for callers: a function reaches only its own module and SOURCES of cache_dir.py, after which
the cache folder is named. Helpers that are compiled into the function have unique names in the
package: object files loaded side by side share a table of symbols.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import pickle
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import config, sigutils
from numba.core.ccallback import CFunc
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from nc10d.base.run_to_end import compiling, is_left, run_to_end
from nc10d.kernels.cache_dir import (
    KERNEL_SOURCES,
    LOCK_SECONDS,
    SOURCES,
    code_folder,
    exclusive,
    replace,
    take_for_life,
)

EntryPoint = Callable[..., Any]
Signature = Any  # text, or a Numba signature: int64(int64, my_type)
FORMAT = 1
_TOOLS = (numba, llvmlite, np)  # NumPy too: compiled code contains offsets in its objects
_compiled: dict[str, object] = {}  # what each name stands for in this process
_waits: ContextVar[bool] = ContextVar("waits for other processes' compilers", default=True)
_log = logging.getLogger("nc10d")


def compiled(signature: Any, gil: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile the decorated function for `signature` now; it runs without the GIL unless `gil`.

    `signature` is a Numba signature or its text. Returns a Numba dispatcher; Python calls
    `entry_point(dispatcher)`, other compiled functions the dispatcher itself. Blocks while another
    process compiles the same function; inside `make_all` the call raises Elsewhere then.
    """

    def decorate(function: Any) -> Any:
        dispatcher = numba.njit(nogil=not gil)(function)
        dispatcher._cache = CodeFile(function, str(signature))
        _compile(dispatcher._cache, lambda: dispatcher.compile(signature))
        dispatcher.disable_compile()
        return dispatcher

    return decorate


def entry_point(dispatcher: Any) -> Callable[..., Any]:
    """Return the cheapest way from Python into a `compiled` function (positional arguments)."""
    (result,) = dispatcher.overloads.values()
    entry: Callable[..., Any] = result.entry_point
    return entry


def compiled_callback(signature: Signature) -> Callable[[Callable[..., Any]], Any]:
    """Compile the decorated function as a C function; its `.address` is valid while it lives."""
    # Returns a numba CFunc, which takes no GIL and lets go of none.

    def decorate(function: Any) -> Any:
        types = sigutils.normalize_signature(signature)
        callback: Any = CFunc(function, types, locals={}, options={"nopython": True})
        callback._cache = CodeFile(function, str(signature))
        _compile(callback._cache, callback.compile)
        return callback

    return decorate


def made_once(made: dict[str, Any], name: str, make: Callable[[], Any]) -> Any:
    """Return the result from `make`, which runs once per `name`, for the first thread that asks."""
    found = made.get(name)
    if found is None:
        if is_left():
            raise RuntimeError(f"{name} is needed no more: a handler's error has left the call")

        def find_or_make() -> Any:
            with compiling:
                return made.get(name) or made.setdefault(name, make())

        # A signal's handler may ask amid the user's own compilation, whose lock the main thread
        # holds then.
        held = global_compiler_lock.is_locked()
        found = find_or_make() if held else run_to_end(find_or_make)
    return found


def address_of(made: dict[str, Any], name: str, make: Callable[[], Any]) -> int:
    """Return the address of a callback, which `make` compiles at the first use; see `made_once`."""
    return int(made_once(made, name, make).address)


class Elsewhere(Exception):
    """Another process compiles this function just now; raised only inside `make_all`."""


def make_all(makes: Iterable[Callable[[], object]]) -> None:
    """Compile functions, in their order; block until all are there."""
    # Functions that another process compiles just now come last: processes that need the same
    # functions at the same time so share the work.
    left: list[Callable[[], object]] = []
    token = _waits.set(False)
    try:
        for make in makes:
            try:
                make()
            except Elsewhere:
                left.append(make)
    finally:
        _waits.reset(token)
    for make in left:
        make()


# Entry points that are compiled when a program first uses them, not when they are imported

_declared: dict[tuple[str, str], tuple[Signature, bool]] = {}


def on_demand(signature: Signature, gil: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Declare an entry point: `_name` here is compiled for `signature` when `module.name` is used.

    With `gil` the function holds the GIL, and may call Python.

    The module contains `__getattr__ = entry_points(__name__)`.
    """

    def declare(function: Any) -> Any:
        _declared[function.__module__, function.__name__] = signature, gil
        return function

    return declare


def entry_points(module: str) -> Callable[[str], EntryPoint]:
    """Return the `__getattr__` for a module of entry points (PEP 562); see `on_demand`."""

    def find(name: str) -> EntryPoint:
        declared = _declared.get((module, f"_{name}"))
        if declared is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        names = vars(sys.modules[module])
        make = compiled(*declared)
        entry: EntryPoint = made_once(names, name, lambda: entry_point(make(names[f"_{name}"])))
        return entry

    return find


def every(module: str) -> Iterator[tuple[str, Callable[[], EntryPoint]]]:
    """Yield the name of each entry point of a module and the call that compiles it."""
    find = entry_points(module)
    for where, name in list(_declared):
        if where == module:
            yield name, lambda name=name: find(name[1:])  # type: ignore[misc]


def _compile(cache: CodeFile, run: Callable[[], object]) -> None:
    """Run a compilation; only one thread here and one process on this machine does at a time."""
    if config.DISABLE_JIT:
        raise RuntimeError("nc10d runs compiled code: unset NUMBA_DISABLE_JIT")
    with compiling:
        # The same function again: an error has come before its caller had it.
        known = _compiled.setdefault(cache.name, cache.function)
        assert known == cache.function, f"two functions are compiled as {cache.name}"
        _load_or_compile(cache, run)


def _load_or_compile(cache: CodeFile, run: Callable[[], object]) -> None:
    if cache.path.exists():  # loading needs no lock: files are replaced whole
        run()
        return
    with contextlib.ExitStack() as held:
        try:
            limit = LOCK_SECONDS if _waits.get() else 0.0
            held.enter_context(exclusive(cache.path.with_suffix(".lock"), limit))
        except BlockingIOError as error:
            raise Elsewhere(cache.name) from error
        if cache.path.exists():  # another process has compiled it meanwhile
            run()
            return
        if not cache.quick:
            _announce(cache.path.parent)
        run()


@functools.cache
def _announce(folder: Path) -> None:
    """Warn, once for all processes, that compiling takes a while; by the log or on stderr."""
    if take_for_life(folder / "telling.lock"):
        _log.warning(
            "nc10d: compiling its engine for this machine, once; this takes some seconds "
            "(python -m nc10d.warmup does it ahead)"
        )


class CodeFile:
    """Numba's cache interface for a function with a single overload."""

    def __init__(self, function: FunctionType, signature: Signature) -> None:
        self.name = f"{function.__module__}.{function.__qualname__}"
        code = function.__code__
        self.function = code, str(signature), *map(_text_of_cell, function.__closure__ or ())
        constants = [c for c in code.co_consts if isinstance(c, int | float | str | tuple)]
        read = code.co_code, code.co_names, repr(constants), _file_digest(code.co_filename)
        self._key = (self.name, str(signature), *read)
        digest = hashlib.sha256(repr(self._key).encode()).hexdigest()[:16]
        self.quick = self.name.startswith(__package__ + ".")  # a kernel: a tenth of a second
        folder = _folder(KERNEL_SOURCES if self.quick else SOURCES)
        self.path = folder / f"{self.name}-{digest}.code"
        self.cache_path = str(folder)  # shown in Numba's statistics

    def load_overload(self, _signature: object, target: Any) -> Any:
        """Return the compiled function, or None if missing or damaged."""
        # Numba's own caches first register everything that the target can compile (`refresh`),
        # which takes longer than all the rest; a loaded function needs only Numba's memory
        # functions.
        try:
            blob = self.path.read_bytes()
        except FileNotFoundError:
            return None
        rtsys.initialize(target)
        checksum, data = blob[:32], blob[32:]
        if hashlib.sha256(data).digest() != checksum:
            return None
        key, payload = pickle.loads(data)
        return CompileResult._rebuild(target, *payload) if key == self._key else None

    def save_overload(self, _signature: object, result: Any) -> None:
        """Put the compiled function on disk; without room or rights it only lives in memory."""
        assert not result.lifted, f"{self.name} can't be kept"
        assert not result.library.has_dynamic_globals, f"{self.name} holds a process's addresses"
        data = dumps((self._key, result._reduce()))
        with contextlib.suppress(OSError):
            replace(self.path, hashlib.sha256(data).digest() + data)


def _text_of_cell(cell: CellType) -> str:
    """Return what tells a value of a closure from others, and is the same when it is made again."""
    try:
        value = cell.cell_contents
    except ValueError:
        return "empty"
    return getattr(value, "__qualname__", None) or repr(value)


@functools.cache
def _file_digest(name: str) -> str:
    try:
        return hashlib.sha256(Path(name).read_bytes()).hexdigest()
    except OSError:
        return name


@functools.cache
def _folder(sources: tuple[str, ...]) -> Path:
    """Return the folder for these sources, compilers and settings, and this CPU."""
    versions = FORMAT, platform.python_version(), *(x.__version__ for x in _TOOLS)
    settings = (config.OPT, config.BOUNDSCHECK, config.DEBUGINFO_DEFAULT, config.LOOP_VECTORIZE)
    machine = cpu_target.target_context.codegen().magic_tuple()
    return code_folder(sources, (*versions, *map(str, settings), *machine))
