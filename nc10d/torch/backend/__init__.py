"""torch.distributed's backend "nc10d": torch's calls on groups of nc10d.

| module | contents |
|---|---|
| `creation` | what torch calls to make a group, and the group of nc10d below it |
| `group_calls` | the calls of a torch group, on either base class |
| `launching`, `profiling` | how a call is launched; its event in a profile |
| `works` | torch's Work and Future for an operation of nc10d |
| `reductions`, `torch_errors`, `sparse` | torch's ReduceOp, errors and sparse tensors |
| `groups` | from a torch group to the group of nc10d |
| `side_by_side` | both default groups at once; a torch group on a group of nc10d |
| `c10d_operators` | torch 2.13's operators of collectives, for modes and wrapping tensors |
| `torch_functions` | functions of torch that refuse all backends but its own |
"""
