"""A thread that runs tasks in the order in which they were given."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)
Task = Callable[[], None]


class CopyWorker:
    """A thread, started by the first task; `close` lets it finish the tasks given so far."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def give(self, task: Task) -> None:
        """Have `task` run on the thread; it handles its own errors."""
        self._tasks.put(task)
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._main, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    def _main(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            try:
                task()
            except Exception:  # noqa: BLE001  (a faulty task must not stop later tasks)
                _log.exception("a task of %s failed", self._name)

    def close(self) -> None:
        """Wait until all given tasks have run; no task may be given afterwards."""
        self._tasks.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
