"""Refuse except clauses that would take a signal handler's error for the library's own.

`python tools/handlers.py`, run by `make lint`. Python runs handlers in the main thread. A clause
for an error that a handler may raise, too, must be one of these:

- it names its errors by `raised_here` (or is `suppress_here`), at most MOST times in the package;
- it passes the error on: its last statement is `raise`, or it hands the error itself to a call,
  a variable or its caller, which raise it later;
- it never runs in the main thread: its function is decorated by `off_main`, or OFF_MAIN names it;
- EXCEPTED names it, with a reason.

A clause whose block has no call, with or loop can't be interrupted.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "nc10d"
MOST = 40
"""Upper bound on the uses; beyond that, move code off the main thread."""

_FORMATION = "groups form off the main thread (CpuBackend's _formed)"
_OWN_THREAD = "it runs on a thread of its own"
_PROCESS = "a process of nc10d's own, whose handlers are nc10d's"
OFF_MAIN = {
    "kernels/": "run_to_end compiles and loads all code",
    "run/": _PROCESS,
    "debug/": _PROCESS,
    "warmup.py": _PROCESS,
    "auth/__main__.py": _PROCESS,
    "store/__main__.py": _PROCESS,
    "store/server.py": "the store's server is a process or a thread of its own",
    "store/auth_server.py": "the store's server is a process or a thread of its own",
    "store/peer_user.py": "the store's server is a process or a thread of its own",
    "store/hosting.py": "TCPStore starts its server by run_to_end",
    "store/client_connect.py": "StoreSession connects by run_to_end",
    "store/session.py:_connected": "StoreSession connects by run_to_end",
    "store/journal.py:close": "FileStore opens and closes its file by run_to_end",
    "store/journal.py:_open_own": "FileStore opens and closes its file by run_to_end",
    "store/journal.py:_same_file": "FileStore opens and closes its file by run_to_end",
    "group/call_agreement.py:_others": "run_to_end calls it",
    "base/run_to_end.py:_drop_result": "run_to_end calls it on another thread",
    "base/resolve.py": "its callers are off the main thread",
    "init_methods/launcher_env.py:_process": "launcher_ancestor is off the main thread",
    "backend/cpu/bootstrap/": _FORMATION,
    "backend/cpu/transport/": _FORMATION,
    "backend/cpu/engine/cpu_policy.py:quota": _FORMATION,
    "backend/cpu/memory/proc.py": _FORMATION,
    "backend/cpu/memory/arena.py:__init__": _FORMATION,
    "backend/cpu/memory/host_peer.py": "`death` is off the main thread",
    "backend/cpu/memory/peer_access.py:_state": "`withdraw` and formation are off the main thread",
    "backend/cpu/control/connections.py": "the control thread reads and closes the connections",
    "backend/cpu/deadlock/notices.py:receive": "the control thread reads messages",
    "backend/nccl/backend.py:_end": _OWN_THREAD,
    "backend/nccl/backend.py:_release": _OWN_THREAD,
    "backend/nccl/failure.py:_notify_peers": _OWN_THREAD,
    "backend/nccl/awaited_ranks.py": "the watchdog calls",
    "backend/nccl/launch/message_links.py:set": "the watchdog calls",
    "backend/nccl/launch/message_links.py:value": "the watchdog calls",
    "backend/nccl/registered_memory.py:_give_back": _OWN_THREAD,
    "backend/nccl/registered_memory.py:_go_on": _OWN_THREAD,
    "backend/nccl/watchdog.py": _OWN_THREAD,
    "backend/staged/backend.py:_main": _OWN_THREAD,
}
"""Files, folders and functions that the main thread does not run, with the reason."""

_PARSES = "it parses a text that is there, for some microseconds"
_ASKS = "an array's own code answers, before anything is sent"
_TORCH = "torch knows its own kinds of errors alone; nc10d's DistErrors are no user's kinds"
EXCEPTED = {
    "testing/": "the test kit raises what it finds",
    "api/backend_names.py:is_backend_available": _PARSES,
    "api/calls.py:rank_in": _PARSES,
    "api/object_exchange.py:encode_outgoing": "the error comes out after the exchange",
    "arrays/buffer.py:_guess_device": _ASKS,
    "arrays/exporters.py:host_view": _ASKS,
    "arrays/exporters.py:_export_of": _ASKS,
    "backend/cpu/control/group_control.py:suspects": _PARSES,
    "backend/cpu/engine/channel.py:reap": "the next pass of the loop retries",
    "backend/cpu/memory/arena.py:_take": "the hole is gone all the same",
    "backend/cpu/p2p/receive_queues.py:advance": "the Work raises the error",
    "backend/nccl/device_group.py:accept": "the failed group raises its cause",
    "backend/nccl/launch/contiguous.py:_on_copies": _ASKS,
    "backend/polled/polled_group.py:_begin": "the group fails with the error, which peers learn",
    "backend/polled/polled_group.py:_advance_task": "the group fails with the error, as above",
    "base/error_wire.py": _PARSES,
    "base/signal_errors.py:start": "it tests by `from_handler`",
    "base/uncaught.py:_shows_all": "the program has died of another error",
    "cuda/driver.py:describe": _PARSES,
    "store/values.py:read_number": _PARSES,
    "torch/backend/": _TORCH,
    "torch/tensors.py": _ASKS,
}
"""Files, folders and functions with other clauses, with the reason."""

_OWN = {"CodecError", "CollectiveMismatch", "GroupClosed", "UnsupportedPlatform"}
_OWN |= {"CudaError", "LibraryError", "NCCLError", "UCCError"}
"""Errors of nc10d's that no program raises by itself."""
_SYSTEM = {
    n for n, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, OSError)
}


