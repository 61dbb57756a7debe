"""DistributedDataParallel: torch's, with the gradients reduced by nc10d.

    model = nc10d.torch.DistributedDataParallel(model)
    loss(model(x)).backward()       # every rank's gradients are the means when this returns

Contract: constructor, semantics and attributes are torch.nn.parallel.DistributedDataParallel's,
on an nc10d group. A gradient leaves in its bucket as soon as autograd has made it; `backward`
waits for all of them, and raises what went wrong. A module is on the CPU, or on one or several
GPUs, whose gradients go by the group's backend for them, in the order of torch's current streams;
its group needs a backend for the CPU too. torch.compile compiles the module, and leaves the rest of
a forward pass to Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import get_default_group
from nc10d.reducer import hooks
from nc10d.reducer.logger import Fields, Logger
from nc10d.reducer.plan import BUCKET_BYTES, FIRST_BUCKET_BYTES
from nc10d.reducer.reducer import Reducer
from nc10d.torch.autograd_bridge import Gradients
from nc10d.torch.compiling import in_python
from nc10d.torch.graph import unused_in
from nc10d.torch.placement import placement
from nc10d.torch.replicas import Contents, same_everywhere
from nc10d.torch.tensor_bucket import on_tensors


class DistributedDataParallel(torch.nn.Module):
    """`module`, trained by all ranks of a group on data of their own.

    `process_group` is an nc10d group (None: the default one), `device_mesh` a mesh of one
    dimension in its place. `bucket_cap_mb` (25) is the size of buckets in MiB, of which the first
    to leave is at most 1. With `find_unused_parameters`, each forward pass looks for what its
    output does not depend on; with `static_graph`, the first pass shows that for all. With
    `gradient_as_bucket_view`, gradients lie in the buckets. `init_sync` gives every rank rank 0's
    parameters and buffers at the start, `forward_sync_buffers` its buffers before each forward
    pass; `broadcast_buffers`, the older name, leaves them alone at the start, too, if it is False.
    `device_ids` has the one GPU of a module, to which inputs are moved; it must be None for modules
    on the CPU or on several. `output_device`, `dim` and `check_reduction` are torch's, without a
    meaning: outputs are where the module has them.

    Names in `module._ddp_params_and_buffers_to_ignore` are left alone. Copies and pickles, on the
    default group alone, take part from their first forward pass on that records a graph: then all
    ranks need one. A comm hook is not copied.

    Blocks until all ranks have made theirs. ValueError on every rank if their parameters differ,
    and for devices as torch raises it; RuntimeError if there is nothing to train, or a parameter
    has no shape yet. Backward passes raise DistErrors, and a RuntimeError that names the parameters
    whose gradients have not come.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        device_mesh: Any = None,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        self._contents = Contents(module)
        self._placement = placement(self._contents.parameters(), device_ids, output_device)
        self.device_ids, self.output_device = self._placement
        self.device = next(iter(self._contents.trained().values())).device
        self.device_type = self.device.type
        self.parameters_to_ignore = set(self._contents.ignored)
        self.process_group = _group(process_group, device_mesh)
        self.module = module
        self.dim = dim
        at_start = broadcast_buffers is not False or forward_sync_buffers is not None
        forwards = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.forward_sync_buffers = forwards is None or forwards
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.bucket_bytes_cap, self._first_cap = _caps(bucket_cap_mb)
        self._parts: tuple[Gradients, Logger] | None = None
        self._connected()
        if init_sync:
            same_everywhere(self.process_group, self._contents.states(buffers=at_start))

    def _connected(self) -> tuple[Gradients, Logger]:
        """Return what reduces gradients, and what sees its passes; makes both, with all ranks."""
        if self._parts is None:
            gradients = Gradients(
                self._contents.trained(),
                self._contents.sparse(),
                self.process_group,
                as_views=self.gradient_as_bucket_view,
                caps=(self.bucket_bytes_cap, self._first_cap),
                find_unused=self.find_unused_parameters,
                static=self.static_graph,
            )
            self._parts = gradients, self._logger(gradients.reducer)
        return self._parts

    def _logger(self, reducer: Reducer) -> Logger:
        devices = {x.device for x in self._contents.parameters()}
        return Logger(
            reducer,
            module_name=type(self.module).__name__,
            gradient_as_bucket_view=int(self.gradient_as_bucket_view),
            broadcast_buffers=int(self.forward_sync_buffers),
            has_sync_bn=int(self._contents.has_sync_bn()),
            is_multi_device_module=int(len(devices) > 1),
            device_ids=" ".join(map(str, self.device_ids or ())),
            output_device=-1 if self.output_device is None else self.output_device,
        )

    @property
    def _gradients(self) -> Gradients:
        return self._connected()[0]

    @property
    def logger(self) -> Logger:
        """What sees the passes of the Reducer."""
        return self._connected()[1]

    @property
    def reducer(self) -> Reducer:
        """The nc10d.Reducer behind it."""
        return self._gradients.reducer

    @property
    def broadcast_buffers(self) -> bool:
        """Another name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; what is computed backwards from its output is reduced.

        RuntimeError if the last backward pass was left by an exception; the next call is free.
        """
        recording = torch.is_grad_enabled()
        reducing = recording and self.require_backward_grad_sync
        self._before(recording, reducing)
        output = self.module(*self._placement.moved(inputs), **self._placement.moved(kwargs))
        self.require_forward_param_sync = reducing
        if recording:
            self._after(reducing, output)
        return output

    @in_python
    def _before(self, recording: bool, reducing: bool) -> None:
        if recording:
            self._gradients.settle(reducing)
            self.reducer.prepare_for_forward()
        if self.will_sync_module_buffers():
            same_everywhere(self.process_group, self._contents.buffers())

    @in_python
    def _after(self, reducing: bool, output: Any) -> None:
        searching = reducing and self.find_unused_parameters and not self.static_graph
        unused = unused_in(output, self._gradients.params) if searching else ()
        self._gradients.expect(reducing, output, unused)

    def will_sync_module_buffers(self) -> bool:
        """Say whether the next forward pass gives every rank rank 0's buffers."""
        wanted = self.require_forward_param_sync and self.forward_sync_buffers
        return wanted and bool(self._contents.buffers())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this rank, for forward passes inside of the block.

        The next pass outside reduces the sums. Every rank must use it alike.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook(state, bucket)` reduce the buckets; once, before the first backward pass.

        `bucket` has c10d's methods and gives tensors. The hook returns a Work or Future of
        nc10d's, or a torch.futures.Future, whose value is the reduced tensor or a list with it.
        A sparse gradient is a bucket of its own, whose buffer and value are sparse tensors.
        TypeError if it can't be called. The hooks of nc10d.reducer.hooks take the group as state.
        """
        if not callable(hook):
            raise TypeError(f"a comm hook must be callable, got {hook!r:.80}")
        self.reducer.register_comm_hook(state, on_tensors(hook))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Let one of torch's BuiltinCommHookTypes reduce the buckets: ALLREDUCE, FP16_COMPRESS."""
        self.register_comm_hook(None, _BUILTIN[comm_hook_type.name])

    def _set_static_graph(self) -> None:
        """Let the first pass show for all which parameters are used; every rank, before it."""
        if self.reducer.arrived is not None or self.reducer.hook_name:
            raise RuntimeError("pass static_graph=True: there is a pass or a comm hook already")
        self._remove_autograd_hooks()
        self._parts, self.static_graph = None, True
        self._connected()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Have these names left alone when `module` is wrapped."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore

    def _remove_autograd_hooks(self) -> None:
        """Leave the module's gradients alone from now on, so that it can be wrapped again."""
        self._gradients.close()

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not get_default_group():
            raise RuntimeError("only what is trained by the default group can be copied or pickled")
        gone = {"process_group", "_contents"}
        kept = {name: x for name, x in self.__dict__.items() if name not in gone}
        return {**kept, "_parts": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = get_default_group()
        self._contents = Contents(self.module)

    def _get_ddp_logging_data(self) -> Fields:
        """Return what the Reducer is and what its passes cost, in torch's fields."""
        return self.logger.data()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Look at one pass in `sample_rate` after the first ten."""
        self.logger.set_sample_rate(sample_rate)


_BUILTIN = {"ALLREDUCE": hooks.allreduce_hook, "FP16_COMPRESS": hooks.fp16_compress_hook}


def _group(group: ProcessGroup | None, mesh: Any) -> ProcessGroup:
    found = _chosen(group, mesh)
    if not hasattr(found, "coalescing_manager"):
        raise TypeError(f"process_group must be a group of nc10d's, got {type(found)}")
    return found


def _chosen(group: ProcessGroup | None, mesh: Any) -> ProcessGroup:
    if mesh is None:
        return get_default_group() if group is None else group
    if group is not None:
        raise ValueError("give either process_group or device_mesh")
    if mesh.ndim != 1:
        raise ValueError(f"device_mesh must have one dimension, it has {mesh.ndim}")
    found: ProcessGroup = mesh.get_group()
    return found


def _caps(bucket_cap_mb: float | None) -> tuple[int, int]:
    """Return the caps of buckets and of the first, in bytes; as torch does, one cap for both."""
    if bucket_cap_mb is None:
        return BUCKET_BYTES, FIRST_BUCKET_BYTES
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}")
    cap = int(bucket_cap_mb * (1 << 20))
    return cap, min(cap, FIRST_BUCKET_BYTES)
