"""Runs a contract's laws, and raises all failures together."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def check_all(laws: Mapping[str, Callable[[], object]]) -> int:
    """Run laws by their titles; return how many held. AssertionError names those that did not.

    A law that raises NotImplementedError is about an ability that is not there, and is left out.
    """
    failures, count = [], 0
    for title, law in laws.items():
        try:
            law()
        except NotImplementedError:
            continue
        except Exception as error:  # noqa: BLE001  (a user's class may fail in any way)
            failures.append(f"{title}\n  {type(error).__name__}: {error}")
        count += 1
    if failures:
        raise AssertionError(f"{len(failures)} of {count} checks failed:\n" + "\n".join(failures))
    return count


def must_raise(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    """Return the error of a call; AssertionError for another error or none."""
    try:
        result = call()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"raised {error!r}, must raise {kind.__name__}") from error
    raise AssertionError(f"returned {result!r}, must raise {kind.__name__}")
