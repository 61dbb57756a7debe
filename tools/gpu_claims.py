"""Which claims of the docs a run of tools/gpu_check.py has shown: each names the rows that show it.

The claims are c10d's abilities that concern devices, in the words of nc10d's docs. A claim is shown
if every one of its patterns has a row, and all those rows passed on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from gpu_rows import Row

from nc10d.cuda.driver import driver


class Claim(NamedTuple):
    """A claim, and parts of the names of the rows that show it; none: no row shows it yet."""

    text: str
    rows: tuple[str, ...]


def _claim(text: str, *rows: str) -> Claim:
    return Claim(text, rows)


CLAIMS = (
    # Calls and works
    _claim(
        "collectives and messages give the oracle's results", "conformance, 1", "conformance, 2"
    ),
    _claim("a call keeps its place in its stream", "a_collective_keeps_its_place", "the_current_"),
    _claim("wait() orders streams and does not block the host", "waiting_does_not_block_the_host"),
    _claim("a wait with a timeout blocks, and fails in its caller alone", "waiting_with_a_timeout"),
    _claim("a Work keeps its arrays until it is over", "operations_in_flight_keep_their_arrays"),
    _claim("callbacks, futures and await", "callbacks_and_await"),
    _claim("durations are measured on the device", "groups_have_options_of_their_own"),
    _claim("strided arrays go in C order", "strided_arrays"),
    _claim("a caller's mistake is refused before anything is sent", "mistakes_raise_before"),
    _claim(
        "calls that differ between ranks are an error on all", "calls_are_compared", "run_ahead"
    ),
    _claim("a receive from any rank", "messages_come_from_whoever_sends"),
    _claim("ordered reductions have the reference's bits", "known_reductions_fold_in_rank_order"),
    _claim(
        "reductions of one's own, by a kernel",
        "own_reductions_fold",
        "rows_of_numbers",
        "fields_may_lie",
    ),
    _claim("a CUDA graph repeats a fold", "a_graph_repeats_its_folds"),
    # Coalescing
    _claim("a block means its calls in order", "a_block_means_its_calls", "a_block_is_its_calls"),
    _claim("a block's messages and collectives do not race", "messages_and_collectives_of_a_block"),
    _claim("a plan is launched again", "a_plan_is_launched"),
    _claim("a block's CPU time beside torch's", "nc10d, coalesced", "CPU time of a block"),
    # Groups and failures
    _claim("several backends in a group, by kind of device", "both_kinds_of_arrays"),
    _claim("a group is bound to its device_id at once", "a_group_with_a_device"),
    _claim("a group has NCCL options of its own", "groups_have_options_of_their_own"),
    _claim("nonblocking communicators", ", nonblocking 1", ", nonblocking 2"),
    _claim("an abort ends all communicators", "an_abort", "ended_by_an_abort"),
    _claim(
        "an abort frees the host, whatever else is stuck on the device",
        "an_abort_ends_a_stuck",
        "an_abort_ends_two_stuck_communicators",
        "an_abort_ends_two_stuck_groups",
    ),
    _claim("an abort frees the host although a CUDA graph lives", "an_abort_with_a_live_graph"),
    _claim("a late peer does not hold the end of a group", "a_late_peer_does_not_hold"),
    _claim("both ranks receive first, with 8 hardware queues", "received first, 8 queues"),
    _claim("both ranks receive first, with 32 hardware queues", "received first, 32 queues"),
    _claim("memory of temporaries is bounded", "memory_of_temporaries_is_bounded"),
    _claim("memory of torch's temporaries is bounded", "memory of torch's temporaries"),
    _claim("durations need no torch", "durations_need_no_torch"),
    _claim("groups are split, and end alone", "groups_of_groups"),
    _claim("ranks share a card as hosts of their own", "conformance, 2 ranks"),
    _claim("the staged backend", "staged, 2 ranks"),
    # NCCL's own features
    _claim("memory registered with NCCL", "registered_memory_is", "memory_is_registered"),
    _claim("symmetric memory", "symmetric_memory"),
    _claim("windows: put, signal, wait_signal", "a_put_is_there", "a_wrong_put"),
    _claim("a stream that waits for a signal holds up no collective", "waits_for_a_signal"),
    _claim("suspend, resume, memory_stats", "a_suspended_group", "suspending_waits"),
    _claim("estimates of times", "an_estimate_launches_nothing"),
    _claim("communicators grow", "a_group_grows"),
    _claim("arrays of Numba, also in NCCL's memory", "arrays of numba_cuda", "pool of numba_cuda"),
    _claim("arrays of CuPy, also in NCCL's memory", "arrays of cupy", "pool of cupy"),
    _claim("torch's tensors in NCCL's memory", "pool of torch"),
    # Gradients
    _claim("a Reducer averages gradients on devices", "a_reducer_averages_gradients"),
    _claim(
        "one launch packs a bucket; none where gradients lie in it",
        "gradients_of_a_bucket",
        "gradients_in_their_buckets",
    ),
    _claim("hooks cast in the launch that packs", "hooks_that_cast"),
    _claim("hooks on device arrays", "hooks_work_on_devices", "hooks_that_compute_give"),
    _claim("unused parameters, told on the device", "used_parameters_are_those"),
    _claim("sparse gradients on devices", "rows_on_a_device_are_averaged"),
    _claim("a bucket waits for every stream of its gradients", "a_bucket_leaves_behind"),
    _claim("packing near a copy's bandwidth", "nc10d, pack", "pack's share"),
    _claim("functional collectives on device arrays", "functional_calls_are"),
    # Graphs
    _claim("a CUDA graph repeats its collectives", "a_graph_repeats"),
    _claim("a captured training step reads nothing on the host", "a_captured_training_step"),
    _claim("a step of torch's capturable Adam, captured", "a_captured_step_of_torch"),
    # torch
    _claim("DistributedDataParallel gives torch's gradients, by NCCL", "perceptron by nccl"),
    _claim("DistributedDataParallel gives torch's gradients, staged", "perceptron by staged"),
    _claim("mixed precision", "mixed_precision_trains"),
    _claim("ZeroRedundancyOptimizer on devices", "zero_is_the_plain_optimizer"),
    _claim("state from rank 0 to the ranks' own devices", "objects_come_to_the_device"),
    # No row yet
    _claim("modules over several devices of a rank"),
    _claim("UCC on device memory"),
    _claim("RCCL: loads and tells its version; nothing else is claimed"),
    _claim("bandwidth over several cards", "all_reduce of"),
)
CHECKS = tuple(dict.fromkeys(row for claim in CLAIMS for row in claim.rows))
"""The rows that claims need, for a machine that can run none."""


def where() -> str:
    """Return what a passed row has been run on."""
    driver()
    emulated = hasattr(ctypes.CDLL("libcuda.so.1"), "cuemuHostWaits")
    return f"passes over the emulators; {NOT_ON_A_GPU}" if emulated else "shown"


NOT_ON_A_GPU = "not yet run on a GPU"


def state_of(claim: Claim, rows: Sequence[Row], passed: str) -> str:
    """Return `passed` if rows show a claim, else why they do not."""
    if not claim.rows:
        return "not shown: no row checks it"
    if not rows:
        return passed
    for part in claim.rows:
        found = [row for row in rows if part in row.name]
        bad = next((row for row in found if not row.shows), None)
        if bad is not None:
            return f"not shown: {bad.name.strip()}: {bad.result}"
        if not found:
            return f"not shown: {part} has not run"
    return passed


def show(rows: Sequence[Row], passed: str) -> None:
    """Print each claim with its state, and how many are shown."""
    states = [state_of(claim, rows, passed) for claim in CLAIMS]
    print("\nClaims of the docs:")
    for claim, state in zip(CLAIMS, states, strict=True):
        print(f"     {claim.text:68} {state}")
    print(f"\n{states.count('shown')} of {len(CLAIMS)} claims are now shown on a GPU.", flush=True)
