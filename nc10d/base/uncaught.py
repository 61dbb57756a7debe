"""How an uncaught error of nc10d is printed: up to the user's line, and each sentence once.

A failed call raises the same error on every rank. The frames inside nc10d do not help a user and
would fill a screen for each rank. So `sys.excepthook` leaves them out of an error that nc10d has
raised itself, and with them a cause that the error repeats. An error that comes out of a line
without `raise` is a bug in nc10d, and keeps all frames. NC10D_DEBUG=DETAIL keeps all frames, and so
does a hook that the program has set.

A daemon thread may wait in a call when the program ends. Closing the groups at exit ends the call
with an error, which nobody waits for, and which is not printed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from traceback import StackSummary, TracebackException, walk_tb
from types import TracebackType

from nc10d.base.call_site import is_own
from nc10d.base.debug_level import DebugLevel, get_debug_level
from nc10d.errors import DistError

_FOR_USERS = (DistError, ValueError, TypeError)
"""The kinds that are shortened where the source of nc10d is not there to look at."""
menders: list[Callable[[BaseException, TracebackException], None]] = []
"""Functions of upper layers, which mend the printed form of an error before the shortening."""


def install() -> None:
    """Print uncaught errors shortened, and none that the program's end makes in daemon threads.

    A hook that the program has set stays; idempotent.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _print_of_thread


def _print_of_thread(args: threading.ExceptHookArgs) -> None:
    ended = not threading.main_thread().is_alive()
    if ended and args.thread is not None and args.thread.daemon:
        frames = [frame for frame, _ in walk_tb(args.exc_traceback)]
        if frames and is_own(frames[-1].f_code.co_filename):
            return
    threading.__excepthook__(args)


def _print(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _shows_all() or sys.stderr is None:
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(text_of(error))
    sys.stderr.flush()


def _shows_all() -> bool:
    try:
        return get_debug_level() is DebugLevel.DETAIL
    except ValueError:  # the level's variable has a wrong value, which may have ended the program
        return False


def text_of(error: BaseException) -> str:
    """Return the traceback of `error` as it is printed, with its causes."""
    whole = TracebackException.from_exception(error, compact=True)
    _shorten(error, whole)
    return "".join(whole.format())


def _shorten(error: BaseException, printed: TracebackException) -> None:
    for mend in menders:
        mend(error, printed)
    frames = printed.stack
    if is_raised_by_nc10d(frames, error):
        while frames and is_own(frames[-1].filename):
            del frames[-1]
    if not frames:  # without a stack no headline is printed
        printed.stack = None  # type: ignore[assignment]
    cause, context = error.__cause__, error.__context__
    if printed.__cause__ is not None and cause is not None:
        if _repeats(str(error), str(cause)):
            printed.__cause__ = None
            printed.__suppress_context__ = True
        else:
            _shorten(cause, printed.__cause__)
    elif printed.__context__ is not None and context is not None:
        _shorten(context, printed.__context__)


def is_raised_by_nc10d(frames: StackSummary, error: BaseException) -> bool:
    """Return whether a line of nc10d raises the error on purpose."""
    if not frames or not is_own(frames[-1].filename):
        return False
    line = frames[-1].line
    return line.startswith("raise") if line else isinstance(error, _FOR_USERS)


def _repeats(text: str, cause: str) -> bool:
    """Return whether an error's text ends with its cause's, which is more than a word."""
    return text.endswith(cause) and (" " in cause or text == cause)