def kinds() -> set[str]:
    """Return the names of errors that both a handler and the library may raise."""
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    errors = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return _SYSTEM | {"Exception", "RuntimeError", "ValueError", "ImportError"} | (errors - _OWN)


class Clauses(ast.NodeVisitor):
    """The clauses of a module that end an error of some `kinds`: lines, with their functions."""

    def __init__(self, source: str, kinds: set[str]) -> None:
        self.found: list[tuple[int, tuple[str, ...]]] = []
        self.uses = 0
        self._kinds = kinds
        self._functions: list[str] = []
        self.visit(ast.parse(source))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Look into a function, unless it is decorated by `off_main`."""
        if not any(isinstance(d, ast.Name) and d.id == "off_main" for d in node.decorator_list):
            self._functions.append(node.name)
            self.generic_visit(node)
            self._functions.pop()

    def visit_Call(self, node: ast.Call) -> None:
        """Count a use, or look at a call of contextlib.suppress."""
        name = ast.unparse(node.func)
        self.uses += name in {"raised_here", "suppress_here"}
        if name in {"contextlib.suppress", "suppress"}:
            self._look(node.lineno, node.args)
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        """Look at the clauses of a block that calls something."""
        interruptible = (ast.Call, ast.With, ast.For, ast.While)
        if any(isinstance(part, interruptible) for top in node.body for part in ast.walk(top)):
            for clause in node.handlers:
                if clause.type is not None and not _passes_on(clause):
                    named = (
                        clause.type.elts if isinstance(clause.type, ast.Tuple) else [clause.type]
                    )
                    self._look(clause.lineno, named)
        self.generic_visit(node)

    def _look(self, line: int, named: list[ast.expr]) -> None:
        if self._kinds & {ast.unparse(name).rpartition(".")[2] for name in named}:
            self.found.append((line, tuple(self._functions)))


def _passes_on(clause: ast.ExceptHandler) -> bool:
    last = clause.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return True
    return any(_hands_on(part, clause.name) for top in clause.body for part in ast.walk(top))


def _hands_on(statement: ast.AST, error: str | None) -> bool:
    """Return whether a statement hands the error itself to a call, a variable or the caller."""
    if isinstance(statement, (ast.Assign, ast.Return)):
        value = statement.value
        values = value.elts if isinstance(value, ast.Tuple) else [value]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        values = (
            [] if ast.unparse(statement.value.func).startswith("_log.") else statement.value.args
        )
    else:
        return False
    return any(isinstance(value, ast.Name) and value.id == error for value in values)


def unlisted(path: str, found: list[tuple[int, tuple[str, ...]]], used: set[str]) -> Iterator[str]:
    """Yield the places of clauses that no list has; add to `used` the entries that have one."""
    for line, functions in found:
        names = {path, *(f"{path}:{name}" for name in functions)}
        names |= {f"{parent}/" for parent in map(str, Path(path).parents)}
        listed = names & (OFF_MAIN.keys() | EXCEPTED.keys())
        used |= listed
        if not listed:
            yield f"nc10d/{path}:{line}: name the errors by raised_here, or see tools/handlers.py"


def main() -> int:
    """Print what is wrong; return the exit code."""
    wrong: list[str] = []
    used: set[str] = set()
    uses = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        clauses = Clauses(path.read_text(), kinds())
        uses += clauses.uses
        wrong += unlisted(str(path.relative_to(PACKAGE)), clauses.found, used)
    unused = sorted((OFF_MAIN.keys() | EXCEPTED.keys()) - used)
    wrong += [f"tools/handlers.py: {name} has no such clause any more" for name in unused]
    if uses > MOST:
        wrong.append(f"{uses} uses of raised_here and suppress_here, more than {MOST}")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
