"""ZeroRedundancyOptimizer with torch's interface: every rank has only its own parameters' state.

    optimizer = nc10d.torch.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-3)
    loss(model(x)).backward()       # averaged by DistributedDataParallel
    optimizer.step()                # this rank's share, then everybody's values

Contract: constructor, methods and attributes are those of
torch.distributed.optim.ZeroRedundancyOptimizer, on an nc10d group. Parameters become what the
optimizer on a single process makes from the same gradients, bit by bit, since the same optimizer
runs on a part of the parameters. A saved state is the state on a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from nc10d.api.join import Joinable, JoinConfig, JoinHook
from nc10d.api.objects import gather_object
from nc10d.optim import Shares, partition
from nc10d.reducer.left_pass import LeftPass
from nc10d.torch.backend.groups import AnyGroup, meant_group, own_group
from nc10d.torch.optim.functional_steps import FunctionalOptimizer, require_separable
from nc10d.torch.optim.global_state import State, copy_options, merged, options_of, owned, share_of
from nc10d.torch.optim.param_buckets import ParamBuckets
from nc10d.torch.uneven_inputs import notify

_KEPT = ("optim", "parameters_as_bucket_view", "_owners", "_loads")


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Steps by an `optimizer_class(groups, **defaults)` on this rank's share of `params`.

    `params` are tensors of a single dense type, dicts of parameter groups, or pairs (name,
    tensor), the same on all ranks. Each parameter belongs to a single rank, and ranks own about
    equally many elements. `process_group` is an nc10d group, or a torch.distributed group with the
    backend "nc10d" (None: the default group). With `parameters_as_bucket_view`, parameters are
    views of flat tensors, which are sent whole; any reference to their old memory is outdated.

    Frozen parameters without a gradient are not sent. Learning-rate schedulers take it like any
    optimizer. The optimizer must treat each parameter alone: L-BFGS is a ValueError.

    With `overlap_with_ddp`, DistributedDataParallel's comm hook steps (`hook_with_zero_step`),
    and `step` does nothing. The first two backward passes train nothing, or three with a static
    graph. A state that is loaded before is used from the first step on.

    Blocks only with `parameters_as_bucket_view`, until all ranks call. ValueError without
    parameters, or if types differ; TypeError for anything else than tensors.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        process_group: AnyGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: object,
    ) -> None:
        self._owners: list[list[int]] = []
        self._made = False
        self._has_whole = False
        self._left: LeftPass | None = None
        self.overlap_with_ddp = overlap_with_ddp
        self._optimizer_class, self._defaults = optimizer_class, defaults
        self._overlapping = False
        self._pending: State | None = None
        require_separable(optimizer_class)
        Optimizer.__init__(self, params, defaults)
        self._join_config = JoinConfig()
        self._check_types()
        self._attach(process_group)
        self._loads = [0] * self.world_size
        for group in self.param_groups:
            self._own(group)
        self.parameters_as_bucket_view = parameters_as_bucket_view and not overlap_with_ddp
        self._buckets: ParamBuckets | None = None
        self.optim: Any = None
        self._make_optimizer()
        if not overlap_with_ddp:
            self._connect()
        self._made = True

    def _make_optimizer(self) -> None:
        rows = [self._share_of(group, owners) for group, owners in self._rows()]
        kind = self._optimizer_class
        make = partial(FunctionalOptimizer, kind) if self.overlap_with_ddp else kind
        self.optim = make(rows, **self._defaults)
        copy_options(self.optim.param_groups, self.param_groups)

    def _attach(self, process_group: AnyGroup | None) -> None:
        self.process_group = meant_group(process_group)
        self._group = own_group(process_group)
        self.rank, self.world_size = self._group.rank, self._group.size()
        self.global_rank = self._group.global_rank(self.rank)

    def _check_types(self) -> None:
        kinds = {x.type() for x in self._all_params}
        if len(kinds) != 1 or any(x.layout is not torch.strided for x in self._all_params):
            raise ValueError(
                "ZeroRedundancyOptimizer takes parameters of a single dense type, got "
                f"{', '.join(sorted(kinds))}: make an optimizer for each type"
            )

    @property
    def _all_params(self) -> list[torch.Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.param_groups))

    def _rows(self) -> list[tuple[dict[str, Any], list[int]]]:
        return list(zip(self.param_groups, self._owners, strict=True))

    def _own(self, group: dict[str, Any]) -> None:
        sizes = [x.numel() for x in group["params"]]
        self._owners.append(partition(sizes, self.world_size, self._loads))

    def _share_of(self, group: dict[str, Any], owners: list[int]) -> dict[str, Any]:
        return options_of(group) | {"params": owned(group["params"], owners, self.rank)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; every rank calls, with the same parameters.

        Other parameters' owners stay. Blocks as the constructor.
        """
        if self._made and self.overlap_with_ddp:
            raise RuntimeError(
                "add_param_group: with overlap_with_ddp the groups are fixed, since a step is part "
                "of the backward pass: give all groups to the constructor"
            )
        super().add_param_group(param_group)
        if not self._made:
            return  # the constructor
        group = self.param_groups[-1]
        try:
            self._check_types()
        except ValueError:
            self.param_groups.pop()
            raise
        self._own(group)
        self.optim.add_param_group(self._share_of(group, self._owners[-1]))
        copy_options(self.optim.param_groups, self.param_groups)
        self._connect()

    def _sent(self) -> list[bool]:
        """Return for each parameter whether it may change, so that the owner sends it."""
        return [x.requires_grad or x.grad is not None for x in self._all_params]

    def _connect(self) -> None:
        """Prepare the exchange for the parameters that change now."""
        self._sending = self._sent()
        pairs = zip(self._all_params, chain.from_iterable(self._owners), self._sending, strict=True)
        rows = [(x, owner) for x, owner, sent in pairs if sent]
        params, owners = [x for x, _ in rows], [owner for _, owner in rows]
        if self._buckets is not None:
            self._buckets.release()
            self._buckets = None
        if self.parameters_as_bucket_view:
            self._buckets = ParamBuckets(params, owners, self._group)
            params, owners = self._buckets.flats, self._buckets.owners
        self._shares = Shares(params, owners, self._group)

    def step(self, closure: Callable[[], float] | None = None, **kwargs: object) -> float | None:
        """Step by this rank's share, then give every rank all values; return the loss, if any.

        `closure` and `kwargs` go to the optimizer. All ranks call; blocks as a broadcast. After an
        exception on some ranks alone, the next calls on the group are a CollectiveMismatch on all.
        With `overlap_with_ddp` nothing happens: the backward pass has stepped.
        """
        if self.overlap_with_ddp:
            return None
        notify(self)
        if self._sent() != self._sending:
            self._connect()
        copy_options(self.param_groups, self.optim.param_groups)
        if self._left is not None:
            self._left.wait()
            self._left = None
        with_closure = {} if closure is None else {"closure": closure}
        try:
            loss = self.optim.step(**with_closure, **kwargs)
            copy_options(self.optim.param_groups, self.param_groups)
            if self._buckets is not None:
                self._buckets.attach()
            self._shares.share()
        except BaseException:
            x = self._all_params[0]
            nothing = None if x.is_cpu else x.new_empty(0)
            self._left = LeftPass(self._group, "a step of ZeroRedundancyOptimizer", nothing)
            raise
        return loss

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the whole state in the host memory on the group's rank `to`.

        All ranks call. Blocks until the state has arrived or has been sent. CodecError, on all
        ranks, if a rank's state has objects that can't be sent (docs/objects.md).
        """
        self._require_owners()
        copy_options(self.param_groups, self.optim.param_groups)
        shares: list[Any] | None = [None] * self.world_size if self.rank == to else None
        gather_object(self.optim.state_dict()["state"], shares, group=self._group, group_dst=to)
        self.state.clear()
        if shares is not None:
            params = self._all_params
            self.state.update((params[i], x) for i, x in merged(shares, self._owners).items())
        self._has_whole = shares is not None

    def state_dict(self) -> State:
        """Return the state as `consolidate_state_dict` found it, on the rank that received it.

        The state is that of an `optimizer_class` on a single process. RuntimeError on other ranks.
        """
        if not self._has_whole:
            raise RuntimeError(
                "the optimizer's state has not been collected on this rank: call "
                f"consolidate_state_dict(to={self.rank}) on all ranks first"
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        """Load this rank's share of a whole state, from any world size or a plain optimizer.

        Every rank calls with the whole state, which stays unchanged. ValueError if it has other
        parameter groups.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        share = share_of(state_dict, self._owners, self.rank)
        if self._waits_for_owners():
            self._pending = state_dict
            copy_options(share["param_groups"], self.param_groups)
        else:
            self.optim.load_state_dict(share)
            copy_options(self.optim.param_groups, self.param_groups)
        self.state.clear()
        self._has_whole = False
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _waits_for_owners(self) -> bool:
        return self.overlap_with_ddp and not self._overlapping

    def _require_owners(self) -> None:
        if self._waits_for_owners():
            raise RuntimeError(
                "with overlap_with_ddp there is no state before the third backward pass (with a "
                "static graph, the fourth)"
            )

    def _begin_overlap(self, owners: Mapping[torch.Tensor, int]) -> None:
        """Divide the state by the trained parameters' owners, before the first step."""
        known = set(self._all_params)
        if not owners.keys() <= known:
            raise ValueError(
                "DistributedDataParallel trains a parameter that is not in the optimizer: give the "
                "optimizer all of model.parameters()"
            )
        self._owners = [[owners.get(x, 0) for x in group["params"]] for group in self.param_groups]
        self._make_optimizer()
        self._overlapping = True
        if self._pending is not None:
            self.optim.load_state_dict(share_of(self._pending, self._owners, self.rank))
            self._pending = None

    def _before_steps(self) -> None:
        copy_options(self.param_groups, self.optim.param_groups)

    def _after_steps(self) -> None:
        copy_options(self.optim.param_groups, self.param_groups)

    def join_hook(self, **_kwargs: object) -> JoinHook:
        """Return the hook for a Join block: a rank without a batch steps by the gradients it has.

        An earlier hook in the block, such as DistributedDataParallel's, sets these gradients.
        """
        return _StepHook(self)

    @property
    def join_device(self) -> torch.device:
        """The first parameter's device."""
        return self._all_params[0].device

    @property
    def join_process_group(self) -> AnyGroup:
        """The group, as given or meant."""
        return self.process_group

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not own_group():
            raise RuntimeError("only an optimizer on the default group can be copied or pickled")
        if self.overlap_with_ddp:
            raise RuntimeError("an optimizer with overlap_with_ddp steps in a hook: copy its state")
        kept = {name: self.__dict__[name] for name in _KEPT}
        return {**super().__getstate__(), **kept, "_place": (self.rank, self.world_size)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        place = state.pop("_place")
        super().__setstate__(state)
        self._join_config = JoinConfig()
        self._attach(None)
        if place != (self.rank, self.world_size):
            raise RuntimeError(
                f"this is the share of rank {place[0]} of {place[1]}, and this rank is "
                f"{self.rank} of {self.world_size}: load a state_dict() instead of a pickle"
            )
        self._buckets, self._pending, self._left = None, None, None
        self._has_whole = self.overlap_with_ddp = self._overlapping = False
        self._made = True
        self._connect()


class _StepHook(JoinHook):
    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero

    def main_hook(self) -> None:
        """Step by the current gradients, with the other ranks."""
        self._zero.step()
