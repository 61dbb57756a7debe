"""Functions that run at the same time, each in a thread of its own."""

import threading
from collections.abc import Callable


def at_once(*bodies: Callable[[], object]) -> None:
    """Run functions in threads until all have returned; raise the first error."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001  (raised below, in the test's own thread)
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
