"""torch.distributed's backend "nc10d": torch's calls on groups of nc10d.

| module | contents |
|---|---|
| `creation` | what torch calls to make a group, and the group of nc10d below it |
| `group_calls` | the calls of a torch group, on either base class |
| `launching`, `profiling` | how a call is launched; its event in a profile |
| `works` | torch's Work and Future for an operation of nc10d |
| `reductions`, `torch_errors` | torch's ReduceOp and errors |
"""
