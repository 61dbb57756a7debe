"""A Logger's fields are c10d's, with the values of the passes."""

import gc

import numpy as np
import pytest

from nc10d.reducer.logger import Logger
from nc10d.reducer.reducer import Reducer
from nc10d.reducer.timing import PassTimes
from nc10d.testing import run_local


def test_durations_are_differences_of_moments_and_0_for_unknown_moments():
    times = PassTimes(100, 200, [30, 70, 0], 240, 300)
    assert times.durations() == {
        "forward_compute_time": 100,
        "backward_compute_time": 70,
        "backward_comm_time": 60,
        "backward_compute_comm_overlap_time": 30,
    }
    assert set(PassTimes(0, 200, [], 0, 300).durations().values()) == {0}


def passes(reducer, count):
    for _ in range(count):
        reducer.prepare_for_forward()
        reducer.begin()
        for param in (1, 2, 0):
            reducer.grad_ready(param, np.ones(param + 1, np.float32))
        reducer.finish()
        reducer.rebuild()


def new_reducer(group):
    params = [np.zeros(1, np.float32), np.zeros(2, np.float32), np.zeros(3, np.float32)]
    return Reducer(params, group, cap_bytes=8, first_bytes=8)


def logged(group):
    reducer = new_reducer(group)
    logger = Logger(reducer, module_name="Net")
    before = logger.data()
    passes(reducer, 3)
    return before, logger.data()


def test_fields_describe_the_reducer_and_its_passes():
    (before, after), _ = run_local(logged, 2)
    assert before["has_rebuilt_buckets"] == 0
    assert "iteration" not in before
    fixed = {
        "world_size": 2,
        "rank": 0,
        "dtypes": "float32",
        "module_name": "Net",
        "num_parameter_tensors": 3,
        "total_parameter_size_bytes": 24,
        "bucket_sizes": "12, 12",
        "comm_hook": "",
        "iteration": 2,
        "has_rebuilt_buckets": 1,
        "rebuilt_per_bucket_param_indices": "1, 2, 0",
        "rebuilt_bucket_sizes": "8, 12, 4",
        "prev_iteration_grad_ready_order_indices": "1, 2, 0",
        "unused_parameter_size": 0,
    }
    assert fixed.items() <= after.items()
    moments = [
        after[f"{part}_time_{end}"]
        for part, end in [
            ("forward_compute", "start"),
            ("backward_compute", "start"),
            ("backward_comm", "start"),
            ("backward_compute", "end"),
            ("backward_comm", "end"),
        ]
    ]
    assert moments == sorted(moments)
    assert after["avg_backward_compute_time"] > 0


@pytest.mark.ranks(1)
def test_the_first_ten_passes_are_sampled_and_then_a_pass_per_rate(world):
    reducer = new_reducer(world)
    logger = Logger(reducer)
    logger.set_sample_rate(6)
    seen = []
    for _ in range(20):
        passes(reducer, 1)
        seen.append(logger.data()["iteration"])
    assert seen == [*range(10), 9, 9, *[12] * 6, 18, 18]


@pytest.mark.ranks(1)
def test_an_error_of_a_pass_is_in_the_fields(world):
    reducer = new_reducer(world)
    logger = Logger(reducer)
    assert "error" not in logger.data()
    reducer.begin()
    with pytest.raises(RuntimeError) as caught:
        reducer.finish()
    found = logger.data()
    assert (found["has_error"], found["error"]) == (1, str(caught.value))
    with pytest.raises(ValueError, match="a caller's"), logger.reporting():
        raise ValueError("a caller's")
    assert logger.data()["error"] == "a caller's"


def test_fields_tell_the_environment(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ((fields, _),) = run_local(logged, 1)
    assert (fields["master_port"], fields["cuda_visible_devices"]) == ("29500", "N/A")


@pytest.mark.ranks(1)
def test_a_rate_is_at_least_1_and_a_logger_is_not_kept_alive(world):
    reducer = new_reducer(world)
    logger = Logger(reducer)
    with pytest.raises(ValueError, match="from 1 on, got 0"):
        logger.set_sample_rate(0)
    del logger
    gc.collect()
    passes(reducer, 1)


def test_every_field_of_torchs_that_a_reducer_can_know_is_there():
    torchs = """backend_name bucket_sizes dtypes prev_iteration_grad_ready_order_indices
        rebuilt_bucket_sizes rebuilt_per_bucket_param_indices torch_distributed_debug
        avg_backward_comm_time avg_backward_compute_comm_overlap_time avg_backward_compute_time
        avg_forward_compute_time backward_comm_time backward_comm_time_end backward_comm_time_start
        backward_compute_comm_overlap_time backward_compute_time backward_compute_time_end
        backward_compute_time_start bucket_cap_bytes find_unused_parameters forward_compute_time
        forward_compute_time_start has_rebuilt_buckets iteration num_buckets_reduced
        cuda_visible_devices master_addr master_port
        num_parameter_tensors rank total_parameter_size_bytes unused_parameter_size world_size"""
    ((_, fields), *_) = run_local(logged, 2)
    assert set(torchs.split()) <= set(fields)
