"""DistributedDataParallel with torch's interface; nc10d reduces the gradients.

    model = nc10d.torch.DistributedDataParallel(model)
    loss(model(x)).backward()       # every rank's gradients are the means when this returns

Contract: constructor, semantics and attributes are those of
torch.nn.parallel.DistributedDataParallel, on an nc10d group. A bucket is launched as soon as
autograd has computed its gradients. `backward` waits for all buckets, and raises their errors. A
module is on the CPU or on GPUs, one or several. The group's GPU backend reduces the gradients on
GPUs, in the order of torch's current streams; the group needs a CPU backend, too. torch.compile
compiles the module, but not this class's code. The class derives from torch's, so that
`isinstance` finds it, and takes nothing from it: no group of torch.distributed exists.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from nc10d.api.join import Join, Joinable, JoinConfig
from nc10d.errors import DistError
from nc10d.ops.leaf_tree import leaf_tree
from nc10d.reducer.hooks import CommHook
from nc10d.reducer.logger import Logger
from nc10d.reducer.reducer import Reducer
from nc10d.torch.autograd_bridge import Gradients, StepLeaves
from nc10d.torch.backend.groups import AnyGroup, meant_group, own_group
from nc10d.torch.backend.torch_reductions import ordered_by_default
from nc10d.torch.compiling import in_python
from nc10d.torch.mixed_precision import LowPrecision, MixedPrecision
from nc10d.torch.reducer_options import delayed_options, size_limits
from nc10d.torch.tensor_bucket import on_tensors
from nc10d.torch.training.ddp_methods import BufferHook, PrivateMethods, without_torchs
from nc10d.torch.uneven_inputs import EVALUATES, RECORDS, REDUCES, UnevenInputs
from nc10d.torch.wrapped_module import Contents, Device, placement, same_everywhere


class DistributedDataParallel(PrivateMethods, TorchDDP):
    """Trains `module` on all ranks in a group, each with separate data.

    `process_group` is an nc10d group, or a torch.distributed group with the backend "nc10d" (None:
    the default group, nc10d's if there is one), or `device_mesh` is a mesh with a single
    dimension. The attribute `process_group` is this group, so its library's functions take it.
    `bucket_cap_mb` (25) is the buckets' size in MiB; the first bucket has at most 1 MiB.
    `bucket_cap_mb_list` has a size for each bucket instead, and the last repeats. With
    `find_unused_parameters`, each forward pass searches for parameters on which the output does not
    depend. With `static_graph`, the first pass determines them for all passes. With
    `gradient_as_bucket_view`, gradients are views of the buckets.

    With `init_sync`, every rank gets rank 0's parameters and buffers in the constructor. With
    `forward_sync_buffers`, every rank gets rank 0's buffers before each forward pass.
    `broadcast_buffers` is the older name; if it is False, the constructor does not send buffers,
    either. `device_ids` contains the module's GPU, and inputs are moved there; it must be None
    for a module on the CPU or on several GPUs. `output_device`, `dim`, `check_reduction` and
    `batched_grad_copy` exist for compatibility and have no effect: outputs stay on the module's
    device.

    Gradients of `delay_all_reduce_named_params`, pairs of a name and a parameter, are reduced
    together, behind the bucket of `param_to_hook_all_reduce`. With `skip_all_reduce_unused_params`,
    a bucket whose parameters are all unused is not reduced; the same must be unused on every rank.

    `mixed_precision` is a MixedPrecision. Optimizers from `apply_optimizer_in_backward` step by the
    means, as soon as these are known.

    With `ordered`, gradients are added in rank order on every backend (see ReduceOp.ordered), with
    the same bits by any buckets and on any hosts. None: as NC10D_ORDERED says.

    With `leaves`, a power of two, a step has so many micro-batches of equal size. A rank makes a
    forward and a backward pass for each of its own:

        for leaf in model.my_leaves:
            loss(model(batch[leaf])).backward()
        optimizer.step()

    A backward pass drops the gradients from before. After the rank's last they are the means over
    all leaves, added along a fixed tree: 1 to `leaves` ranks end with the same weights, bit for
    bit, if kernels (torch.set_num_threads) and random numbers depend on the leaf alone. Buffers are
    rank 0's, sent once a step. RuntimeError, once, if an optimizer steps or another step begins
    before the rank's last leaf; that step is dropped. Not with no_sync, join, comm and buffer
    hooks, sparse gradients, SyncBatchNorm, `skip_all_reduce_unused_params`, optimizers in the
    backward pass, or a module on GPUs.

    DDP ignores names in `module._ddp_params_and_buffers_to_ignore`. Only a module on the default
    group can be copied or pickled. A copy joins the group in its first forward pass that records a
    graph, so all ranks need a copy then. A comm hook is not copied.

    The constructor blocks until all ranks call it. ValueError on every rank if parameters differ,
    for devices as in torch, and for sparse gradients with mixed precision. RuntimeError without a
    trainable parameter, or if a parameter has no shape yet. A forward pass raises a RuntimeError if
    the module has a parameter to train, or an optimizer in its backward pass, that was frozen or
    missing when it was wrapped. Backward passes raise DistErrors, and a RuntimeError that names the
    parameters with missing gradients.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: AnyGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, torch.Tensor]] | None = None,
        param_to_hook_all_reduce: torch.Tensor | None = None,
        mixed_precision: object = None,
        device_mesh: torch.distributed.device_mesh.DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        ordered: bool | None = None,
        leaves: int | None = None,
    ) -> None:
        Module.__init__(self)
        self._join_config = JoinConfig()
        self._uneven: UnevenInputs | None = None
        self._contents = Contents(module)
        trained = self._contents.trained()
        self._placement = placement(self._contents.parameters(), device_ids, output_device)
        self.device_ids, self.output_device = self._placement
        self.device = next(iter(trained.values())).device
        self.device_type = self.device.type
        self.parameters_to_ignore = set(self._contents.ignored)
        self._attach(meant_group(process_group, device_mesh))
        self.module = module
        self.dim = dim
        at_start = broadcast_buffers is not False or forward_sync_buffers is not None
        forwards = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.forward_sync_buffers = forwards is None or forwards
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._limits = size_limits(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = max(self._limits)
        self.bucket_bytes_cap_list = list(self._limits) if bucket_cap_mb_list else []
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self._delayed = delayed_options(
            trained, delay_all_reduce_named_params, param_to_hook_all_reduce
        )
        self.mixed_precision = (
            None if mixed_precision is None else MixedPrecision.of(mixed_precision)
        )
        self.ordered = ordered_by_default() if ordered is None else ordered
        self.leaves = leaves
        if leaves is not None:
            leaf_tree(leaves, 0, 1)  # raises
            if self._contents.has_sync_bn():
                raise ValueError("leaves go without SyncBatchNorm, whose bits depend on the ranks")
        self._precision: LowPrecision | None = None
        self._parts: tuple[Gradients, Logger] | None = None
        self._comm_hook: tuple[object, CommHook] | None = None
        self._buffer_hook: BufferHook | None = None
        self._connect()
        if init_sync:
            same_everywhere(self._group, self._contents.states(buffers=at_start))

    def _connect(self) -> tuple[Gradients, Logger]:
        """Return the Gradients and the Logger; the first call makes both, with all ranks."""
        if self._parts is None:
            self._synced_step = -1
            trained, sparse = self._contents.trained(), self._contents.sparse()
            precision = self._precision = self._lowered(trained, sparse)
            gradients = Gradients(
                trained if precision is None else precision.leaves,
                sparse,
                self._group,
                targets=trained,
                dtypes=None if precision is None else precision.dtypes,
                as_views=self.gradient_as_bucket_view,
                options={
                    "size_limits": self._limits,
                    "skip_unused_buckets": self.skip_all_reduce_unused_params,
                    "ordered": self.ordered,
                    "leaves": 0 if self.leaves is None else self.leaves,
                    **self._delayed,
                },
                find_unused=self.find_unused_parameters,
                static=self.static_graph,
                on_end=None if precision is None else precision.release,
            )
            self._parts = gradients, self._logger(gradients.reducer)
            if self._comm_hook is not None:
                gradients.reducer.register_comm_hook(*self._comm_hook)
        return self._parts

    def _lowered(self, trained: dict[str, torch.Tensor], sparse: set[str]) -> LowPrecision | None:
        if self.mixed_precision is None:
            return None
        if sparse:
            raise ValueError(
                f"mixed precision takes no sparse gradients, as {min(sparse)} has: make its "
                "embedding with sparse=False, or let DistributedDataParallel ignore it"
            )
        ignored = self._contents.ignored
        made = LowPrecision(self.module, trained, ignored, self.mixed_precision)
        weakref.finalize(self, made.close)
        return made

    def _logger(self, reducer: Reducer) -> Logger:
        return Logger(
            reducer,
            **self._contents.fields(),
            gradient_as_bucket_view=int(self.gradient_as_bucket_view),
            broadcast_buffers=int(self.forward_sync_buffers),
            device_ids=" ".join(map(str, self.device_ids or ())),
            output_device=-1 if self.output_device is None else self.output_device,
        )

    @property
    def _gradients(self) -> Gradients:
        return self._connect()[0]

    @property
    def logger(self) -> Logger:
        """The Logger for the Reducer's passes."""
        return self._connect()[1]

    @property
    def reducer(self) -> Reducer:
        """The nc10d.Reducer for the gradients."""
        return self._gradients.reducer

    @property
    def my_leaves(self) -> Sequence[int]:
        """This rank's leaves in a step; ValueError without `leaves`.

        An iteration begins a step: RuntimeError, once, amid a step, which is dropped.
        """
        gradients = self._gradients
        found = gradients.reducer.leaves
        if found is None:
            raise ValueError("my_leaves: this module was wrapped without leaves")
        return StepLeaves(gradients, found.mine)

    @property
    def broadcast_buffers(self) -> bool:
        """Another name for `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Call the module; a backward pass from the output is reduced.

        RuntimeError, once, if an exception ended the last backward pass on every rank amid its
        gradients. If that happened on some ranks alone, they do not compute the same any more: the
        next calls on the group are a CollectiveMismatch on all ranks, which names the pass.
        """
        recording = torch.is_grad_enabled()
        reducing = recording and self.require_backward_grad_sync
        failure: DistError | None = None
        if self._precision is not None:
            self._precision.repair()
        try:
            self._before(recording, reducing)
        except DistError as error:
            # In a Join block the cause may be another rank's exception. If this rank's module is
            # about to raise one as well, its caller gets that, whichever rank was first.
            if not self._join_config.enable:
                raise
            failure = error
        try:
            output = self._call_module(*self._placement.moved((inputs, kwargs)))
        except BaseException:
            # Peers wait in the next layer that communicates. Without any, a rank may try again.
            if self._parts is not None and self.module.training and self._contents.has_sync_bn():
                self.reducer.leave()
            raise
        if failure is not None:
            raise failure
        if self._buffer_hook is not None:
            self._run_buffer_hook(after=True)
        self.require_forward_param_sync = reducing
        if recording:
            self._after(reducing, output)
        return output

    def _call_module(self, inputs: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        precision = self._precision
        if precision is None:
            return self.module(*inputs, **kwargs)
        inputs, kwargs = precision.inputs((inputs, kwargs))
        with precision.forward():
            return self.module(*inputs, **kwargs)

    @in_python
    def _before(self, recording: bool, reducing: bool) -> None:
        uneven = self._uneven if self._join_config.enable else None
        if recording:
            gradients, _ = self._connect()
            if gradients.reducer.arrived is None and self._contents.has_new_steps():
                self._reconnect()
                gradients = self._gradients
            self._contents.check_trained()
            gradients.reducer.prepare_for_forward()
        if uneven is not None:
            uneven.begin(EVALUATES + recording + reducing)
        self._synchronise(recording, reducing, uneven)

    def _synchronise(
        self, recording: bool, reducing: bool, uneven: UnevenInputs | None = None
    ) -> None:
        """Make the collectives before a forward pass, also for the other ranks' pass."""
        if recording:
            self._gradients.prepare(reducing)
        if self._buffer_hook is not None:
            self._run_buffer_hook(after=False)
        elif self.will_sync_module_buffers():
            src = 0 if uneven is None else uneven.source()
            same_everywhere(self._group, self._contents.buffers(), src)
            self._synced_step = self._step()
        if uneven is not None and reducing:
            uneven.count()

    def _shadow(self, state: int, uneven: UnevenInputs) -> None:
        """Make the collectives in the other ranks' forward and backward pass."""
        reducing = state == REDUCES
        self._synchronise(state >= RECORDS, reducing, uneven)
        if self._buffer_hook is not None:
            self._run_buffer_hook(after=True)
        self.require_forward_param_sync = reducing
        if reducing:
            means = self.reducer.shadow_pass()
            if uneven.is_followed or not isinstance(self._join_config, JoinConfig):
                self._gradients.take_means(means)

    @in_python
    def _after(self, reducing: bool, output: object) -> None:
        self._gradients.expect(reducing, output)

    @in_python
    def _run_buffer_hook(self, after: bool) -> None:
        hook = self._buffer_hook
        if hook is not None and hook.after is after and self.will_sync_module_buffers():
            hook.run(self._contents.buffers())

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward pass sends rank 0's buffers to every rank."""
        wanted = self.require_forward_param_sync and self.forward_sync_buffers
        if self.leaves is not None and self._synced_step == self._step():
            return False  # ranks have different numbers of passes in a step
        return wanted and bool(self._contents.buffers())

    def _step(self) -> int:
        leaves = None if self._parts is None else self.reducer.leaves
        return 0 if leaves is None else leaves.steps

    def _refuse_leaves(self, what: str) -> None:
        if self.leaves is not None:
            raise ValueError(f"{what} does not go with leaves: see DistributedDataParallel")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only, for forward passes inside the block.

        The next pass outside the block reduces the sums. Every rank must use the block for the same
        passes. ValueError with `leaves`.
        """
        self._refuse_leaves("no_sync")
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a Join block for this module alone, for ranks with different numbers of batches.

        A rank that has joined counts as a rank with zero gradients; without
        `divide_by_initial_world_size` it does not count, and the sum is divided by the number of
        ranks that have a batch. When the block ends, every rank has the parameters and buffers of
        the last rank that had a batch. See `nc10d.Join`.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> UnevenInputs:
        """Return the hook for a Join block, which takes `divide_by_initial_world_size` (True).

        ValueError with `skip_all_reduce_unused_params`: a joined rank does not know who is unused.
        ValueError with `leaves`.
        """
        self._refuse_leaves("join")
        if self.skip_all_reduce_unused_params:
            raise ValueError("a Join block takes no module with skip_all_reduce_unused_params")
        self.logger.note(join_uneven_inputs=1)
        self._uneven = UnevenInputs(self, kwargs.get("divide_by_initial_world_size", True))
        return self._uneven

    @property
    def join_device(self) -> torch.device:
        """The module's device."""
        return self.device

    @property
    def join_process_group(self) -> AnyGroup:
        """The module's group, as given or meant."""
        return self.process_group

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], object]) -> None:
        """Let `hook(state, bucket)` reduce the buckets; once, before the first backward pass.

        `bucket` has c10d's methods, which return tensors. The hook returns an nc10d Work or Future,
        or a torch.futures.Future. Its value is the reduced tensor, or a list that contains only
        this tensor. A sparse gradient has its own bucket, and buffer and value are sparse
        tensors. TypeError if the hook is not callable. The hooks in nc10d.reducer.hooks take the
        group as state.
        """
        self._refuse_leaves("a comm hook")
        with self.logger.reporting():
            if not callable(hook):
                raise TypeError(f"a comm hook must be callable, got {hook!r:.80}")
            self.reducer.register_comm_hook(state, on_arrays := on_tensors(hook))
        self._comm_hook = state, on_arrays

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not own_group():
            raise RuntimeError("only what is trained by the default group can be copied or pickled")
        omitted = {"process_group", "_group", "_contents"}
        kept = {name: x for name, x in self.__dict__.items() if name not in omitted}
        return {**kept, "_parts": None, "_uneven": None, "_precision": None, "_comm_hook": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Module.__setstate__(self, state)
        self._attach(meant_group())
        self._contents = Contents(self.module)


without_torchs(DistributedDataParallel)
Joinable.register(DistributedDataParallel)
