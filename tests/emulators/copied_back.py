"""The Work of a backend that runs its operations on device copies of arrays in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nc10d import cuda
from nc10d.base.deadline import Deadline
from nc10d.base.promise import PENDING
from nc10d.ops import Op
from nc10d.work import Work


class CopiedBack(Work):
    """Ends after the device's Work, when `bring_back` has copied the results to the host."""

    __slots__ = ("bring_back", "device", "inner")

    def __init__(
        self, ops: Sequence[Op], inner: Work, bring_back: Callable[[], None], device: int
    ) -> None:
        super().__init__(ops)
        self.inner, self.bring_back, self.device = inner, bring_back, device

    def _poll(self) -> None:
        if self.inner.is_completed():
            self._follow(self.inner)

    def _block(self, deadline: Deadline) -> None:
        self.inner._block(deadline)
        self._poll()

    def _watch(self) -> None:
        self.inner.add_done_callback(self._follow)

    def _follow(self, inner: Work) -> None:
        if self._state != PENDING:
            return
        with cuda.on_device(self.device):
            if (error := inner.exception()) is None:
                self.bring_back()
            self._finish(error, inner._result)
