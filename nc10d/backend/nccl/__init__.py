"""The NCCL backend: device arrays by NCCL, through ctypes, cuda.bindings and a compiled loop.

`init_process_group()` uses NCCL for device arrays, and loads NCCL for the first such array.
Packages, from the bottom, each importing only those before:

- `bindings`: NCCL's header as data, NCCL's functions as Python, and the compiled loop of C calls.
- `comm`: communicators, and their streams.
- `launch`: an operation as NCCL calls, a launch as a table of calls, the cache of launches, and the
  calls as peers compare them.
- this package: works, pending works, the watchdog, receives from any rank, a group on its device,
  and the backend; above it what `nc10d.nccl` offers: registered memory, windows, suspension,
  estimates, pools.

NCCL makes this backend different from others:

- `wait()` makes the current stream wait for the operation and does not block the host, as in c10d;
  `wait_blocking()` and `wait(timeout)` do block.
- 16-bit ints can be moved but not reduced; bitwise reductions are for bools; complex products are
  refused. NCCL chooses the order in which sums are formed, and the result of MIN and MAX for NaNs.
- Reductions in rank order (`SUM.ordered`, and one's own) are folded by kernels of nc10d, for which
  numba-cuda is needed: an UnsupportedPlatform without. They need room on the device.
- A CUDA graph captures calls whose communicators have been formed, and no barrier.
- Messages from a rank to another are received in the order of their sends; see NcclOptions.
- Arrays must be aligned to their elements; others are a ValueError before anything is sent. Strided
  arrays are copied in C order, by a kernel. c10d sends permuted arrays without gaps as they lie in
  memory, which is wrong if ranks' strides differ, and refuses all others.
- All of a group's arrays must be on the same device.
- A receive from any rank has to be launched by itself (ValueError in a block), and needs the CPU
  backend in the group, or as its failure detector. Its timeout fails this receive alone.
- Ranks that make different calls raise CollectiveMismatch, but the earlier ranks' arrays are
  undefined then. The sizes of exchanges with a size per rank are not compared.
"""
