"""torch.distributed's backend "nc10d": torch's calls on groups of nc10d.

| module | contents |
|---|---|
| `creation` | what torch calls to make a group, and the group of nc10d below it |
| `group_calls` | the calls of a torch group, on either base class |
| `launching` | how a call is launched |
| `works` | torch's Work, Future and event in a profile for an operation of nc10d |
| `reductions`, `torch_errors` | torch's ReduceOp and sparse tensors; its errors |
| `groups` | from a torch group to the group of nc10d |
| `side_by_side` | both default groups at once; a torch group on a group of nc10d |
| `c10d_operators` | torch 2.13's operators of collectives, for modes and wrapping tensors |
| `group_methods` | methods of torch 2.14's groups that call nc10d's backend directly |
| `torch_functions` | functions of torch that refuse all backends but its own |
| `flight_traces` | functions of torch 2.15 that dump its flight recorder |
| `torch_versions` | what differs between versions of torch |
"""
