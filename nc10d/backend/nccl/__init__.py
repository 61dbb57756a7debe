"""The NCCL backend: device arrays by NCCL, through ctypes, cuda.bindings and one compiled loop.

`init_process_group()` has it for device arrays; nothing of it is loaded before the first one. From
the bottom: `table` (NCCL's header as data), `library` and `communicator` (NCCL's calls as Python),
`calls` (an operation as calls), `programs` (a launch as a table of calls) and `native` (the loop),
`lanes` (a communicator and its stream), `works`, `flights`, `watchdog`, `site` and `backend`.

What is different from other backends, because NCCL is:

- `wait()` puts the operation in front of what is queued next on the current stream and does not
  block the host, as c10d has it; `wait_blocking()` and `wait(timeout)` do block.
- 16-bit ints can be moved but not reduced; bitwise reductions are for bools; products of complex
  numbers are refused. What NCCL adds in which order is its own affair; MIN and MAX of NaNs too.
- Arrays must be aligned to their element; others are a ValueError before anything is sent. Strided
  ones go by way of a copy in C order, which costs a copy of the driver's for each row that lies
  apart, and are refused where that are thousands. c10d sends permuted ones without gaps as they lie
  in memory, which is wrong where ranks' differ, and refuses all others.
- Arrays must be on one device.
- A receive must name its sender (ValueError); c10d's NCCL has no other kind either. A message of a
  coalescing block meets only one of a block.
- Ranks that make different calls are found by their timeout, not at once.
"""
