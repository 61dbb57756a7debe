"""torch.distributed's backend "nc10d": torch's calls on nc10d groups.

| module | contents |
|---|---|
| `creation` | torch's calls to make a group, also for gloo, and the nc10d group below that |
| `group_calls` | a torch group's calls, on either base class |
| `launching` | how a call is launched |
| `works` | torch's Work, Future and profiler event for an nc10d operation |
| `reductions`, `torch_errors` | torch's ReduceOp and sparse tensors; torch's errors |
| `groups` | from a torch group to the nc10d group |
| `side_by_side` | both default groups at once; a torch group on an nc10d group |
| `c10d_operators` | torch 2.13's operators of collectives, for modes and wrapping tensors |
| `group_methods` | methods of torch 2.14's groups that call nc10d's backend directly |
| `torch_functions` | torch functions that refuse all backends but torch's own |
| `flight_traces` | torch 2.15's functions that dump the flight recorder |
| `torch_versions` | what differs between versions of torch |
"""
