"""Methods of torch's DistributedDataParallel that torch calls private, and programs call anyway.

Contract: nc10d's class has all its own attributes here and in `nc10d.torch.ddp`. It is torch's
class for `isinstance` alone: `without_torchs` hides the rest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import GroupMember
from nc10d.reducer import hooks
from nc10d.reducer.hooks import CommHook
from nc10d.reducer.logger import Fields
from nc10d.torch.backend.groups import AnyGroup, own_group
from nc10d.torch.in_backward import apply_optimizer_in_backward

_BUILTIN = {"ALLREDUCE": hooks.allreduce_hook, "FP16_COMPRESS": hooks.fp16_compress_hook}
_OUTSIDE = GroupMember.NON_GROUP_MEMBER, torch.distributed.GroupMember.NON_GROUP_MEMBER

BufferFunction = Callable[
    [Any, dict[str, torch.Tensor]], Iterable[torch.futures.Future[object]] | None
]


class BufferHook(NamedTuple):
    """A function that a user has registered to make buffers alike, before or after a forward."""

    state: object
    function: BufferFunction
    after: bool

    @torch.no_grad()
    def run(self, buffers: dict[str, torch.Tensor]) -> None:
        """Call the function, and wait for the Futures that it returns, if any."""
        # As in torch: writes are no reason for autograd to refuse the pass that has read them.
        with torch.autograd._unsafe_preserve_version_counter(tuple(buffers.values())):
            for future in self.function(self.state, buffers) or ():
                future.wait()


class PrivateMethods:
    """The part of DistributedDataParallel with torch's private names."""

    process_group: AnyGroup
    _group: ProcessGroup
    static_graph: bool
    reducer: Any
    logger: Any
    register_comm_hook: Callable[[object, CommHook], None]
    _comm_hook: tuple[object, CommHook] | None
    _contents: Any
    _gradients: Any
    _parts: Any
    _precision: Any
    _buffer_hook: BufferHook | None
    _connect: Callable[[], object]
    _refuse_leaves: Callable[[str], None]

    def _register_builtin_comm_hook(
        self, comm_hook_type: torch.distributed.BuiltinCommHookType
    ) -> None:
        """Register the hook for torch's BuiltinCommHookType ALLREDUCE or FP16_COMPRESS."""
        self.register_comm_hook(None, _BUILTIN[comm_hook_type.name])

    def _register_buffer_comm_hook(
        self, state: object, hook: BufferFunction, comm_hook_location: object = None
    ) -> None:
        """Let `hook(state, buffers)` make buffers alike, in place of rank 0's.

        `buffers` are tensors by name. The hook may return Futures, which are waited for at once.
        It is called after a forward pass, or before with torch's enumeration PRE_FORWARD. Every
        rank registers the same. TypeError if the hook is not callable.
        """
        self._refuse_leaves("a buffer hook")
        if not callable(hook):
            raise TypeError(f"a buffer hook must be callable, got {hook!r:.80}")
        after = getattr(comm_hook_location, "name", "POST_FORWARD") == "POST_FORWARD"
        self._buffer_hook = BufferHook(state, hook, after)

    def _set_static_graph(self) -> None:
        """Switch to a static graph; every rank calls, before the first pass."""
        self._refuse_late("_set_static_graph()", "pass static_graph=True to the constructor")
        self.static_graph = True
        self._reconnect()

    def _register_fused_optim(
        self,
        optim: type[torch.optim.Optimizer],
        *args: object,
        optim_params: Iterable[torch.Tensor] | None = None,
        **kwargs: object,
    ) -> None:
        """Let `optim(params, *args, **kwargs)` step in the backward pass, for each parameter.

        `optim_params` are the parameters (None: all). As `apply_optimizer_in_backward` before
        wrapping; every rank calls, before the first pass and any comm hook.
        """
        self._refuse_late("_register_fused_optim", "call apply_optimizer_in_backward first")
        chosen = self._contents.trained().values() if optim_params is None else optim_params
        signature = inspect.signature(optim)
        signature.bind((), *args, **kwargs)  # TypeError for arguments that forward does not take
        options = dict(zip([*signature.parameters][1:], args, strict=False)) | kwargs
        apply_optimizer_in_backward(optim, chosen, options, False)
        self._reconnect()

    def _update_process_group(self, new_process_group: AnyGroup) -> None:
        """Train on another nc10d or torch.distributed group from the next pass on.

        Every rank in the new group calls, between passes or after a failed pass, and blocks until
        all have called. A rank outside the new group stays unchanged. The comm hook goes on; its
        state is the caller's, and so is the group inside.
        """
        if not any(new_process_group is outside for outside in _OUTSIDE):
            self._attach(new_process_group)
            self._reconnect()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs are the module's own, and may be changed in place."""

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether the buckets are in arrival order; torch's hook_with_zero_step asks."""
        return bool(self.reducer.rebuilt)

    def _check_reducer_finalized(self) -> None:
        """Raise a RuntimeError if an exception ended the last backward pass, until a forward."""
        self._gradients.check_finished()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Let a later DDP for `module` ignore these parameters and buffers."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore

    def _get_ddp_logging_data(self) -> Fields:
        """Return the Reducer's options and its passes' times, in torch's fields."""
        return self.logger.data()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Sample a pass in every `sample_rate` after the first ten."""
        self.logger.set_sample_rate(sample_rate)

    def _remove_autograd_hooks(self) -> None:
        """Stop reducing the module's gradients, so that the module can be wrapped again."""
        self._gradients.close()
        if self._precision is not None:
            self._precision.close()

    def _attach(self, group: AnyGroup) -> None:
        """Take an nc10d or torch group, as `own_group`."""
        self._group, self.process_group = own_group(group), group

    def _reconnect(self) -> None:
        """Make a new Reducer with all ranks of the group."""
        if self._parts is not None:
            self._remove_autograd_hooks()
            self._parts = None
        self._connect()

    def _refuse_late(self, call: str, instead: str) -> None:
        with self.logger.reporting():
            if self.reducer.arrived is not None or self._comm_hook is not None:
                raise RuntimeError(
                    f"{call} should be called before training loop starts, and before a comm hook "
                    f"is registered: {instead}"
                )


def without_torchs(kind: type[TorchDDP]) -> None:
    """Hide what a class inherits from torch's DistributedDataParallel, as if from Module alone."""
    own = vars(kind).keys() | vars(PrivateMethods).keys()
    for name in vars(TorchDDP).keys() - own - vars(type).keys():
        setattr(kind, name, getattr(Module, name) if hasattr(Module, name) else _Missing(name))


class _Missing:
    """An attribute that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"nc10d's {owner.__name__} has no attribute {self._name!r}")
