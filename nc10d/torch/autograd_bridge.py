"""From autograd to the Reducer and back: gradients go in as they are made, means come out.

Contract: autograd calls `_ready` once for each parameter in a backward pass, in whatever order,
on the thread that called `backward`, or on one for each GPU, with the stream current on which the
gradient is made. The first of them begins the Reducer's pass, and the end of
autograd's work ends it: a forward pass that nobody computes backwards from leaves nothing behind. A
hook holds no reference to its Gradients, and goes when they go.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from nc10d.group.process_group import ProcessGroup
from nc10d.reducer.reducer import Reducer
from nc10d.torch.graph import tensors_in
from nc10d.torch.slots import Dense, Sparse, allocation, slot_of


class Gradients:
    """The gradients of `params` (by name, on the CPU or on GPUs), averaged over a group.

    With `as_views` they lie in the Reducer's buckets, else they are tensors of their own. Those of
    the names in `sparse` come as sparse tensors. `caps` are the sizes of buckets and of the first
    one in bytes.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        sparse: Collection[str],
        group: ProcessGroup,
        *,
        as_views: bool,
        caps: tuple[int, int],
        find_unused: bool,
        static: bool,
    ) -> None:
        self.params = list(params.values())
        self.reducer = Reducer(
            self.params,
            group,
            names=list(params),
            cap_bytes=caps[0],
            first_bytes=caps[1],
            expect_sparse=[name in sparse for name in params],
            find_unused_parameters=find_unused or static,
            static_graph=static,
            allocate=allocation(self.params),
        )
        self._beginning = threading.Lock()
        self._as_views, self._static, self._searching = as_views, static, find_unused and not static
        self._reducing = self._running = self._awaited = False
        self._unused: Collection[int] = ()
        self._came: set[int] = set()
        self._slots: list[Dense | Sparse] = []
        self._elsewhere: list[int] = []
        self._lay_out()
        handles = [
            x.register_post_accumulate_grad_hook(_hook(weakref.ref(self), index))
            for index, x in enumerate(self.params)
        ]
        self.close = weakref.finalize(self, _remove, handles)
        """Remove the hooks: gradients are left alone from then on."""

    def _lay_out(self) -> None:
        pairs = zip(self.params, self.reducer.gradients, strict=True)
        self._slots = [slot_of(x, gradient, self._as_views) for x, gradient in pairs]
        self._elsewhere = [i for i, slot in enumerate(self._slots) if not slot.as_view]

    def settle(self, reducing: bool) -> None:
        """Be ready for a pass; on the way to one that is reduced, lay the buckets out anew, once.

        Raises what the last backward pass left behind if an exception ended it.
        """
        self._awaited = False
        if self._running:
            self._fail_left_behind()
        if reducing and self.reducer.rebuild():
            self._lay_out()

    def expect(self, reducing: bool, output: Any, unused: Collection[int]) -> None:
        """Say of the backward pass to come whether it is reduced, and what will not be in it.

        A static graph has shown that in its first pass.
        """
        self._reducing = reducing
        if not self._static:
            self._unused = unused
        if reducing:
            # Parameters may get their gradients in a backward pass within the pass, which ends
            # before it (checkpointing): the outputs' gradients are there before any of that.
            hook = _output_hook(weakref.ref(self))
            for x in tensors_in(output):
                if x.grad_fn is not None:  # a leaf would keep it for all passes
                    x.register_hook(hook)

    def _ready(self, index: int, x: torch.Tensor) -> None:
        if not self._reducing:
            self.reducer.grad_ready(index)
            return
        with self._beginning:
            if not self._running:
                self._begin()
        gradient = self._slots[index].take(x)
        self._came.add(index)
        self.reducer.grad_ready(index, gradient)

    def _begin(self) -> None:
        for index in self._unused:
            self._slots[index].fill(self.params[index])
        self._came.clear()
        self._running = True
        self.reducer.begin(() if self._static else self._unused)
        if not self._awaited:
            self._await_end()

    def _await_end(self) -> None:
        """Have `_end` called when the backward pass that runs now is through."""
        self._awaited = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """Wait for the means and hand them out; nothing to do if no parameter got a gradient."""
        self._awaited = False
        if not self._running:
            return
        late = self._do_without_the_rest() if self._searching else ()
        self._running = False
        try:
            self.reducer.finish()
        except RuntimeError as error:
            # Gradients have not come. A DistError, which is one too, is about something else.
            if type(error) is RuntimeError:
                error.add_note(_ADVICE)
            raise
        if self._static:
            self._unused = self._missing()
        used = self.reducer.used
        means = {*self._elsewhere, *self._unused, *late}
        self._hand_out(index for index in means if used[index])

    def _do_without_the_rest(self) -> Collection[int]:
        """Declare unused what lies behind outputs from which nothing was computed backwards."""
        late = self._missing() - set(self._unused)
        for index in late:
            self._slots[index].fill(self.params[index])
            self.reducer.declare_unused(index)
        return late

    def _missing(self) -> set[int]:
        return set(range(len(self.params))) - self._came

    def _hand_out(self, means: Iterable[int]) -> None:
        """Let these gradients be the means; all others are, as they lie in the buckets."""
        copies = [self._slots[index].give(self.params[index]) for index in means]
        pairs = [copy for copy in copies if copy is not None]
        if pairs:
            torch._foreach_copy_([to for to, _ in pairs], [mean for _, mean in pairs])

    def _fail_left_behind(self) -> None:
        self._running = False
        try:
            self.reducer.finish()
        except RuntimeError as error:
            error.add_note("the last backward pass was left by an exception: it is over now")
            raise


_ADVICE = (
    "With DistributedDataParallel: pass find_unused_parameters=True if the output need not depend "
    "on all parameters, and see that all of the module's output takes part in the loss."
)


def _hook(owner: weakref.ref[Gradients], index: int) -> Callable[[torch.Tensor], None]:
    def ready(x: torch.Tensor) -> None:
        found = owner()
        if found is not None:
            found._ready(index, x)

    return ready


def _output_hook(owner: weakref.ref[Gradients]) -> Callable[[torch.Tensor], None]:
    def begins(_: torch.Tensor) -> None:
        found = owner()
        if found is not None and found._reducing:
            found._await_end()

    return begins


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
